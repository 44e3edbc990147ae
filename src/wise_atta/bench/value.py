"""The value of a label: error against labels spent on one stream, beside the best method that asks for none.

Runs of several methods, ratios and seeds over one stream are compared sample by sample. A difference is taken over all
samples, and over samples whose picture was never asked for: there, what either of the two asked for is left out for
both of them, so that they answer for the same pictures.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wise_atta import errors, rng, when
from wise_atta.bench import bootstrap
from wise_atta.bench.bootstrap import Array
from wise_atta.bench.demo import Interval
from wise_atta.bench.figures import Figure, Panel, Series
from wise_atta.bench.nudges import all_nudged, combined, nudged, pooled
from wise_atta.bench.runs import Run, distinct
from wise_atta.bench.table import markdown

REPLICATES = 2000

# Fields that do not tell one method from another: where it ran, over which stream (checked apart), how many labels.
_NOT_THE_METHOD = {"seed", "tag", "workers", "device", "threads", "deterministic", "ratio"}
_STREAM = {"data", "protocol", "severity", "batch", "stream", "model"}
# Fields that say how labels are asked for and come: all that a method without labels leaves open.
_ABOUT_LABELS = {"policy", "utility", "selector", "labels", "exhaust", "early", "delay", "noise", "context"}
_ABOUT_LABELS |= {"late_weight", "late_limit", "expires_after"}
_LABEL_OPTIONS = {"ratio", "policy", "utility", "selector", "labels", "pacing"}
# A method hands what it does not know to its policy; a preset is the method's own.
_LABEL_OPTIONS |= {name for policy in when.POLICIES.values() for name in inspect.signature(policy).parameters} - {
    "preset"
}
# What runs over one stream may differ in: the seed of its order, if every method has it, and when answers come.
_MAY_DIFFER = {"seed", "delay"}

Kind = Literal["unlabelled", "asking", "taught"]


@dataclass(frozen=True)
class Difference:
    """Error minus another's on the same samples, in points, with its interval.

    Parameters
    ----------
    to
        What it is compared with.
    all, never_asked
        Over all samples, and over those whose picture neither asked for; None if there is no such picture.
    per_100, per_100_never_asked
        Points of error removed by 100 labels: the difference with its sign turned, by labels spent; None: no labels.
    """

    to: str
    all: Interval
    never_asked: Interval | None
    per_100: Interval | None
    per_100_never_asked: Interval | None


@dataclass(frozen=True)
class Point:
    """Runs of one method with one ratio, whatever their seed.

    Parameters
    ----------
    method
        Its name, with what tells it from others of that name.
    kind
        `unlabelled`, `asking`, or `taught`: by a stronger model.
    ratio, labels
        Labels a batch at most, and labels spent, mean over runs.
    error
        In per cent, over all samples.
    error_never_asked
        In per cent, over what its own runs never asked for. Other methods left out other samples. None: all was asked.
    against, alone
        The difference to the best unlabelled method, and to the same method without labels where that was run.
    nudged
        Mean error of runs with nudged weights, and their deviation, where cards have a spread.
    """

    method: str
    kind: Kind
    ratio: float
    labels: float
    error: Interval
    error_never_asked: float | None
    runs: int
    against: Difference | None = None
    alone: Difference | None = None
    nudged: tuple[float, float] | None = None


@dataclass(frozen=True)
class BreakEven:
    """The smallest ratio at which a method has fewer errors than the best unlabelled one.

    Parameters
    ----------
    ratio
        Between two that were run on a straight line; None: never within what was run.
    low, high
        Its 95 % interval; `high` is None where more than one replicate in 40 never breaks even.
    at_most
        Whether the smallest ratio that was run is better already, so that the answer may lie below it.
    told_apart
        The smallest ratio that was run whose difference has an interval below zero; None: there is none.
    tried
        The smallest and the largest ratio that were run.
    """

    method: str
    to: str
    ratio: float | None
    low: float | None
    high: float | None
    at_most: bool
    told_apart: float | None
    tried: tuple[float, float]

    def words(self) -> str:
        """The answer as a sentence."""
        span = f"{_ratio(self.low)} to {_ratio(self.high)}"
        if self.ratio is None:
            most = f"up to {self.tried[1]:g} labels a batch"
            return f"{self.method}: never better than {self.to} within what was run, {most}"
        if self.at_most and not self.ratio:
            verdict = f"{self.method}: better than {self.to}, the same without labels, from the first label on"
        elif self.at_most:
            verdict = f"{self.method}: better than {self.to} already at {self.ratio:g} labels a batch, the fewest run"
        else:
            verdict = f"{self.method}: better than {self.to} from {self.ratio:.2g} labels a batch on"
        sure = "cannot be told apart from it at any ratio that was run"
        if self.told_apart is not None:
            sure = f"told apart from it at {self.told_apart:g}"
        return f"{verdict} (95 % interval {span}); {sure}"


@dataclass(frozen=True)
class Value:
    """What labels bought on one stream.

    Parameters
    ----------
    baseline
        The unlabelled method with the fewest errors here. Chosen after the fact, which favours it.
    points
        By method and ratio.
    break_even, break_even_never_asked
        One a method that asks; of pictures never asked for, where there are any.
    """

    stream: Mapping[str, Any]
    baseline: str
    points: tuple[Point, ...]
    break_even: tuple[BreakEven, ...]
    break_even_never_asked: tuple[BreakEven, ...]
    replicates: int
    left_out: tuple[str, ...] = ()

    def of(self, method: str) -> list[Point]:
        """The points of a method, by ratio."""
        return sorted((point for point in self.points if point.method == method), key=lambda point: point.ratio)

    @property
    def asking(self) -> list[str]:
        """Methods that asked people for labels."""
        return list(dict.fromkeys(point.method for point in self.points if point.kind == "asking"))

    @property
    def best(self) -> Point:
        """The baseline's point."""
        return next(p for p in self.points if p.method == self.baseline and p.kind == "unlabelled")

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for scripts."""
        return asdict(self)

    def title(self) -> str:
        """What was compared, in a line."""
        spec = self.stream["spec"]
        return (
            f"{spec['data']} {spec['protocol']}: {self.stream['batches']:,} batches, {self.stream['samples']:,} samples"
        )

    def table(self, short: bool = False) -> tuple[list[str], list[list[str]]]:
        """Head and lines, for pages and, without the interval of the error, for a terminal."""
        # Where the best unlabelled method is the same method without labels, one comparison is enough.
        both = any(point.alone is not None and point.alone.to != self.baseline for point in self.points)
        chance = any(point.nudged is not None for point in self.points)
        head = ["method", "ratio", "labels", "error %", *(["nudged"] if chance else [])]
        head += [f"− {self.baseline}", "never asked", "per 100 labels"]
        head += ["− same without labels", "never asked", "per 100 labels"] if both else []
        lines = []
        for point in self.points:
            name = point.method + (" (by a teacher)" if point.kind == "taught" else "")
            ratio = f"{point.ratio:g}" if point.kind == "asking" else ""
            cells = [name, ratio, f"{point.labels:.0f}", _plain(point.error, short)]
            cells += [_around(point.nudged, short)] if chance else []
            lines.append([*cells, *_cells(point.against), *(_cells(point.alone) if both else []), str(point.runs)])
        return [*head, "runs"], lines

    def words(self) -> list[str]:
        """The answers as sentences."""
        lines = [f"Best without labels: {self.baseline}, {self.best.error.mean:.2f} % error."]
        lines += [crossing.words() for crossing in self.break_even]
        everywhere = {crossing.method: crossing.ratio for crossing in self.break_even}
        for crossing in self.break_even_never_asked:
            if (crossing.ratio is None) != (everywhere[crossing.method] is None):
                lines.append(f"On samples never asked for, {crossing.words()}")
        return lines

    def figure(self) -> Figure:
        """Error against labels spent, and the difference to the best unlabelled method on the same samples."""
        error, everywhere, elsewhere, chance = [], [], [], []
        # The baseline differs from itself by nothing.
        itself = Difference(self.baseline, _NOTHING, _NOTHING, None, None)
        for method in self.asking:
            points = self.curve(method)
            labels, differences = [point.labels for point in points], [point.against or itself for point in points]
            kept = [
                (n, one.never_asked) for n, one in zip(labels, differences, strict=True) if one.never_asked is not None
            ]
            error.append(_series(method, labels, [point.error for point in points]))
            everywhere.append(_series(method, labels, [one.all for one in differences]))
            elsewhere.append(_series(method, [n for n, _ in kept], [one for _, one in kept]))
            known = [(point.labels, *point.nudged) for point in points if point.nudged is not None]
            xs, ys, spread = ([one[place] for one in known] for place in range(3))
            chance.append(Series(method, xs, ys, spread))
        free = [point for point in self.points if point.kind == "unlabelled"]
        bars = _series("without labels", range(len(free)), [point.error for point in free])
        spent, points_to = "labels spent", f"points, against {self.baseline}"
        panels = [
            Panel(f"Error; dashed: {self.baseline}", "lines", spent, "error %", error, level=self.best.error.mean),
            Panel("Difference, all samples", "lines", spent, points_to, everywhere, level=0.0),
            Panel("Error without labels", "bars", "", "error %", [bars], names=[point.method for point in free]),
            Panel("Difference, pictures never asked for", "lines", spent, points_to, elsewhere, level=0.0),
        ]
        if any(line.xs for line in chance):
            level = None if self.best.nudged is None else self.best.nudged[0]
            title = "Error of nudged runs, ± deviation" + ("" if level is None else f"; dashed: {self.baseline}")
            panels.append(Panel(title, "lines", spent, "error %", chance, level=level))
        return Figure(f"What labels buy on {self.title()}", panels, " ".join([*self.words(), self.note()]))

    def curve(self, method: str) -> list[Point]:
        """The points of a method that asks, after the same method without labels where that was run."""
        points = self.of(method)
        twins = {point.alone.to for point in points if point.alone is not None}
        return [*(p for p in self.points if p.method in twins and p.kind == "unlabelled"), *points]

    def markdown(self) -> str:
        """Table, answers and how to read them, for a page."""
        listed = "\n".join(f"- {text}" for text in self.words())
        return f"{self.title()}.\n\n{listed}\n\n{markdown(*self.table())}\n\n{self.note()}\n"

    def note(self) -> str:
        """How the intervals were made."""
        note = (
            f"Differences in points, negative is better; 95 % intervals from {self.replicates:,} bootstrap replicates "
            "over blocks of batches and over seeds, paired by sample. Never asked: without the pictures that a method "
            "asked for, for both sides. Per 100 labels: points of error removed."
        )
        if any(point.nudged is not None for point in self.points):
            note += (
                " Nudged: mean and deviation of runs whose weights were moved by 1e-7; where there are such, intervals "
                "over one stream know from them, and not from seeds alone, how far runs come apart."
            )
        return note


def value(runs: Sequence[Run], *, seed: int = 0, replicates: int = REPLICATES, left_out: Sequence[str] = ()) -> Value:
    """Compare runs over one stream by what their labels bought.

    Parameters
    ----------
    runs
        Of several methods, at least one that asks and one that does not, best with several ratios and seeds.
    seed, replicates
        Of the bootstrap, and how many.
    left_out
        What could not be read, for the record.

    Raises
    ------
    DataError
        If the runs saw different streams, or cannot be read.
    BadConfig
        If none of them asks, or all of them do.
    """
    if replicates < 1:
        raise errors.BadConfig(f"replicates is {replicates}: at least one is needed, some thousand are usual")
    runs = _distinct(runs)
    streams = _streams(runs)
    groups = _group(runs, streams)
    free = [group for group in groups if group.kind == "unlabelled"]
    if not free:
        raise errors.BadConfig(
            "every one of these runs asked for labels: add runs of methods that do not, such as tent"
        )
    if not any(group.kind == "asking" for group in groups):
        raise errors.BadConfig("none of these runs asked for a label: add runs of methods that do, such as wise")
    sampler = _Sampler(streams, seed, replicates)
    best = min(free, key=lambda group: group.error)
    differences = {group.name: _Pair(sampler, group, best) for group in groups if group is not best}
    points = []
    for group in groups:
        twin = next((other for other in free if other.core == group.core), None) if group.kind == "asking" else None
        points.append(
            Point(
                group.method,
                group.kind,
                group.ratio,
                group.labels,
                _interval(sampler.error(group)),
                _error_never_asked(group),
                len(group.runs),
                differences[group.name].result() if group is not best else None,
                None if twin is None else _Pair(sampler, group, twin).result(),
                pooled(group.nudged) if group.nudged else None,
            )
        )
    points.sort(key=lambda point: (point.kind == "asking", point.method if point.kind == "asking" else "", point.ratio))
    first = runs[0].provenance["stream"]
    return Value(
        {
            **{name: first.get(name) for name in ("spec", "fingerprint", "pixels")},
            # A stream of one's own does not know its end before it comes.
            **{name: runs[0].results[name] for name in ("samples", "batches")},
        },
        best.method,
        tuple(points),
        tuple(_break_evens(groups, best, differences, "all")),
        tuple(_break_evens(groups, best, differences, "never_asked")),
        replicates,
        tuple(left_out),
    )


def _error_never_asked(group: _Group) -> float | None:
    kept = [run.hits[run.never_asked] for run in group.runs]
    return float(np.mean([100 * np.mean(~hits) for hits in kept])) if all(len(hits) for hits in kept) else None


# ---- which runs belong together --------------------------------------------------------------------------------------


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """Each experiment once: a copy would count as another seed."""
    first_of: dict[str, Run] = {}
    for run in distinct(runs):
        first = first_of.setdefault(str(run.card.get("digest")), run)
        if first is not run:
            raise errors.DataError(
                f"{_at(first)} and {_at(run)} are the same experiment with different outcomes: leave one out; "
                "`wise-atta compare` shows where they part"
            )
    return list(first_of.values())


def _streams(runs: Sequence[Run]) -> dict[int, Run]:
    """A run for every order of the stream, by the seed of that order; any other difference is refused."""
    first = runs[0]
    by_seed: dict[int, Run] = {}
    for run in runs:
        mine, theirs = stream_of(run), stream_of(first)
        for name in mine.keys() | theirs.keys():
            if mine.get(name) != theirs.get(name):
                raise errors.DataError(
                    f"{_at(first)} and {_at(run)} are not over the same stream: {name} is {theirs.get(name)!r} in the "
                    f"first and {mine.get(name)!r} in the second. Give runs over one stream, with one model"
                )
        other = by_seed.setdefault(int(run.provenance["stream"]["spec"].get("seed", 0)), run)
        if not _same_order(run, other):
            raise errors.DataError(
                f"{_at(other)} and {_at(run)} describe the same stream but saw other pictures or another order: the "
                "data or the release that read it has changed. Run one of them again"
            )
    return by_seed


def stream_of(run: Run) -> dict[str, Any]:
    """What tells one stream with its model from another, apart from the seed of its order."""
    stream, model = run.provenance["stream"], run.provenance["model"]
    spec = {name: value for name, value in stream["spec"].items() if name not in _MAY_DIFFER}
    facts = {name: stream.get(name) for name in ("samples", "batches", "fingerprint", "frost")}
    return {**spec, **facts, "the model's weights": model.get("weights_hash", model.get("name"))}


def _same_order(run: Run, other: Run) -> bool:
    pixels = [one.provenance["stream"].get("pixels") for one in (run, other)]
    if None not in pixels and pixels[0] != pixels[1]:
        return False
    same = np.array_equal(run.sizes, other.sizes) and run.domains == other.domains
    return same and run.names == other.names and np.array_equal(run.pictures, other.pictures)


def _at(run: Run) -> str:
    return str(run.where) if run.where.name == run.name else f"{run.where}: {run.name}"


@dataclass(frozen=True, eq=False)
class _Group:
    """Runs of one method with one ratio, by stream."""

    name: str
    method: str
    kind: Kind
    ratio: float
    core: str
    by_stream: Mapping[int, list[Run]]

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.by_stream.values() for run in runs]

    @property
    def labels(self) -> float:
        return float(np.mean([run.results["labels_spent"] for run in self.runs]))

    @cached_property
    def nudged(self) -> list[list[float]]:
        """Errors of runs with nudged weights, for each run whose card has a spread of its own."""
        return all_nudged(run.card for run in self.runs)

    @cached_property
    def chance(self) -> tuple[float, float]:
        """How far the mean of these runs may lie from that of others like them, in points, and Student's freedom.

        Runs that are the same to the last sample are one. Where seeds vary more than nudged runs do, they draw
        something of their own: the rest of their variance is added, with as little freedom as so few seeds have.
        """
        times = Counter(run.hits.tobytes() for run in self.runs)
        parts = [(float(np.var(errors, ddof=1)) / len(self.nudged), len(errors) - 1) for errors in self.nudged]
        if len(times) > 1:
            between = np.var([100 * np.mean(~np.frombuffer(hits, bool)) for hits in times], ddof=1)
            parts.append((max(0.0, float(between) - sum(part for part, _ in parts)), len(times) - 1))
        alone, freedom = combined(parts)
        return alone * float(np.sqrt(np.sum(np.square(list(times.values()))))) / len(self.runs), freedom

    @property
    def error(self) -> float:
        return float(np.mean([np.mean([(~run.hits).mean() for run in runs]) for runs in self.by_stream.values()]))


def _group(runs: Sequence[Run], streams: Mapping[int, Run]) -> list[_Group]:
    groups = []
    for (method, ratio), some in by_method(runs).items():
        by_stream: dict[int, list[Run]] = {}
        for run in some:
            by_stream.setdefault(int(run.provenance["stream"]["spec"].get("seed", 0)), []).append(run)
        by_stream = {stream: _one_a_seed(runs) for stream, runs in by_stream.items()}
        missing = streams.keys() - by_stream.keys()
        first = next(iter(by_stream.values()))[0]
        if missing:
            raise errors.DataError(
                f"{method} with ratio {ratio:g} has no run on the stream with seed {min(missing)}, which others were "
                f"run on ({_at(streams[min(missing)])}): run it there, or leave those out"
            )
        groups.append(_Group(f"{method}@{ratio:g}", method, _kind(some), ratio, _core(first.experiment), by_stream))
    return groups


def _one_a_seed(runs: Sequence[Run]) -> list[Run]:
    """Each seed once: on other threads, or with a ratio that nothing was asked under, it is no second draw."""
    by_seed: dict[int, Run] = {}
    # Of runs that are the same, one that knows its spread.
    for run in sorted(runs, key=lambda run: not nudged(run.card)):
        first = by_seed.setdefault(int(run.experiment["seed"]), run)
        if not np.array_equal(first.hits, run.hits):
            raise errors.DataError(
                f"{_at(first)} and {_at(run)} are runs of one method with the same seed and different outcomes, as on "
                "other devices or threads: leave one out; `wise-atta compare` shows where they part"
            )
    return [run for run in runs if by_seed[int(run.experiment["seed"])] is run]


def _kind(runs: Sequence[Run]) -> Kind:
    if any(run.experiment.get("teacher") for run in runs):
        return "taught"
    return "asking" if any(run.results["questions"]["asked"] for run in runs) else "unlabelled"


def by_method(runs: Sequence[Run]) -> dict[tuple[str, float], list[Run]]:
    """Runs by method and labels a batch: as many as were allowed where that was said, otherwise as were spent.

    Seeds of one experiment stay together, whatever each of them spent. Where none of them asked, the ratio is 0.
    """
    names = method_names([run.experiment for run in runs])
    together: dict[tuple[str, float | None], list[Run]] = {}
    for run in runs:
        policy, asked_ratio = (_asked(run.experiment, name) for name in ("policy", "ratio"))
        # `always` keeps to no ratio.
        asked_ratio = None if policy == "always" else asked_ratio
        together.setdefault((names[method_key(run.experiment)], asked_ratio), []).append(run)
    groups: dict[tuple[str, float], list[Run]] = {}
    for (method, asked_ratio), some in together.items():
        ratio = asked_ratio
        if ratio is None:
            ratio = float(np.mean([run.results["labels_spent"] / run.results["batches"] for run in some]))
        asked = any(run.results["questions"]["asked"] for run in some)
        groups.setdefault((method, float(ratio) if asked else 0.0), []).extend(some)
    return groups


def _asked(experiment: Mapping[str, Any], name: str) -> Any:
    """What an experiment says about labels, as a field or else among its method's options."""
    outside = experiment.get(name)
    return experiment.get("options", {}).get(name) if outside is None else outside


