"""The comparison of two runs: what was asked of them, what they rest on, and the batch at which they part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from wise_atta import errors
from wise_atta.bench.runs import Run, visits

# Relative to the larger number where that is above one; bundles keep 32 bits.
TOLERANCE = 1e-6

# What happens within a batch, in order; of each, the columns of `steps.parquet`. Those of time are left out.
STAGES: Mapping[str, tuple[str, ...]] = {
    "data": ("domain", "samples", "pictures"),
    "logits": ("logits", "entropy"),
    "predictions": ("wrong", "hits"),
    "utility": ("utility",),
    # Drift is computed where something is asked, so it follows the decision.
    "decision": ("threshold", "rate", "debt", "asked", "drift", "picked", "spent"),
    "learning": ("learned", "late", "expired", "tripped", "loss*", "forwards", "backwards"),
}
_NOT_COMPARED = ("tag", "workers")
_STREAM = (
    "samples",
    "batches",
    "classes",
    "masked",
    "fingerprint",
    "pixels",
    "frost",
    "resize",
    "crop",
    "interpolation",
)


@dataclass(frozen=True)
class Field:
    """Something that both runs have, and in which they differ."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Parting:
    """Where one stage of the batches differs first.

    Parameters
    ----------
    batch, domain, column, a, b
        The first batch that differs by more than the tolerance, and by what; None: none does.
    trace, size
        The first batch that differs at all, and by how much where that is a number.
    """

    stage: str
    batch: int | None = None
    domain: str = ""
    column: str = ""
    a: Any = None
    b: Any = None
    trace: int | None = None
    size: float | None = None


@dataclass(frozen=True)
class Stretch:
    """One domain's visit: both errors in per cent, and by how many mistakes A is ahead of B at its end."""

    domain: str
    first: int
    last: int
    error_a: float
    error_b: float
    ahead: int


