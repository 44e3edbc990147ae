"""Which learning rate? A small grid on a stream that is not the scored one, the same for every method."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wise_atta import errors
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.sweep import Places, Report, sweep

LEARNING_RATES = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2)


@dataclass(frozen=True)
class Trial:
    """One point of the grid and what came of it."""

    options: dict[str, Any]
    error: float
    labels: int


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
        """Labels that all trials together asked for. Scoring the trials looked at every label of the stream."""
        return sum(trial.labels for trial in self.trials)

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "data": self.data,
            "best": self.best.options,
            "labels_asked": self.labels,
            "trials": [{"options": t.options, "error": t.error, "labels": t.labels} for t in self.trials],
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


def tune(
    experiment: Experiment,
    places: Places,
    *,
    on: str | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    jobs: int = 1,
    report: Report | None = None,
) -> Tuned:
    """Try every point of a grid for one method and keep the best.

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
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    runs = [Experiment.parse({**base, "options": {**experiment.options, **point}}) for point in points]
    cards = sweep(runs, places, jobs=jobs, report=report)
    trials = [
        Trial(point, card["results"]["error"], card["results"]["labels_spent"])
        for point, card in zip(points, cards, strict=True)
    ]
    return Tuned(experiment.method, data, tuple(trials))