def method_key(experiment: Mapping[str, Any]) -> str:
    """What two runs of one method have in common, whatever their ratio, seed and device."""
    return json.dumps(_flat(experiment), sort_keys=True)


def _core(experiment: Mapping[str, Any]) -> str:
    """What is left of a method when nothing is asked."""
    labels = _ABOUT_LABELS | {f"options.{name}" for name in _LABEL_OPTIONS}
    return json.dumps({k: v for k, v in _flat(experiment).items() if k not in labels}, sort_keys=True)


def _flat(experiment: Mapping[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in experiment.items() if k not in _NOT_THE_METHOD | _STREAM and k != "options"}
    options = {f"options.{k}": v for k, v in experiment.get("options", {}).items() if k != "ratio"}
    return plain | options


def method_names(experiments: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A short name for every method: its own, and as much as tells it from others of that name.

    >>> one = {"method": "wise", "policy": "paced", "options": {"lr": 0.1}}
    >>> other = {"method": "wise", "policy": "never", "options": {"lr": 0.1}}
    >>> list(method_names([one, other, {"method": "tent"}]).values())
    ['wise, paced', 'wise, no labels', 'tent']
    """
    keys = {method_key(one): _flat(one) for one in experiments}
    named: dict[str, str] = {}
    for key, fields in keys.items():
        alike = [other for k, other in keys.items() if k != key and other["method"] == fields["method"]]
        parts = [str(fields["method"])]
        for field_name, here in fields.items():
            if any(other.get(field_name) != here for other in alike):
                alike = [other for other in alike if other.get(field_name) == here]
                parts += [_part(field_name, here)] if here not in (None, False, {}, []) else []
        name = ", ".join(parts)
        twins = sum(other == name or other.startswith(f"{name} #") for other in named.values())
        named[key] = f"{name} #{twins + 1}" if twins else name
    return named


def _part(name: str, value: Any) -> str:
    leaf = name.rpartition(".")[2].replace("_", " ")
    if name in ("policy", "utility", "selector"):
        return "no labels" if value == "never" else str(value)
    if value is True:
        return leaf
    if isinstance(value, Mapping):
        return " ".join(f"{k} {v}" for k, v in value.items())
    return f"{leaf} {value:g}" if isinstance(value, float) else f"{leaf} {value}"


# ---- redrawing -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Sampler:
    """Replicates of the comparison: how much batches, runs and streams count in each. The first is what was observed.

    With one stream, blocks of its batches and the runs of each method are redrawn; where it is known from nudged runs
    how far runs come apart, their mean is moved by as much instead. With several streams the stream is what is redrawn:
    all that varies within one then varies between them. How much it varies is known from few, as Student's t does.
    """

    streams: Mapping[int, Run]
    seed: int
    replicates: int
    _batches: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    _runs: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.streams) > 1:
            drawn = bootstrap.student(len(self.streams), self.replicates, rng.numpy(self.seed, "value.streams"))
            shares = len(self.streams) * np.vstack([np.full(len(self.streams), 1 / len(self.streams)), drawn])
            for place, (stream, run) in enumerate(self.streams.items()):
                self._batches[stream] = np.repeat(shares[:, place, None], len(run.sizes), axis=1).astype(np.float32)
        else:
            for stream, run in self.streams.items():
                drawn32 = bootstrap.weights(run.domains, self.replicates, rng.numpy(self.seed, "value.blocks"))
                self._batches[stream] = np.vstack([np.ones((1, len(run.sizes)), np.float32), drawn32])

    def runs(self, group: _Group, stream: int) -> Array:
        """How much each run of a group counts, [1 + replicates, runs]."""
        count = len(group.by_stream[stream])
        even = np.full((1 + self.replicates, count), 1 / count)
        if len(self.streams) > 1 or count == 1 or group.nudged:
            return even
        if group.name not in self._runs:
            even[1:] = bootstrap.draws(count, self.replicates, rng.numpy(self.seed, f"value.runs.{group.name}"))
            self._runs[group.name] = even
        return self._runs[group.name]

    def moved(self, group: _Group) -> Array:
        """By how many points chance moves the mean of a group, [1 + replicates]."""
        shifts = np.zeros(1 + self.replicates)
        if len(self.streams) == 1 and group.nudged:
            deviation, freedom = group.chance
            drawn = rng.numpy(self.seed, f"value.chance.{group.name}").standard_t(freedom, self.replicates)
            shifts[1:] = deviation * drawn
        return shifts

    def sums(self, stream: int, values: NDArray[Any]) -> Array:
        """The sum of one value a sample over the batches of each replicate, [1 + replicates]."""
        starts = np.concatenate([[0], np.cumsum(self.streams[stream].sizes)[:-1]])
        return np.asarray(self._batches[stream] @ np.add.reduceat(values.astype(np.float64), starts))

    def error(self, group: _Group) -> Array:
        """The error of a group over all samples, in per cent, [1 + replicates]."""
        wrong, seen = np.zeros(1 + self.replicates), np.zeros(1 + self.replicates)
        for stream, runs in group.by_stream.items():
            share = self.runs(group, stream)
            for place, run in enumerate(runs):
                wrong += share[:, place] * self.sums(stream, ~run.hits)
                seen += share[:, place] * self.sums(stream, np.ones(len(run.hits)))
        return self.share(wrong, seen) + self.moved(group)

    def share(self, part: Array, whole: Array) -> Array:
        """A part of a whole in every replicate, in per cent; NaN where there is no whole.

        Streams can count less than nothing in a replicate, so over several the share moves as it would for small moves.
        """
        if len(self.streams) > 1 and whole[0] > 0:
            observed = part[0] / whole[0]
            return np.asarray(100 * (observed + (part - observed * whole) / whole[0]))
        return np.divide(100 * part, whole, out=np.full_like(part, np.nan), where=whole > 0)


class _Pair:
    """The difference between two groups in every replicate."""

    def __init__(self, sampler: _Sampler, ours: _Group, theirs: _Group) -> None:
        self.to, self.labels = theirs.method, ours.labels
        self.all = self._differ(sampler, ours, theirs, everything=True)
        asked = any(run.picked.any() for run in (*ours.runs, *theirs.runs))
        self.never_asked = self._differ(sampler, ours, theirs, everything=False) if asked else self.all

    @staticmethod
    def _differ(sampler: _Sampler, ours: _Group, theirs: _Group, *, everything: bool) -> Array:
        apart, seen = np.zeros(1 + sampler.replicates), np.zeros(1 + sampler.replicates)
        for stream, mine in ours.by_stream.items():
            left, right = sampler.runs(ours, stream), sampler.runs(theirs, stream)
            for i, one in enumerate(mine):
                for j, other in enumerate(theirs.by_stream[stream]):
                    kept = np.ones(len(one.hits), dtype=bool) if everything else one.never_asked & other.never_asked
                    share = left[:, i] * right[:, j]
                    # Wrong here and right there counts one up, the other way round one down.
                    apart += share * sampler.sums(stream, kept * (other.hits.astype(int) - one.hits.astype(int)))
                    seen += share * sampler.sums(stream, kept)
        return sampler.share(apart, seen) + sampler.moved(ours) - sampler.moved(theirs)

    def result(self) -> Difference:
        # Where every picture was asked for, nothing is left to compare.
        kept = self.never_asked if np.isfinite(self.never_asked).all() else None
        rates = [
            None if points is None or not self.labels else -100 * points / self.labels for points in (self.all, kept)
        ]
        never, per_100, per_100_never = (None if points is None else _interval(points) for points in (kept, *rates))
        return Difference(self.to, _interval(self.all), never, per_100, per_100_never)


def _break_evens(
    groups: Sequence[_Group], best: _Group, differences: Mapping[str, _Pair], kept: Literal["all", "never_asked"]
) -> list[BreakEven]:
    crossings = []
    for method in dict.fromkeys(group.method for group in groups if group.kind == "asking"):
        asking = sorted((g for g in groups if g.method == method and g.kind == "asking"), key=lambda g: g.ratio)
        curve = [(group.ratio, getattr(differences[group.name], kept)) for group in asking]
        # Where every picture was asked for, nothing is left to compare.
        curve = [(ratio, values) for ratio, values in curve if np.isfinite(values).all()]
        if not curve:
            continue
        tried, sure = (curve[0][0], curve[-1][0]), [r for r, values in curve if bootstrap.interval(values[1:])[1] < 0]
        # The same method without labels is the curve's point at ratio 0.
        twin = next((g for g in groups if g.kind == "unlabelled" and g.core == asking[0].core), None)
        if twin is not None:
            at_zero = np.zeros_like(curve[0][1]) if twin is best else getattr(differences[twin.name], kept)
            curve = [(0.0, at_zero), *curve]
        ratios = [ratio for ratio, _ in curve]
        breaks = bootstrap.break_even(ratios, np.array([values for _, values in curve]))
        low, high = bootstrap.interval(breaks[1:])
        crossings.append(
            BreakEven(
                method,
                best.method,
                ratio=_finite(breaks[0]),
                low=_finite(low),
                high=_finite(high),
                at_most=bool(breaks[0] == ratios[0]),
                told_apart=min(sure, default=None),
                tried=tried,
            )
        )
    return crossings


_NOTHING = Interval(0.0, 0.0, 0.0)


def _series(name: str, xs: Sequence[float], intervals: Sequence[Interval]) -> Series:
    """Means with their intervals, which reach further to one side than to the other."""
    return Series(name, xs, [one.mean for one in intervals], ends=[(one.low, one.high) for one in intervals])


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _interval(values: Array) -> Interval:
    """What was observed, with the middle 95 % of the replicates."""
    return Interval(float(values[0]), *bootstrap.interval(values[1:]))


def _ratio(value: float | None) -> str:
    return "never" if value is None else f"{value:.2g}"


def _plain(interval: Interval, short: bool) -> str:
    return f"{interval.mean:.2f}" if short else f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _around(error: tuple[float, float] | None, short: bool) -> str:
    return "" if error is None else f"{error[0]:.2f}" if short else f"{error[0]:.2f} ± {error[1]:.2f}"


def _cells(difference: Difference | None) -> list[str]:
    return (
        ["", "", ""]
        if difference is None
        else [_span(difference.all), _span(difference.never_asked), _span(difference.per_100)]
    )


def _span(interval: Interval | None) -> str:
    """`−1.25 [−2.42, −0.11]`."""
    if interval is None:
        return ""
    mean, low, high = (f"{value:+.2f}".replace("-", "−") for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"
