"""Tables of cards: rows with mean and deviation over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """Runs that differ in nothing but the seed."""

    experiment: dict[str, Any]
    cards: tuple[dict[str, Any], ...]

    def values(self, result: str) -> list[float]:
        """One result of each run, by seed; NaN where it has none: of pictures never asked for there may be none."""
        results = (card["results"][result] for card in self.cards)
        return [math.nan if value is None else float(value) for value in results]

    def mean(self, result: str = "error") -> float:
        return float(np.mean(self.values(result)))

    def sd(self, result: str = "error") -> float | None:
        """Deviation over seeds; None with one seed."""
        values = self.values(result)
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def text(self, result: str = "error", digits: int = 1) -> str:
        """`mean ± deviation`; nothing where a run has no such result."""
        if math.isnan(self.mean(result)):
            return ""
        sd = self.sd(result)
        return f"{self.mean(result):.{digits}f}" + ("" if sd is None else f" ± {sd:.{digits}f}")


def rows(cards: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Cards grouped over seeds, in the order in which they came; one that comes twice is no second seed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for card in cards:
        key = json.dumps({k: v for k, v in card["experiment"].items() if k != "seed"}, sort_keys=True)
        group = groups.setdefault(key, [])
        group += [] if card in group else [dict(card)]
    return [
        Row(group[0]["experiment"], tuple(sorted(group, key=lambda card: int(card["experiment"]["seed"]))))
        for group in groups.values()
    ]


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers.

    >>> print(markdown(["method", "error"], [["bn", "20.8"]]))
    | method | error |
    | --- | ---: |
    | bn | 20.8 |
    """
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(header), rule, *map(list, lines)])
