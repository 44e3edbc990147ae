"""The choice of a learning rate: a small grid on a stream that is not scored, the same for every method."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wise_atta import errors
from wise_atta.bench.engines import Result
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.sweep import Places, Report, sweep

LEARNING_RATES = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2)


@dataclass(frozen=True)
class Trial:
    """One point of the grid and what came of it; a run that diverged has an infinite error.

    `labels` were asked for by the method, `scored` ones were looked at to find the error.
    """

    options: dict[str, Any]
    error: float
    labels: int
    scored: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "options": self.options,
            "error": self.error if math.isfinite(self.error) else "diverged",
            "labels": self.labels,
        }


@dataclass(frozen=True)
class Tuned:
    """What tuning found, on which stream, and how many labels it saw there."""

    method: str
    data: str
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The lowest error; of equal ones, the first."""
        return min(self.trials, key=lambda trial: trial.error)

    @property
    def labels(self) -> int:
        """Labels that all trials together asked for."""
        return sum(trial.labels for trial in self.trials)

    @property
    def scored(self) -> int:
        """Labels of the stream that the trials were scored by: all of them, the same for every trial."""
        return max(trial.scored for trial in self.trials)

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "data": self.data,
            "best": self.best.options,
            "labels_asked": self.labels,
            "labels_scored": self.scored,
            "trials": [trial.to_dict() for trial in self.trials],
        }


def tuning_data(scored: str) -> str:
    """The stream to tune on: the four further corruptions of the same pictures' data set.

    >>> tuning_data("cifar10+c")
    'cifar10+extra'
    """
    clean, plus, suffix = scored.rpartition("+")
    if plus and suffix == "c":
        return f"{clean}+extra"
    raise errors.BadConfig(
        f"there is no stream to tune on beside {scored!r}: name one with --on, for example a clean data set with +extra"
    )


@dataclass(frozen=True)
class Grid:
    """The trials of one method: points of its options, and the run that tries each."""

    method: str
    data: str
    points: tuple[dict[str, Any], ...]
    runs: tuple[Experiment, ...]


def lay_out(experiment: Experiment, *, on: str | None = None, grid: Mapping[str, Sequence[Any]] | None = None) -> Grid:
    """The runs that tune a method, without running them.

    Parameters
    ----------
    experiment
        What will be scored later. Its data is never tuned on.
    on
        The data to tune on; for corrupted sets the four further corruptions.
    grid
        Options of the method and their values; the learning rate if not given.
    """
    data = tuning_data(experiment.data) if on is None else on
    if data == experiment.data:
        raise errors.BadConfig(f"{data!r} is the scored stream: tune on another one")
    grid = {"lr": LEARNING_RATES} if grid is None else grid
    if not all(grid.values()):
        raise errors.BadConfig("the grid holds no run: every option needs at least one value")
    base = experiment.model_dump() | {"data": data}
    base["stream"] = {k: v for k, v in experiment.stream.items() if k != "domains"}
    points = tuple(dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    runs = tuple(Experiment.parse({**base, "options": {**experiment.options, **point}}) for point in points)
    return Grid(experiment.method, data, points, runs)


def tune(grids: Sequence[Grid], places: Places, *, jobs: int = 1, report: Report | None = None) -> list[Tuned]:
    """Run every trial of every grid. A trial that diverges is the worst of its grid, and does not stop the others."""
    failed: dict[str, errors.WiseAttaError] = {}
    runs = [run for grid in grids for run in grid.runs]
    cards = sweep(runs, places, jobs=jobs, report=report, failed=failed)
    by_digest: dict[str, Result] = {**{card["digest"]: card for card in cards}, **failed}
    return [_gather(grid, by_digest) for grid in grids]


def _gather(grid: Grid, by_digest: Mapping[str, Result]) -> Tuned:
    pairs = zip(grid.points, grid.runs, strict=True)
    tuned = Tuned(grid.method, grid.data, tuple(_trial(point, by_digest[run.digest]) for point, run in pairs))
    if math.isinf(tuned.best.error):
        raise errors.NotFinite(f"{grid.method} diverged at every point of {list(grid.points)}: try lower rates")
    return tuned


def _trial(point: dict[str, Any], result: Result) -> Trial:
    if isinstance(result, errors.NotFinite):  # a rate too high is an answer too
        return Trial(point, math.inf, 0)
    if isinstance(result, errors.WiseAttaError):
        raise result
    results = result["results"]
    return Trial(point, results["error"], results["labels_spent"], results["samples"])
