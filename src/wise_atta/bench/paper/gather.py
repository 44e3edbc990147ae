"""What was run of a table or figure? Cards found in folders, laid to the rows that they are runs of."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from wise_atta import errors
from wise_atta.bench import runs as bundles
from wise_atta.bench.chance import all_nudged
from wise_atta.bench.experiment import card_files, whole
from wise_atta.bench.paper.define import ALIASES, Spot, experiment_of, has_chance, own_options, places, rows
from wise_atta.bench.paper.items import Column, Item, Row
from wise_atta.bench.record import read_json, read_parquet
from wise_atta.bench.rivals import SEEDS, SETTINGS

T = TypeVar("T")
TENTHS = 10
# What makes a run one of a row. All else, such as a learning rate, has to be the same in all runs of the row.
_FIELDS = (
    *("data", "protocol", "severity", "batch", "model", "method", "policy", "utility", "selector", "ratio", "labels"),
    *(
        "exhaust",
        "early",
        "delay",
        "noise",
        "context",
        "late_weight",
        "late_limit",
        "expires_after",
        "statistics",
        "prior",
    ),
)
_OPTIONS = (
    *("slack", "credit", "ties", "window", "warmup", "horizon", "total", "exact", "block", "only_selected"),
    *("train_head", "statistics", "ratio", "policy", "selector", "utility", "labels"),
)
_FREE = frozenset({"seed", "workers", "tag"})


@dataclass(frozen=True)
class Run:
    """A finished run: its card, and what figures are drawn from beyond the card.

    Parameters
    ----------
    folder
        Where its rows are read from, if they are needed.
    kept
        Series that were kept beside a published card.
    """

    card: Mapping[str, Any]
    folder: Path | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tenths(self) -> list[int] | None:
        """Labels asked for in each tenth of the stream; None where the run's rows are not at hand."""
        return self._series("tenths", "steps", tenths_of)

    @property
    def queries(self) -> list[list[float]] | None:
        """Entropy and drift of every sample that was asked about; None where the run's rows are not at hand."""
        return self._series("queries", "queries", queries_of)

    @property
    def classes(self) -> int:
        return int(self.card["provenance"]["stream"]["classes"])

    def _series(self, name: str, file: str, make: Callable[[Sequence[Mapping[str, Any]]], list[T]]) -> list[T] | None:
        if name in self.kept:
            return list(self.kept[name])
        path = None if self.folder is None else self.folder / f"{file}.parquet"
        return None if path is None or not path.exists() else make(read_parquet(path))


def tenths_of(steps: Sequence[Mapping[str, Any]]) -> list[int]:
    """Labels asked for in each tenth of a stream.

    >>> tenths_of([{"asked": 1}] * 15 + [{"asked": 0}] * 5)
    [2, 2, 2, 2, 2, 2, 2, 1, 0, 0]
    """
    asked = np.array([row["asked"] for row in steps])
    where = np.arange(len(asked)) * TENTHS // max(1, len(asked))
    return [int(asked[where == tenth].sum()) for tenth in range(TENTHS)]


