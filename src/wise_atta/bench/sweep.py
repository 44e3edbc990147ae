"""How are many experiments run? A grid is spelled out, run in this process or in several, and gathered as cards."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wise_atta import errors
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.hold import Shelf
from wise_atta.bench.record import read_json
from wise_atta.bench.run import run

# Called when a run is over: its experiment, and its card or what went wrong.
Report = Callable[[Experiment, "dict[str, Any] | errors.WiseAttaError"], None]


def expand(grid: Mapping[str, Any]) -> list[Experiment]:
    """Every combination of the fields that are lists. `options.lr` stands for the field lr inside options.

    >>> len(expand({"method": "tent", "options.lr": [0.001, 0.01], "seed": [0, 1, 2]}))
    6
    """
    axes = [value if isinstance(value, list) else [value] for value in grid.values()]
    for name, values in zip(grid, axes, strict=True):
        if not values:
            raise errors.BadConfig(f"the grid has no value for {name!r}, so there is nothing to run")
    return [Experiment.parse(_nested(dict(zip(grid, values, strict=True)))) for values in itertools.product(*axes)]


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in flat.items():
        field, _, inner = name.partition(".")
        if inner:
            content[field] = {**content.get(field, {}), inner: value}
        else:
            content[field] = {**value, **content.get(field, {})} if isinstance(value, dict) else value
    return content


@dataclass(frozen=True)
class Places:
    """Where a sweep reads and writes."""

    out: Path
    data: Path | None = None
    weights: Path | None = None

    def of(self, experiment: Experiment) -> Path:
        """The folder of a run: found again by the experiment's digest."""
        return self.out / f"{experiment.name}-{experiment.digest}"


def sweep(
    experiments: Sequence[Experiment],
    places: Places,
    *,
    jobs: int = 1,
    report: Report | None = None,
    keep: int = 2,
    again: bool = False,
    fresh: bool = False,
) -> list[dict[str, Any]]:
    """Run experiments that are not finished yet and give all their cards, in order.

    A run that fails does not stop the others; when all are through, the first failure is raised.

    Parameters
    ----------
    jobs
        Number of processes. One: this process, with streams held in memory.
    report
        Told about each run when it is over.
    keep
        How many streams a process holds in memory.
    again
        Whether finished runs are run once more.
    fresh
        Whether each run gets a process of its own that ends with it.
    """
    if not experiments:
        raise errors.BadConfig("the grid holds no run")
    report = report or (lambda experiment, result: None)
    results: dict[str, dict[str, Any] | errors.WiseAttaError] = {}
    for experiment, result in _each(experiments, places, jobs, keep, again, fresh):
        results[experiment.digest] = result
        report(experiment, result)
    for result in results.values():
        if isinstance(result, errors.WiseAttaError):
            raise result
    found = [results[experiment.digest] for experiment in experiments]
    return [card for card in found if isinstance(card, dict)]


def _each(
    experiments: Sequence[Experiment], places: Places, jobs: int, keep: int, again: bool, fresh: bool
) -> Iterator[tuple[Experiment, dict[str, Any] | errors.WiseAttaError]]:
    if jobs <= 1 and not fresh:
        for experiment in experiments:
            yield experiment, _in_worker(experiment, places, keep, again)
        return
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_die_by_interrupt,
        max_tasks_per_child=1 if fresh else None,
    )
    try:
        futures: dict[Future[dict[str, Any] | errors.WiseAttaError], Experiment] = {
            pool.submit(_in_worker, experiment, places, keep, again): experiment for experiment in experiments
        }
        waiting: Iterable[Future[dict[str, Any] | errors.WiseAttaError]] = futures
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _die_by_interrupt() -> None:
    """Let Ctrl-C end a worker at once: its run goes on from its checkpoint another time."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


_shelf: Shelf | None = None


def _in_worker(experiment: Experiment, places: Places, keep: int, again: bool) -> dict[str, Any] | errors.WiseAttaError:
    global _shelf
    _shelf = _shelf or Shelf(keep)
    return _one(experiment, places, _shelf, again)


def _one(experiment: Experiment, places: Places, shelf: Shelf, again: bool) -> dict[str, Any] | errors.WiseAttaError:
    try:
        return run(
            experiment, places.of(experiment), data=places.data, weights=places.weights, shelf=shelf, again=again
        )
    except errors.WiseAttaError as error:
        return error


def cards(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """All run cards below some folders, in the order of their paths."""
    found = sorted({path for folder in folders for path in folder.rglob("card.json")})
    if not found:
        raise errors.DataError(f"no card.json below {', '.join(map(str, folders))}: was anything run there?")
    return [read_json(path) for path in found]
