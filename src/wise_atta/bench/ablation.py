"""The ablation of labels: what they are worth without the stronger unlabelled step that a labelled batch takes.

Under the published code's weights a labelled batch takes a 17 times larger step on its *unlabelled* samples (1.7, not
0.1). So a method that selects half of the batches also adapts harder on that half, and labels may get the credit. Each
variant takes one of the two away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wise_atta.bench.experiment import Experiment
from wise_atta.bench.rivals import Setting, experiment
from wise_atta.bench.table import markdown, rows

# What 1.7 on half of the batches and 0.1 on the others comes to on all of them.
_EVEN = (1.7 + 0.1) / 2

VARIANTS: dict[str, dict[str, Any]] = {
    "published rule": {"rule": "published"},
    "labels withheld, same schedule": {"rule": "published", "published": {"sup": 0.0}},
    "labels, but the small unlabelled step": {"rule": "published", "published": {"ent": 0.1}},
    "labels at random times": {"rule": "published", "policy": "random", "exact": True},
    "labels withheld, random times": {
        "rule": "published",
        "policy": "random",
        "exact": True,
        "published": {"sup": 0.0},
    },
    "no labels, small step always": {"rule": "published", "policy": "never"},
    "no labels, even step always": {"rule": "published", "policy": "never", "published": {"unlabelled": _EVEN}},
    "paper's rule": {},
    "paper's rule, labels withheld": {"lambda_sup": 0.0, "train_head": "none"},
    "paper's rule, labels at random times": {"policy": "random", "exact": True},
    "paper's rule on roid's loss": {"objective": "roid"},
}


def experiments(
    setting: Setting,
    seeds: Sequence[int],
    *,
    lr: float,
    paper_lr: float,
    variants: Sequence[str] = tuple(VARIANTS),
    **fields: Any,
) -> list[Experiment]:
    """All variants on one stream. `tag` carries the variant's name into the card."""
    return [
        experiment(
            setting,
            "wise",
            options={"lr": lr if VARIANTS[name].get("rule") == "published" else paper_lr, **VARIANTS[name]},
            seed=seed,
            tag=name,
            **fields,
        )
        for name in variants
        for seed in seeds
    ]


def table(cards: Sequence[dict[str, Any]]) -> str:
    """A line a variant: error, labels, and the difference to no labels with the small step."""
    by_tag = {row.experiment["tag"]: row for row in rows(cards)}
    base = by_tag.get("no labels, small step always")

    def gain(tag: str) -> str:
        if base is None or by_tag[tag] is base:
            return ""
        return f"{by_tag[tag].mean() - base.mean():+.2f}"

    lines = [[tag, row.text(digits=2), f"{row.mean('labels_spent'):.0f}", gain(tag)] for tag, row in by_tag.items()]
    return markdown(["variant", "error %", "labels", "against no labels, small step"], lines)
