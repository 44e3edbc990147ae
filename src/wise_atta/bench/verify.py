"""The verification of a card: its experiment is run again, here, and held to what the card promises.

Adaptation is chaotic: weights that differ in their last bit can end some tenths of a point apart. So a card promises
the same digits only where the same arithmetic is done. Elsewhere it promises the first batch's logits, before chaos
sets in, and an error within its own `spread`, see `wise_atta.bench.spread`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wise_atta import errors
from wise_atta.bench.experiment import Experiment, check_version
from wise_atta.bench.inputs import other_inputs
from wise_atta.bench.place import differences
from wise_atta.bench.run import Recorder, build, make_card, pick_device, settings
from wise_atta.bench.stream_cache import StreamCache

# How close the first batch's logits must be on another device, relative to the largest of them. Not to 1 where all are
# smaller: roid's corrected prior divides logits by the number of classes, and 1e-4 would be a twentieth of them.
LOGITS = 1e-4
# What rounding on the card may move them by: early cards keep six decimals.
DECIMALS = 1e-6
# The same for runs that chose to compute in fewer bits than float32's 24: 8 and 11.
FEWER_BITS = {"bf16": 0.05, "tf32": 0.01}
# Points of error that rounding alone may move where nothing is chaotic: 5 samples in 10,000 at a class boundary.
ROUNDING = 0.05
# How long a run took is no promise.
_NOT_PROMISED = ("seconds", "peak_memory", "resumed")


def experiment_of(card: Mapping[str, Any]) -> Experiment:
    """A card's experiment, with as many threads as its run had, so that sums are shared the same way."""
    return Experiment.parse({**card["experiment"], "threads": card["provenance"]["threads"]})


def once(
    experiment: Experiment,
    *,
    data: Path | None = None,
    weights: Path | None = None,
    cache: StreamCache | None = None,
    nudge: int | None = None,
) -> dict[str, Any]:
    """The card of a run that leaves nothing on disk."""
    with settings(experiment):
        built = build(experiment, data=data, weights=weights, cache=cache, nudge=nudge)
        recorder = Recorder(built)
        for batch in built.stream:
            recorder.step(batch)
        return make_card(built, recorder, float("nan"), None)


@dataclass
class Verdict:
    """Whether a card holds here.

    Parameters
    ----------
    name, digest
        Of the experiment.
    exact
        Whether the same digits were due, rather than an error within the spread.
    elsewhere
        In what this place differs from the card's, if it does.
    error, here
        The card's error and the one found, in per cent.
    logits
        The largest difference between the first batch's logits; None where the card does not keep them.
    broken
        Promises that do not hold; empty if all do.
    open
        What cannot be told, since the card promises nothing about it.
    """

    name: str
    digest: str
    exact: bool
    elsewhere: list[str]
    error: float
    here: float
    logits: float | None
    broken: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all that should be promised is, and holds."""
        return not self.broken and not self.open

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}

    def __str__(self) -> str:
        due = "the same digits are due" if self.exact else f"elsewhere ({'; '.join(self.elsewhere)})"
        apart = "" if self.logits is None else f", first logits {self.logits:.1e} apart"
        measured = f"error {self.error:.4f} % on the card, {self.here:.4f} % here{apart}"
        verdict = "holds"
        if self.broken:
            verdict = "does not hold: " + "; ".join([*self.broken, *self.open])
        elif self.open:
            verdict = "nothing speaks against it, but it cannot be told: " + "; ".join(self.open)
        return f"{self.name} {self.digest}: {due}; {measured}: {verdict}"


def verify(
    card: Mapping[str, Any], *, data: Path | None = None, weights: Path | None = None, cache: StreamCache | None = None
) -> Verdict:
    """Run a card's experiment again and say whether the card holds.

    On the same device kind, torch and package version, threads and deterministic mode every result must be the same.
    Elsewhere the first batch's logits must agree to 1e-4 of the largest (to less where the experiment asks for bf16 or
    TF32) and the error must lie within the card's spread. A card without a spread promises nothing about its error
    elsewhere.
    """
    check_version(card, "the card")
    experiment, promised = experiment_of(card), card["provenance"]
    try:
        pick_device(experiment.device)
    except errors.BadConfig:
        experiment = experiment.model_copy(update={"device": "auto"})
    again = once(experiment, data=data, weights=weights, cache=cache)
    elsewhere = not_due(promised, again["provenance"])
    exact = not elsewhere
    then, now = card["results"], again["results"]
    first = card.get("first_batch")
    verdict = Verdict(
        name=experiment.name,
        digest=str(card.get("digest")),
        exact=exact,
        elsewhere=elsewhere,
        error=then["error"],
        here=now["error"],
        logits=None if first is None else _apart(first, again["first_batch"]),
    )
    verdict.broken += other_inputs(promised, again["provenance"])
    if exact:
        if first is not None and first["digest"] != again["first_batch"]["digest"]:
            verdict.broken.append("the first batch's logits have other bits")
        kept = [name for name in then if name not in _NOT_PROMISED]
        verdict.broken += [
            f"{name} is {now.get(name)}, not {then[name]}" for name in kept if not _same(then[name], now.get(name))
        ]
        return verdict
    if first is None or verdict.logits is None:
        verdict.open.append("the card keeps no logits to compare with: run it again where it was made")
    else:
        limit = FEWER_BITS.get(str(experiment.fast.get("precision")), LOGITS)
        largest = np.abs(first["logits"]).max()
        # Turned round, so that NaN is far.
        if not verdict.logits <= max(limit * largest, DECIMALS):
            verdict.broken.append(f"the first batch's logits are further apart than {limit:g} of {largest:.4g}")
    known = card.get("spread")
    if known is None:
        verdict.open.append("the card has no spread, `wise-atta spread` adds one where the card was made")
    elif not within(known, now["error"]):
        whose = f", as wide as that of {known['of']}" if "of" in known else ""
        verdict.broken.append(f"the error lies outside the spread, {known['low']:.4f} to {known['high']:.4f} %{whose}")
    return verdict


def not_due(promised: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Why the digits of a card are not due here; nothing where they are."""
    reasons = differences(promised, now)
    if not promised["deterministic"]:
        reasons.append("the run was not deterministic")
    if promised.get("excepted"):
        reasons.append(f"the card excepts {' and '.join(promised['excepted'])} from the same digits")
    return reasons


def _same(then: Any, now: Any) -> bool:
    """Whether all that a card says comes out; a later release may say more."""
    if isinstance(then, dict) and isinstance(now, dict):
        return all(name in now and _same(value, now[name]) for name, value in then.items())
    # Early cards say NaN where there is no number.
    return json.dumps(None if then != then else then) == json.dumps(now)


def _apart(then: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """By how much two first batches differ; not at all where their bits are the same, whatever a card rounds to."""
    if then["digest"] == now["digest"]:
        return 0.0
    a, b = np.asarray(then["logits"]), np.asarray(now["logits"])
    return float(np.abs(a - b).max()) if a.shape == b.shape else float("inf")


def within(spread: Mapping[str, Any], error: float) -> bool:
    """Whether an error is one that the nudged runs of a spread leave possible."""
    try:
        return bool(spread["low"] - ROUNDING <= error <= spread["high"] + ROUNDING)
    except (LookupError, TypeError) as wrong:
        raise errors.DataError(f"{spread!r} is no spread: it needs numbers for 'low' and 'high'") from wrong