@dataclass(frozen=True)
class Comparison:
    """What two runs differ in.

    Parameters
    ----------
    config, data, weights, place
        Fields that differ: of the experiment, the stream, the model, and versions and device.
    partings
        One a stage of the batch at which they differ, in the order of a batch.
    stretches
        How the gap develops, visit by visit.
    only_a, only_b
        Samples that one of them alone has wrong; None where they saw different samples.
    """

    a: str
    b: str
    tolerance: float
    config: tuple[Field, ...]
    data: tuple[Field, ...]
    weights: tuple[Field, ...]
    place: tuple[Field, ...]
    results: tuple[Field, ...]
    partings: tuple[Parting, ...]
    stretches: tuple[Stretch, ...]
    batches: tuple[int, int]
    only_a: int | None
    only_b: int | None
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Parting | None:
        """Where they part: the earliest batch beyond the tolerance, and there the earliest stage."""
        placed = [parting for parting in self.partings if parting.batch is not None]
        return min(placed, key=lambda parting: parting.batch or 0, default=None)

    @property
    def identical(self) -> bool:
        """Whether every number of both is the same to the last bit. What they rest on may still differ."""
        # A card alone has no batches: then the results are all that there is.
        return not self.partings and not self.results and (0 in self.batches or self.batches[0] == self.batches[1])

    def verdict(self) -> str:
        """The answer in a sentence."""
        apart = [name for name in ("config", "data", "weights", "place") if getattr(self, name)]
        rests = f"although {_listed(apart)} differ" if apart else "and rest on the same"
        if self.identical and 0 in self.batches:
            return (
                f"The results on both cards are the same, {rests}. Without rows by batch nothing else can be compared"
            )
        if self.identical:
            return f"The runs are identical: all {self.batches[0]} batches, to the last bit, {rests}"
        if self.first is None and self.partings:
            sizes = [parting.size for parting in self.partings if parting.size is not None]
            most = f", {max(sizes):.1g} at their first" if sizes else ""
            start = min(parting.trace or 0 for parting in self.partings)
            return f"The runs differ from batch {start} on, but never by more than {self.tolerance:g}{most}"
        if self.first is None:
            return "The results differ; without rows by batch it cannot be said where the runs part"
        return f"The runs part at batch {self.first.batch} ({self.first.domain}): {self.first.stage}"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for scripts."""
        return {**asdict(self), "identical": self.identical, "verdict": self.verdict()}


def compare(a: Run, b: Run, *, tolerance: float = TOLERANCE) -> Comparison:
    """Find where two runs part.

    Parameters
    ----------
    a, b
        The runs; without rows by batch their cards alone are compared.
    tolerance
        By how much numbers may differ, relative to the larger of them where that is above 1.
    """
    if not tolerance >= 0:
        raise errors.BadConfig(f"tolerance is {tolerance}: it must be zero or more")
    notes = [f"{run.name} ({run.where}) has no rows by batch" for run in (a, b) if not run.steps]
    if a.steps and b.steps and len(a.steps) != len(b.steps):
        notes.append(
            f"A has {len(a.steps)} batches and B {len(b.steps)}: the first {min(len(a.steps), len(b.steps))} count"
        )
    if len({run.where.is_file() and run.where.suffix != ".json" for run in (a, b)}) == 2:
        notes.append("A bundle keeps numbers with 32 bits: what differs by less than a ten-millionth is its rounding")
    same = _same_samples(a, b)
    return Comparison(
        a=str(a.where),
        b=str(b.where),
        tolerance=tolerance,
        config=tuple(f for f in differing(a.experiment, b.experiment) if f.name not in _NOT_COMPARED),
        data=(*_data(a, b, "stream"), *_data(a, b, "source_data", "source_data.")),
        weights=(*_weights(a, b, "model"), *_weights(a, b, "teacher", "teacher.")),
        place=tuple(differing(_place(a), _place(b))),
        results=tuple(differing(_results(a), _results(b))),
        partings=tuple(_partings(a, b, tolerance)),
        stretches=tuple(_stretches(a, b)),
        batches=(len(a.steps), len(b.steps)),
        only_a=int((~a.hits & b.hits).sum()) if same else None,
        only_b=int((a.hits & ~b.hits).sum()) if same else None,
        notes=tuple(notes),
    )


def differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[Field]:
    """What differs between two nested mappings, by path."""
    for name in dict.fromkeys([*a, *b]):
        mine, theirs = a.get(name), b.get(name)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from differing(mine, theirs, f"{prefix}{name}.")
        # NaN is itself.
        elif mine != theirs and not (mine != mine and theirs != theirs):
            yield Field(f"{prefix}{name}", mine, theirs)


def _data(a: Run, b: Run, part: str, prefix: str = "") -> Iterator[Field]:
    """What differs between two streams; nothing where a run has none, or its card does not tell."""
    one, other = (run.provenance.get(part) for run in (a, b))
    if one is None or other is None:
        return
    yield from differing(one.get("spec", {}), other.get("spec", {}), prefix)
    mine, theirs = ({name: stream.get(name) for name in _STREAM} for stream in (one, other))
    unknown = None in (mine["pixels"], theirs["pixels"])
    yield from (f for f in differing(mine, theirs, prefix) if not (unknown and f.name == f"{prefix}pixels"))


def _weights(a: Run, b: Run, part: str, prefix: str = "") -> Iterator[Field]:
    """What differs between two models; nothing where a run has none, or its card does not tell."""
    one, other = (run.provenance.get(part) for run in (a, b))
    if one is not None and other is not None:
        yield from differing(one, other, prefix)


def _place(run: Run) -> dict[str, Any]:
    """What arithmetic was done with: versions, device, threads, modes."""
    inputs = ("model", "teacher", "stream", "source_data", "parts")
    return {name: value for name, value in run.provenance.items() if name not in inputs}


def _results(run: Run) -> dict[str, Any]:
    timing = ("seconds", "peak_memory", "resumed", "spread")
    first = run.card.get("first_batch") or {}
    results = {name: value for name, value in run.results.items() if name not in timing}
    return {**results, "first batch's logits": first.get("digest")}


def _partings(a: Run, b: Run, tolerance: float) -> Iterator[Parting]:
    pairs = list(zip(_rows(a), _rows(b), strict=False))
    for stage, columns in STAGES.items():
        trace: int | None = None
        size: float | None = None
        parting: Parting | None = None
        for number, column, x, y in _different(pairs, columns):
            apart = _apart(x, y)
            if trace is None:
                trace, size = number, apart if np.isfinite(apart) else None
            if not np.isfinite(apart) or apart > tolerance * max(1.0, abs(x), abs(y)):
                domain = str(pairs[number - 1][0]["domain"])
                parting = Parting(stage, number, domain, column, _short(x), _short(y), trace, size)
                break
        if trace is not None:
            yield parting or Parting(stage, trace=trace, size=size)


def _different(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], columns: Sequence[str]
) -> Iterator[tuple[int, str, Any, Any]]:
    """Batch, column and both values wherever two runs are not the same to the last bit."""
    for number, (mine, theirs) in enumerate(pairs, 1):
        for column in _columns(columns, mine, theirs):
            if _apart(mine[column], theirs[column]):
                yield number, column, mine[column], theirs[column]


def _short(value: Any) -> Any:
    """Of a long list its first ones."""
    return [*value[:4], "…"] if isinstance(value, list) and len(value) > 4 else value


def _rows(run: Run) -> list[dict[str, Any]]:
    """Rows with the pictures by name, and with places where bits are packed: of mistakes, and of questions."""
    rows, start = [], 0
    for row in run.steps:
        end = start + int(row["samples"])
        places: dict[str, Any] = {}
        if "pictures" in row:
            places["pictures"] = [run.names[place] for place in run.pictures[start:end]]
        if "hits" in row:
            places["hits"] = np.flatnonzero(~run.hits[start:end]).tolist()
            places["picked"] = np.flatnonzero(run.picked[start:end]).tolist()
        rows.append({**row, **places})
        start = end
    return rows


def _columns(wanted: Sequence[str], *rows: Mapping[str, Any]) -> list[str]:
    """Columns that both rows have; `loss*` is every column that begins so."""
    shared = [name for name in rows[0] if all(name in row for row in rows)]
    return [name for one in wanted for name in shared if name == one or (one[-1] == "*" and name.startswith(one[:-1]))]


def _apart(x: Any, y: Any) -> float:
    """By how much two values differ; infinitely if they are no numbers."""
    if x == y or (x != x and y != y):
        return 0.0
    if isinstance(x, bool) or isinstance(y, bool) or not (isinstance(x, int | float) and isinstance(y, int | float)):
        return float("inf")
    return abs(x - y) if np.isfinite(x) and np.isfinite(y) else float("inf")


def _same_samples(a: Run, b: Run) -> bool:
    if not a.steps or not b.steps or any("hits" not in run.steps[0] for run in (a, b)):
        return False
    if a.names == b.names:
        return np.array_equal(a.pictures, b.pictures)
    return len(a.hits) == len(b.hits) and bool((np.array(a.names)[a.pictures] == np.array(b.names)[b.pictures]).all())


def _stretches(a: Run, b: Run) -> Iterator[Stretch]:
    pairs = list(zip(a.steps, b.steps, strict=False))
    ahead = 0
    for start, end, domain in visits([str(row["domain"]) for row, _ in pairs]):
        wrong = [sum(pair[side]["wrong"] for pair in pairs[start:end]) for side in (0, 1)]
        seen = [sum(pair[side]["samples"] for pair in pairs[start:end]) for side in (0, 1)]
        ahead += wrong[1] - wrong[0]
        error_a, error_b = (100 * n / max(1, of) for n, of in zip(wrong, seen, strict=True))
        yield Stretch(domain, start + 1, end, error_a, error_b, ahead)


def _listed(names: Sequence[str]) -> str:
    phrases = {
        "config": "their settings",
        "data": "their data",
        "weights": "their weights",
        "place": "versions or device",
    }
    return " and ".join(phrases[name] for name in names)