def queries_of(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Entropy and drift of every question, in few digits; without those whose drift was not computed."""
    known = [(row["entropy"], row["drift"]) for row in rows if row["drift"] is not None]
    return [[round(entropy, 4), float(f"{drift:.4g}")] for entropy, drift in known]


def read(paths: Sequence[Path], problems: list[str] | None = None) -> list[Run]:
    """All runs in folders, bundles and published lists of cards, each once.

    A folder of a run holds `card.json`; published runs are a list, `cards.json`, with `series.json` beside it.
    `problems` takes what cannot be read, which otherwise is an error.
    """
    found: dict[str, Run] = {}
    for path in paths:
        if not path.exists():
            raise errors.DataError(f"{path} does not exist: give folders of runs, bundles, or published cards")
        for file in card_files(path):
            try:
                runs = _in(file)
            except errors.DataError as error:
                if problems is None:
                    raise
                problems.append(str(error))
                continue
            for run in runs:
                found.setdefault(f"{run.card['digest']} {run.card['provenance'].get('device')}", run)
    return list(found.values())


def _in(file: Path) -> list[Run]:
    if file.suffix != ".json":
        return [
            Run(
                one.card,
                None,
                {"tenths": tenths_of(one.steps), **({"queries": queries_of(one.queries)} if one.queries else {})},
            )
            for one in bundles.find([file]).runs
        ]
    return [Run(_whole(file, read_json(file)), file.parent)] if file.name == "card.json" else _published(file)


def _published(file: Path) -> list[Run]:
    beside = file.with_name(file.name.replace("cards", "series"))
    series = read_json(beside) if beside.exists() else {}
    try:
        cards = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise errors.DataError(f"{file} cannot be read: {error}") from error
    if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
        raise errors.DataError(f"{file} is not a list of run cards")
    return [Run(card, None, series.get(card["digest"], {})) for card in (_whole(file, one) for one in cards)]


def _whole(file: Path, card: dict[str, Any]) -> dict[str, Any]:
    if "digest" not in card:
        raise errors.DataError(f"{file} is not a run card: it has no 'digest'")
    return whole(card, str(file))


@dataclass(frozen=True)
class Cell:
    """The runs of one row at one place, by seed."""

    row: Row
    spot: Spot
    runs: tuple[Run, ...]

    def values(self, domain: str | None = None, result: str = "error") -> dict[int, float]:
        """A result by seed: of the whole stream, or the error in one domain."""
        return {
            int(run.card["experiment"]["seed"]): float(
                run.card["results"][result] if domain is None else run.card["results"]["by_domain"][domain]
            )
            for run in self.runs
        }

    @property
    def nudged(self) -> list[list[float]]:
        """Errors of runs with nudged weights, for each seed whose card has a spread of its own."""
        return all_nudged(run.card for run in self.runs)

    @property
    def limit(self) -> int | None:
        """Pictures a domain, where the stream was made shorter than the setting's."""
        found = self.runs[0].card["experiment"]["stream"].get("limit")
        return None if found == self.spot.setting.fields.get("stream", {}).get("limit") else found

    @property
    def tuned(self) -> dict[str, Any]:
        """Options of the runs that neither the row nor the setting asks for: what was tuned."""
        known = {**self.spot.setting.options.get(self.row.method, {}), **own_options(self.row, self.spot)}
        options = self.runs[0].card["experiment"]["options"]
        return {name: value for name, value in options.items() if name not in known or known[name] != value}

    @property
    def wanted(self) -> int:
        """How many seeds are enough: the paper's three; one where nothing is drawn, unless streams differ as well."""
        return len(SEEDS) if has_chance(self.row) else max(1, len(self.runs))


@dataclass(frozen=True)
class Measured:
    """A number over seeds.

    Parameters
    ----------
    by_seed
        What each seed gave.
    drawn
        Whether another seed can give another number; otherwise one value stands for all seeds.

    Examples
    --------
    >>> Measured({0: 1.0, 41: 2.0, 58: 3.0}).text()
    '2.0 ± 1.0'
    """

    by_seed: Mapping[int, float]
    drawn: bool = True

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.by_seed.values())))

    @property
    def sd(self) -> float | None:
        values = list(self.by_seed.values())
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def text(self, digits: int = 1, sign: str = "") -> str:
        sd = "" if self.sd is None else f" ± {self.sd:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{sd}"

    def minus(self, other: Measured) -> Measured:
        """The difference seed by seed, over the seeds that both were run with."""
        return self._joined(other, lambda a, b: a - b)

    def plus(self, other: Measured) -> Measured:
        """The sum seed by seed."""
        return self._joined(other, lambda a, b: a + b)

    def _joined(self, other: Measured, join: Callable[[float, float], float]) -> Measured:
        one, two = self._for(other.by_seed), other._for(self.by_seed)
        both = {seed: join(one[seed], two[seed]) for seed in one if seed in two}
        # Without a seed in common the means are all there is to compare.
        return Measured(both or {0: join(self.mean, other.mean)}, self.drawn or other.drawn)

    def _for(self, seeds: Mapping[int, float]) -> Mapping[int, float]:
        alone = not self.drawn and len(self.by_seed) == 1
        return dict.fromkeys(seeds, self.mean) if alone else self.by_seed


