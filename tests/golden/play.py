"""What a configuration gives: hashes of its parts, and a short digest in numbers for machines that round otherwise."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from golden import nets
from golden.configurations import Case
from torch import Tensor

import wise_atta as wa

SECTIONS = ("logits", "questions", "losses", "work", "weights", "state")
# Hexadecimal digits of a section's hash.
WIDTH = 6
# The batches of which the digest keeps numbers; the last one is kept as well.
EARLY = 2


def data(tensor: Tensor) -> bytes:
    tensor = tensor.detach().cpu().contiguous()
    return f"{tensor.dtype}{list(tensor.shape)}".encode() + tensor.flatten().view(torch.uint8).numpy().tobytes()


def held(state: Any) -> Iterator[bytes]:
    """The tensors and questions of a state, whatever its keys and classes are called."""
    if isinstance(state, Tensor):
        if state.numel():
            yield data(state)
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from held(key)
            yield from held(value)
    elif isinstance(state, str):
        if re.fullmatch(r"\d+-\d+", state):
            yield state.encode()
    elif isinstance(state, Sequence):
        for value in state:
            yield from held(value)


def summary(tensor: Tensor) -> list[float]:
    """Root mean square and one projection of a tensor."""
    values = tensor.detach().double().flatten().numpy()
    weights = np.cos(np.arange(len(values)) * 1.7 + 0.3)
    return [short(math.sqrt(float(np.mean(values**2)))), short(float(values @ weights) / math.sqrt(len(values)))]


def short(number: float) -> float:
    return float(f"{number:.5g}")


class Trail:
    """Collects what one adapter shows."""

    def __init__(self) -> None:
        self.hashes = {name: hashlib.sha256() for name in SECTIONS}
        self.questions: list[str] = []
        self.numbers: list[list[float]] = []

    def note(self, section: str, *values: Any) -> None:
        self.hashes[section].update(repr(values).encode())

    def predicted(self, out: wa.Prediction) -> None:
        self.hashes["logits"].update(data(out.logits))
        asked = [query.id for query in (*out.queries, *out.sent)]
        self.note("questions", out.number, out.utility, asked, out.spent, float(out.allowed))
        self.questions.append(" ".join(asked))
        self.numbers.append(summary(out.logits))

    def learned(self, step: wa.Step) -> None:
        counts = [
            getattr(step.counts, name)
            for name in ("asked", "shown", "answered", "learned", "cant_tell", "expired", "stale")
        ]
        self.note(
            "questions", step.number, step.samples, step.utility, step.threshold, step.rate, step.debt, step.asked
        )
        self.note(
            "questions", step.learned, step.late, step.stale, step.expired, step.spent, float(step.allowed), counts
        )
        self.note("questions", step.tripped is not None)
        self.note("losses", step.number, sorted((name, float(value)) for name, value in step.losses.items()))
        work = step.work
        self.note("work", work.forwards, work.gradient_forwards, work.backwards)


def play(case: Case) -> tuple[str, list[Any]]:
    """Hashes of the sections in one string, and the digest: questions, then numbers of the first and last batches."""
    trail = Trail()
    try:
        _play(case, trail)
    except (wa.errors.WiseAttaError, ValueError, RuntimeError) as error:
        # A refusal is part of what is kept.
        return f"{type(error).__name__} after {len(trail.questions)}", []
    kept = [*trail.numbers[:EARLY], *trail.numbers[-2:]]
    return "".join(one.hexdigest()[:WIDTH] for one in trail.hashes.values()), [",".join(trail.questions), *kept]


def _play(case: Case, trail: Trail) -> None:
    adapter = case.make()
    adapter.on_step(trail.learned)
    for number in range(1, case.length + 1):
        if case.between is not None:
            after = case.between(adapter, number, case.make)
            if after is not adapter:
                adapter = after
                adapter.on_step(trail.learned)
        trail.predicted(case.turn(adapter, case.batch(number), number))
    probe = case.batch(99)
    inputs = probe.inputs if isinstance(probe, wa.Batch) else probe
    plain = adapter.predict(inputs, ask=False, learn=False)
    trail.hashes["logits"].update(data(plain.logits))
    exported = adapter.export()
    values = exported.state_dict()
    for name in sorted(values):
        trail.hashes["weights"].update(name.encode() + data(values[name]))
    with torch.no_grad():
        outside = nets.call(exported.eval(), inputs)
    trail.hashes["weights"].update(data(outside))
    trail.numbers.append(summary(outside))
    for part in sorted({*held(adapter.state_dict())}):
        trail.hashes["state"].update(part)


def parted(before: str, now: str) -> list[str]:
    """The sections in which two hashes differ; all of them where either is a refusal."""
    if " " in before or " " in now:
        return [f"{before!r} is now {now!r}"] if before != now else []
    pieces = [(value[i * WIDTH : (i + 1) * WIDTH] for value in (before, now)) for i in range(len(SECTIONS))]
    return [name for name, (old, new) in zip(SECTIONS, pieces, strict=True) if old != new]
