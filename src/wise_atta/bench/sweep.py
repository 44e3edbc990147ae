"""Sweeps: a grid of experiments is spelled out, run by an engine, and gathered as cards."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from wise_atta import errors
from wise_atta.bench import engines
from wise_atta.bench.engines import Engine, Job
from wise_atta.bench.experiment import Experiment, below
from wise_atta.bench.record import forget, read_json
from wise_atta.bench.run import changed_fields, finished, idle, pick_device
from wise_atta.bench.table import markdown, rows

# Called when a run is over: its experiment, and its card or what went wrong.
Report = Callable[[Experiment, "dict[str, Any] | errors.WiseAttaError"], None]


def expand(grid: Mapping[str, Any]) -> list[Experiment]:
    """Every combination of the fields that are lists, each once. `options.lr` stands for the field lr inside options.

    A field that some combinations have a use for is left out of the others; one that none has a use for stays in, and
    its runs say why they cannot be made.

    >>> len(expand({"method": "tent", "options.lr": [0.001, 0.01], "seed": [0, 1, 2]}))
    6
    >>> len(expand({"method": ["tent", "wise"], "ratio": [0.1, 0.5]}))
    3
    """
    axes = [value if isinstance(value, list) else [value] for value in grid.values()]
    for name, values in zip(grid, axes, strict=True):
        if not values:
            raise errors.BadConfig(f"the grid has no value for {name!r}, so there is nothing to run")
    runs = [Experiment.parse(dict(zip(grid, values, strict=True))) for values in itertools.product(*axes)]
    useless = [idle(one).keys() for one in runs]
    of_use = {name for one, names in zip(runs, useless, strict=True) for name in set(changed_fields(one)) - names}
    distinct: dict[tuple[str, str], Experiment] = {}
    for one, names in zip(runs, useless, strict=True):
        left_out = {name: Experiment.model_fields[name].default for name in of_use & names}
        plain = one.model_copy(update=left_out)
        distinct.setdefault((plain.digest, plain.tag), plain)
    return list(distinct.values())


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
    engine: Engine | None = None,
    devices: Sequence[str] | None = None,
    address: str | None = None,
    report: Report | None = None,
    keep: int = 2,
    again: bool = False,
    fresh: bool = False,
    checkpoint: int | None = None,
    failed: dict[str, errors.WiseAttaError] | None = None,
) -> list[dict[str, Any]]:
    """Run experiments that are not finished yet and give all their cards, in order.

    A run that fails does not stop the others; when all are through, the first failure is raised, unless `failed` takes
    them. Numbers do not depend on the engine.

    Parameters
    ----------
    jobs
        How many runs at once.
    engine
        ``"inline"``: this process, with streams held in memory. ``"process"``: several of this machine. ``"ray"``: a
        cluster. None: several processes where `jobs` or `fresh` ask for them.
    devices
        Given to processes in turn, for experiments on `auto` or `cuda`; None: all GPUs of this machine, if it has
        several.
    address
        Of a Ray cluster that is running; None: one on this machine, for the time being.
    report
        Told about each run when it is over.
    keep
        How many streams a process holds in memory.
    again
        Whether finished runs are run once more.
    fresh
        Whether each run gets a process of its own that ends with it.
    checkpoint
        Number of batches between checkpoints; None: see `run`.
    failed
        Filled with what went wrong, by the digest of the experiment; its card is then missing from the list.
    """
    if not experiments:
        raise errors.BadConfig("the grid holds no run")
    if jobs < 1:
        raise errors.BadConfig(f"jobs={jobs}: at least one run at a time")
    _check(engine, devices, address)
    # The same run asked for twice is run once.
    todo = list({experiment.digest: experiment for experiment in experiments}.values())
    work = [
        Job(experiment, places.of(experiment), places.data, places.weights, checkpoint=checkpoint, keep=keep)
        for experiment in todo
    ]
    cards: dict[str, dict[str, Any]] = {}
    wrong: dict[str, errors.WiseAttaError] = {} if failed is None else failed
    # What is finished needs no process: starting one takes longer than reading a card.
    over = {job.experiment.digest: result for job in work if (result := _over(job, again)) is not None}
    left = [job for job in work if job.experiment.digest not in over]
    through = ((job, over[job.experiment.digest]) for job in work if job.experiment.digest in over)
    for job, result in itertools.chain(through, _each(left, jobs, engine, devices, address, fresh)):
        if isinstance(result, errors.WiseAttaError):
            wrong[job.experiment.digest] = result
        else:
            cards[job.experiment.digest] = result
        if report is not None:
            report(job.experiment, result)
    if failed is None and wrong:
        raise next(iter(wrong.values()))
    return [_named(cards[one.digest], one) for one in experiments if one.digest in cards]


def _named(card: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    """A card under the name that was asked for: one run may stand for experiments of several."""
    return {**card, "experiment": {**card["experiment"], "tag": experiment.tag}}


def _check(engine: str | None, devices: Sequence[str] | None, address: str | None) -> None:
    """Before `again` forgets finished runs."""
    if engine not in (None, *get_args(Engine)):
        raise errors.unknown("engine", str(engine), get_args(Engine))
    if address is not None and engine != "ray":
        raise errors.BadConfig(f"address={address!r} is that of a cluster: say engine='ray' as well")
    for device in devices or ():
        pick_device(device)


def _over(job: Job, again: bool) -> engines.Result | None:
    """The card of a run that is finished, or why its folder cannot be used; None: it is still to be run."""
    try:
        if again:
            forget(job.folder)
        return finished(job.folder, job.experiment)
    except errors.WiseAttaError as error:
        return error


def _each(
    work: Sequence[Job],
    jobs: int,
    engine: Engine | None,
    devices: Sequence[str] | None,
    address: str | None,
    fresh: bool,
) -> Iterator[tuple[Job, engines.Result]]:
    if not work:
        return iter(())
    if engine == "ray":
        return engines.ray(work, jobs, address)
    if devices is None:
        here = engines.gpus()
        devices = here if len(here) > 1 else []
    if engine == "process" or (engine is None and (jobs > 1 or fresh)):
        return engines.process(work, jobs, devices, fresh)
    return engines.inline([job.on(devices[0]) for job in work] if devices else work)


def table(cards: Sequence[Mapping[str, Any]]) -> str:
    """Errors of a grid: a column for every field in which its runs differ, mean and deviation over seeds."""
    lines = rows(cards)
    fields = [_flat(row.experiment) for row in lines]
    names = list(dict.fromkeys(name for each in fields for name in each))
    axes = [name for name in names if len({json.dumps(each.get(name)) for each in fields}) > 1] or ["method"]
    header = [*axes, "error %", "never asked %", "labels", "runs"]
    return markdown(
        header,
        [
            [
                *("" if each.get(axis) is None else str(each[axis]) for axis in axes),
                row.text(),
                row.text("error_never_asked"),
                f"{row.mean('labels_spent'):.0f}",
                str(len(row.cards)),
            ]
            for row, each in zip(lines, fields, strict=True)
        ],
    )


def _flat(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by name, those inside options and stream as `options.lr`."""
    flat: dict[str, Any] = {}
    for name, value in experiment.items():
        flat |= {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
    return {name: value for name, value in flat.items() if name not in ("seed", "tag")}


def cards(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """All run cards below some folders, in the order of their paths."""
    paths = sorted({path for folder in folders for path in below(folder, "card.json")})
    if not paths:
        raise errors.DataError(f"no card.json below {', '.join(map(str, folders))}: was anything run there?")
    return [read_json(path) for path in paths]