class Gathered:
    """The runs of a table or figure on the paper's data, or on one setting at hand."""

    def __init__(self, found: Item, on: str | None, cells: Mapping[tuple[str, str], Cell]) -> None:
        self.item, self.on, self.cells = found, on, cells
        self.spots = list(dict.fromkeys(cell.spot.name for cell in cells.values()))

    def cell(self, row: str, spot: str) -> Cell | None:
        return self.cells.get((row, spot))

    def nudged(self, row: str, spot: str) -> list[list[float]]:
        """Errors of a row's runs with nudged weights, by seed."""
        cell = self.cell(row, spot)
        return [] if cell is None else cell.nudged

    def measured(self, row: str, column: Column | str) -> Measured | None:
        """What was measured in a column of the paper, or at a spot; None if not all that it needs was run."""
        if isinstance(column, str):
            column = Column(column, (column,))
        parts: list[Measured] = []
        for place in column.places:
            cell = self.cell(row, place)
            if cell is None or not cell.runs:
                return None
            parts.append(Measured(cell.values(column.domain), has_chance(cell.row)))
        total = functools.reduce(Measured.plus, parts)
        return Measured({seed: value / len(parts) for seed, value in total.by_seed.items()}, total.drawn)

    @property
    def runs(self) -> list[Run]:
        """Every run once."""
        return list({id(run): run for cell in self.cells.values() for run in cell.runs}.values())

    @property
    def tuned(self) -> dict[str, dict[str, Any]]:
        """Tuned options by method."""
        return {cell.row.method: cell.tuned for cell in self.cells.values() if cell.runs and cell.tuned}


def gather(
    found: Item,
    runs: Sequence[Run],
    on: str | None = None,
    *,
    protocols: Sequence[str] | None = None,
    tuned: Mapping[str, Mapping[str, Any]] | None = None,
) -> Gathered:
    """Lay runs to the rows of a table or figure.

    Where a row has runs that differ in more than the seed, `tuned` decides; without it that is an error.
    """
    cells = {
        (row.name, spot.name): Cell(row, spot, _of_row(row, spot, runs, tuned or {}))
        for spot in places(found, on, protocols)
        for row in rows(found, spot)
    }
    return Gathered(found, None if on is None else ALIASES.get(on, on), cells)


def settings_of(runs: Sequence[Run]) -> list[str | None]:
    """Which settings at hand runs are of; None for the paper's own data."""
    data = {run.card["experiment"]["data"] for run in runs}
    at_hand: list[str | None] = [name for name, setting in SETTINGS.items() if setting.fields["data"] in data]
    return at_hand or [None]


def _of_row(row: Row, spot: Spot, runs: Sequence[Run], tuned: Mapping[str, Mapping[str, Any]]) -> tuple[Run, ...]:
    want = experiment_of(row, spot, {}).model_dump(mode="json")
    groups: dict[str, list[Run]] = {}
    for run in runs:
        have = run.card["experiment"]
        if _is_of(have, want):
            key = {name: value for name, value in have.items() if name not in _FREE}
            key["stream"] = {name: value for name, value in have["stream"].items() if name != "seed"}
            key["made on"] = run.card["provenance"].get("device")
            groups.setdefault(json.dumps(key, sort_keys=True), []).append(run)
    if len(groups) > 1 and row.method in tuned:
        chosen = tuned[row.method].items()
        groups = {
            key: group for key, group in groups.items() if chosen <= group[0].card["experiment"]["options"].items()
        }
    if len(groups) > 1:
        keys = [json.loads(key) for key in groups]
        differ = [name for name in keys[0] if any(key.get(name) != keys[0][name] for key in keys[1:])]
        raise errors.DataError(
            f"row {row.name!r} at {spot.title} has runs that differ in {', '.join(differ)}: "
            + "; ".join(str({name: key.get(name) for name in differ}) for key in keys)
            + ". Give folders with one kind of run, or --tuned to choose by options"
        )
    found = next(iter(groups.values()), [])
    if len({int(run.card["experiment"]["seed"]) for run in found}) < len(found):
        raise errors.DataError(
            f"row {row.name!r} at {spot.title} has runs of one seed on several streams: give folders of one kind"
        )
    return tuple(sorted(found, key=lambda run: int(run.card["experiment"]["seed"])))


def _is_of(have: Mapping[str, Any], want: Mapping[str, Any]) -> bool:
    options, wanted = have["options"], want["options"]
    stream, asked = ({k: v for k, v in one["stream"].items() if k not in ("limit", "seed")} for one in (have, want))
    return (
        all(have.get(name, want[name]) == want[name] for name in _FIELDS)
        and all(options.get(name) == wanted.get(name) for name in _OPTIONS)
        and stream == asked
    )
