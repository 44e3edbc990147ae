"""The share of an error that is chance: runs whose weights were nudged by 1e-7, and what a card keeps of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from wise_atta.bench.compare import differing
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.run import NUDGE
from wise_atta.bench.table import markdown


def summarise(errors: Sequence[float]) -> dict[str, Any]:
    """What a card keeps of the errors of nudged runs.

    >>> summarise([10.0, 10.5, 11.0])["high"]
    12.0
    """
    mean, deviation = float(np.mean(errors)), float(np.std(errors, ddof=1))
    return {
        "nudge": NUDGE,
        "errors": list(errors),
        "low": min(*errors, mean - 3 * deviation),
        "high": max(*errors, mean + 3 * deviation),
        "mean": mean,
        "deviation": deviation,
    }


def nudged(card: Mapping[str, Any]) -> list[float]:
    """Errors of the nudged runs behind a card's spread; none where it has none of its own, or a single one."""
    errors = list(card.get("spread", {}).get("errors", ()))
    return errors if len(errors) > 1 else []


def all_nudged(cards: Iterable[Mapping[str, Any]]) -> list[list[float]]:
    """The same for every card that has such runs."""
    return [errors for card in cards if (errors := nudged(card))]


def pooled(runs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean over the nudged runs of several cards, and their deviation within a card.

    >>> pooled([[8.0, 10.0], [9.0, 11.0]])
    (9.5, 1.4142135623730951)
    """
    deviation = np.sqrt(np.mean([np.var(errors, ddof=1) for errors in runs]))
    return float(np.mean([np.mean(errors) for errors in runs])), float(deviation)


def standard_error(runs: Sequence[Sequence[float]]) -> float:
    """Of the mean over the nudged runs of several cards.

    >>> standard_error([[8.0, 10.0]]), standard_error([[8.0, 10.0], [9.0, 11.0]])
    (1.0, 0.7071067811865476)
    """
    return float(np.sqrt(sum(np.var(errors, ddof=1) / len(errors) for errors in runs)) / len(runs))


def combined(parts: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """The deviation that variances add up to, and its degrees of freedom out of theirs, as Welch and Satterthwaite do.

    >>> combined([(8.0, 4), (8.0, 2)])
    (4.0, 5.333333333333333)
    >>> combined([(0.0, 9)])  # what does not vary moves nothing, whatever its tails
    (0.0, 1.0)
    """
    variance = sum(part for part, _ in parts)
    unsure = sum(part**2 / freedom for part, freedom in parts)
    return math.sqrt(variance), variance**2 / unsure if unsure else 1.0


def apart(runs: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> tuple[float, float]:
    """How far the mean over the nudged runs of some cards lies from that of others, and its standard error.

    >>> apart([[8.0, 10.0], [9.0, 11.0]], [[9.0, 11.0]])
    (-0.5, 1.2247448713915892)
    >>> apart([[9.0, 11.0]], [[9.0, 11.0]])  # the same runs under two names
    (0.0, 0.0)
    """
    if runs == others:
        return 0.0, 0.0
    return pooled(runs)[0] - pooled(others)[0], math.hypot(standard_error(runs), standard_error(others))


def table(cards: Sequence[Mapping[str, Any]]) -> str:
    """What of the cards' errors is chance: a line an experiment, over its seeds, from measured spreads."""
    families: dict[str, list[Mapping[str, Any]]] = {}
    for card in {str(card["digest"]): card for card in cards}.values():
        if nudged(card):
            families.setdefault(family(card), []).append(card)
    names = _names([Experiment.parse(kin[0]["experiment"]) for kin in families.values()])
    lines = []
    for name, kin in zip(names, families.values(), strict=True):
        numbers = np.mean([card["results"]["error"] for card in kin]), *pooled(all_nudged(kin))
        lines.append([name, str(len(kin)), *(f"{number:.2f}" for number in numbers)])
    return markdown(["experiment", "seeds", "error %", "of nudged runs %", "their deviation"], lines)


def odd_ones(cards: Sequence[Mapping[str, Any]]) -> str:
    """How many cards lie beyond all their nudged runs, which says whether those are runs like their own.

    If they are, each of n + 1 runs is as likely as any other to be the lowest or the highest; where two are, no one
    is. Runs of one experiment under several names count once.
    """
    runs = {(card["results"]["error"], tuple(nudged(card))) for card in cards if nudged(card)}
    odd = sum(not min(errors) <= error <= max(errors) for error, errors in runs)
    all_of = [[error, *errors] for error, errors in runs]
    chance = sum((e.count(min(e)) == 1) / len(e) + (e.count(max(e)) == 1) / len(e) for e in all_of)
    return f"{odd} of {len(runs)} errors lie below or above all their nudged runs; {chance:.0f} would by chance."


def family(card: Mapping[str, Any]) -> str:
    """What cards have in common whose experiments differ in the seed alone."""
    experiment = Experiment.parse(card["experiment"])
    stream = {name: value for name, value in experiment.stream.items() if name != "seed"}
    return experiment.model_copy(update={"seed": 0, "stream": stream}).digest


def _names(experiments: Sequence[Experiment]) -> list[str]:
    """What to call experiments: by tag or short name, and by what tells each from its namesakes."""
    short = [experiment.tag or experiment.name.removesuffix(f"-s{experiment.seed}") for experiment in experiments]
    whole = [experiment.model_dump(mode="json", exclude={"tag", "seed"}) for experiment in experiments]
    names = []
    for name, own in zip(short, whole, strict=True):
        namesakes = [other for called, other in zip(short, whole, strict=True) if called == name]
        telling = {field.name: field.a for other in namesakes for field in differing(own, other)}
        fields = [f"{key}={telling[key]}" for key in sorted(telling) if telling[key] is not None]
        names.append(", ".join([name, *(field for field in fields if not field.startswith("stream.seed="))]))
    return names
