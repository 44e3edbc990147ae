"""The study of late labels: normalised, weighted or left out by age, or asked for early.

Every variant changes one thing about the plain use of late labels: each is learned when it comes, whatever its age, its
sample normalised by the statistics of its own batch. An answer that would come after the end of the stream never comes;
it was charged all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wise_atta import errors
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.rivals import Setting, experiment
from wise_atta.bench.table import Row, markdown

DELAYS = (0, 50, 100, 150, 200)
NONE, PLAIN = "no labels", "plain"
VARIANTS: dict[str, dict[str, Any]] = {
    NONE: {"policy": "never"},
    PLAIN: {},
    "statistics of the current batch": {"context": "current"},
    "statistics of the source": {"context": "source"},
    "weight 1/(1 + age/10)": {"late_weight": 10},
    "weight 1/(1 + age/50)": {"late_weight": 50},
    "limit of 100 batches": {"late_limit": 100},
    "head alone learns": {"options": {"supervise_norm": False}},
    "asked early": {"early": True},
    "asked early, weight 1/(1 + age/10)": {"early": True, "late_weight": 10},
}


def experiments(
    setting: Setting,
    seeds: Sequence[int],
    *,
    lr: float,
    options: Mapping[str, Any] | None = None,
    delays: Sequence[int] = DELAYS,
    variants: Sequence[str] = tuple(VARIANTS),
    own_streams: bool = False,
    **fields: Any,
) -> list[Experiment]:
    """All variants at all delays on one stream, seed by seed. `tag` carries the variant's name into the card.

    A variant is left out where it cannot differ: no labels are never late, and what is done about age changes nothing
    at a delay of 0, nor a limit up to that limit.

    Parameters
    ----------
    setting, seeds
        The stream with its model, and the seeds of the method's draws.
    lr, options
        Of `wise`.
    own_streams
        Whether each seed also has a stream of its own: other pictures where they are limited, other order, other noise.
    fields
        Other fields of `Experiment`, which win over the setting's.

    Examples
    --------
    >>> from wise_atta.bench import rivals
    >>> runs = experiments(rivals.setting("digits"), [0], lr=1e-3, delays=[0, 50, 150])
    >>> [(run.tag, run.delay) for run in runs if run.late_limit or run.policy == "never"]
    [('no labels', 0), ('limit of 100 batches', 150)]
    """
    for name in variants:
        if name not in VARIANTS:
            raise errors.unknown("variant", name, VARIANTS)
    stream = fields.pop("stream", {})
    return [
        experiment(
            setting,
            "wise",
            options={"lr": lr, **(options or {}), **VARIANTS[name].get("options", {})},
            seed=seed,
            delay=delay,
            tag=name,
            stream={**stream, "seed": seed} if own_streams else stream,
            **fields | {field: value for field, value in VARIANTS[name].items() if field != "options"},
        )
        for seed in seeds
        for name in variants
        for delay in _differs(VARIANTS[name], delays)
    ]


def _differs(variant: Mapping[str, Any], delays: Sequence[int]) -> Sequence[int]:
    """The delays at which a variant is not known from another one."""
    if variant == VARIANTS[PLAIN]:
        return delays
    if variant == VARIANTS[NONE]:
        return [0]
    return [delay for delay in delays if delay > variant.get("late_limit", 0)]


def table(cards: Sequence[dict[str, Any]]) -> str:
    """A line a variant and delay: errors, differences paired by seed, and what became of the questions."""
    by_delay = _rows(cards)
    order = list(VARIANTS)
    header = [
        "variant",
        "delay",
        "error %",
        "never asked %",
        "against delay 0",
        "against no labels",
        "against plain, same delay",
        "asked",
        "learned",
        "too old",
        "never came",
    ]
    lines = []
    for (tag, delay), row in sorted(by_delay.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        others = [by_delay.get((PLAIN, 0)), by_delay.get((NONE, 0)), by_delay.get((PLAIN, delay))]
        if tag == NONE:
            others[0] = others[2] = None
        lines.append(
            [
                tag,
                "" if tag == NONE else f"{delay}",
                row.text(digits=2),
                row.text("error_never_asked", digits=2),
                *(_difference(row, other) for other in others),
                *(f"{np.mean([fate[name] for fate in map(_fates, row.cards)]):.0f}" for name in _FATES),
            ]
        )
    return markdown(header, lines)


def _rows(cards: Sequence[dict[str, Any]]) -> dict[tuple[str, int], Row]:
    """Runs by variant and delay; the streams of different seeds may be different ones."""
    groups: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for card in sorted(cards, key=_seed):
        groups.setdefault((card["experiment"]["tag"], card["experiment"]["delay"]), {})[_seed(card)] = card
    return {key: Row(next(iter(group.values()))["experiment"], tuple(group.values())) for key, group in groups.items()}


def _seed(card: Mapping[str, Any]) -> int:
    return int(card["experiment"]["seed"])


def _difference(row: Row, other: Row | None) -> str:
    """Mean and deviation of the differences in error between runs of the same seed."""
    if other is None or other is row:
        return ""
    ours, theirs = ({_seed(card): float(card["results"]["error"]) for card in one.cards} for one in (row, other))
    differences = np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    if not len(differences):
        return ""
    sd = f" ± {differences.std(ddof=1):.2f}" if len(differences) > 1 else ""
    return f"{differences.mean():+.2f}{sd}"


_FATES = ("asked", "learned", "stale", "never came")


def _fates(card: Mapping[str, Any]) -> dict[str, int]:
    """What became of a run's questions; those still open at its end were answered too late for it."""
    counts: dict[str, int] = dict(card["results"]["questions"])
    ended = counts["answered"] + counts["cant_tell"] + counts["expired"]
    return counts | {"never came": counts["asked"] - ended}
