"""Cards of a table or figure, collected from folders and laid to the rows that they are runs of."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from wise_atta import errors
from wise_atta.bench import runs as bundles
from wise_atta.bench.experiment import card_files, read_cards
from wise_atta.bench.nudges import all_nudged
from wise_atta.bench.paper.define import ALIASES, Spot, experiment_of, has_chance, own_options, places, rows
from wise_atta.bench.paper.items import Column, Item, Row
from wise_atta.bench.record import read_json, read_parquet
from wise_atta.bench.rivals import SEEDS, SETTINGS
from wise_atta.methods import METHODS
from wise_atta.when import POLICIES

T = TypeVar("T")
TENTHS = 10
# What tells one row from another: a run that differs there is another row's. One that differs elsewhere is no row's.
_ROW = frozenset(
    (
        *("data", "protocol", "severity", "batch", "stream", "model", "method", "policy", "utility", "selector"),
        *("ratio", "labels", "exhaust", "early", "delay", "noise", "context", "late_weight", "late_limit"),
        *("expires_after", "statistics", "prior", "slack", "credit", "ties", "window", "warmup", "horizon", "total"),
        *("exact", "block", "only_selected", "train_head"),
    )
)
# Where and how fast a run happened; its own row is checked to agree in what of that changes numbers.
_ANYWHERE = frozenset({"seed", "device", "threads", "deterministic", "workers", "tag"})
_FREE = frozenset({"seed", "workers", "tag"})
_OF_POLICIES = frozenset(name for policy in POLICIES.values() for name in inspect.signature(policy).parameters)


@dataclass(frozen=True)
class Run:
    """A finished run: its card, and what figures are drawn from beyond the card.

    Parameters
    ----------
    folder
        Where its rows are read from, if they are needed.
    kept
        Series that were kept beside a published card.
    """

    card: Mapping[str, Any]
    folder: Path | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tenths(self) -> list[int] | None:
        """Labels asked for in each tenth of the stream; None where the run's rows are not at hand."""
        return self._series("tenths", "steps", tenths_of)

    @property
    def queries(self) -> list[list[float]] | None:
        """Entropy and drift of every sample that was asked about; None where the run's rows are not at hand."""
        return self._series("queries", "queries", queries_of)

    @property
    def classes(self) -> int:
        return int(self.card["provenance"]["stream"]["classes"])

    def _series(self, name: str, file: str, make: Callable[[Sequence[Mapping[str, Any]]], list[T]]) -> list[T] | None:
        if name in self.kept:
            return list(self.kept[name])
        path = None if self.folder is None else self.folder / f"{file}.parquet"
        return None if path is None or not path.exists() else make(read_parquet(path))


def tenths_of(steps: Sequence[Mapping[str, Any]]) -> list[int]:
    """Labels asked for in each tenth of a stream.

    >>> tenths_of([{"asked": 1}] * 15 + [{"asked": 0}] * 5)
    [2, 2, 2, 2, 2, 2, 2, 1, 0, 0]
    """
    asked = np.array([row["asked"] for row in steps])
    where = np.arange(len(asked)) * TENTHS // max(1, len(asked))
    return [int(asked[where == tenth].sum()) for tenth in range(TENTHS)]


def queries_of(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Entropy and drift of every question, in few digits; without those whose drift was not computed."""
    known = [(row["entropy"], row["drift"]) for row in rows if row["drift"] is not None]
    return [[round(entropy, 4), float(f"{drift:.4g}")] for entropy, drift in known]


def read(paths: Sequence[Path], problems: list[str] | None = None) -> list[Run]:
    """All runs in folders, bundles and published lists of cards, each once.

    A folder of a run holds `card.json`; published runs are a list, `cards.json`, with `series.json` beside it.
    `problems` takes what cannot be read, which otherwise is an error.
    """
    kept: dict[str, tuple[Run, Path]] = {}
    for path in paths:
        if not path.exists():
            raise errors.DataError(f"{path} does not exist: give folders of runs, bundles, or published cards")
        for file in card_files(path):
            wrong: list[str] = []
            runs = _in(file, wrong)
            if wrong and problems is None:
                raise errors.DataError("; ".join(wrong))
            if problems is not None:
                problems += wrong
            for run in runs:
                key = f"{run.card['digest']} {run.card['provenance'].get('device')}"
                first, there = kept.setdefault(key, (run, file))
                if first.card["results"]["error"] != run.card["results"]["error"]:
                    raise errors.DataError(
                        f"{there} and {file} hold the same experiment, {run.card['digest']}, with different outcomes: "
                        "leave one out"
                    )
    return [run for run, _ in kept.values()]


def _in(file: Path, problems: list[str]) -> list[Run]:
    try:
        if file.suffix != ".json":
            bundled = bundles.find([file])
            problems += bundled.problems
            return [Run(one.card, None, _series(one)) for one in bundled.runs]
        cards = read_cards(file, results=True, problems=problems)
        beside = file.with_name(file.name.replace("cards", "series"))
        series = read_json(beside) if file.name != "card.json" and beside.exists() else {}
    except errors.DataError as error:
        problems.append(str(error))
        return []
    rows = file.parent if file.name == "card.json" else None
    return [Run(card, rows, series.get(card["digest"], {})) for card in cards]


def _series(run: bundles.Run) -> dict[str, Any]:
    """What figures need of a run whose rows are not in a folder of its own."""
    return {"tenths": tenths_of(run.steps), **({"queries": queries_of(run.queries)} if run.queries else {})}


@dataclass(frozen=True)
class Cell:
    """The runs of one row at one place, by seed.

    Parameters
    ----------
    left_out
        Where there are none: runs that would be, but for what is said.
    own_streams
        Whether seeds have streams of their own at this place.
    """

    row: Row
    spot: Spot
    runs: tuple[Run, ...]
    left_out: tuple[str, ...] = ()
    own_streams: bool = False

    def values(self, domain: str | None = None, result: str = "error") -> dict[int, float]:
        """A result by seed: of the whole stream, or the error in one domain."""
        return {
            int(run.card["experiment"]["seed"]): float(
                run.card["results"][result] if domain is None else run.card["results"]["by_domain"][domain]
            )
            for run in self.runs
        }

    @property
    def nudged(self) -> list[list[float]]:
        """Errors of runs with nudged weights, for each seed whose card has a spread of its own."""
        return all_nudged(run.card for run in self.runs)

    @property
    def limit(self) -> int | None:
        """Pictures a domain, where the stream was made shorter than the setting's."""
        limit = self.runs[0].card["experiment"]["stream"].get("limit")
        return None if limit == self.spot.setting.fields.get("stream", {}).get("limit") else limit

    @property
    def tuned(self) -> dict[str, Any]:
        """Options of the runs that neither the row nor the setting asks for: what was tuned."""
        known = {**self.spot.setting.options.get(self.row.method, {}), **own_options(self.row, self.spot)}
        options = self.runs[0].card["experiment"]["options"]
        return {name: value for name, value in options.items() if name not in known or known[name] != value}

    @property
    def drawn(self) -> bool:
        """Whether another seed can give other numbers, by its draws or by its stream."""
        return self.own_streams or has_chance(self.row)

    @property
    def wanted(self) -> int:
        """How many seeds are enough: the paper's three; one where nothing is drawn."""
        return len(SEEDS) if self.drawn else max(1, len(self.runs))


@dataclass(frozen=True)
class Measured:
    """A number over seeds.

    Parameters
    ----------
    by_seed
        What each seed gave.
    drawn
        Whether another seed can give another number; otherwise one value stands for all seeds.

    Examples
    --------
    >>> Measured({0: 1.0, 41: 2.0, 58: 3.0}).text()
    '2.0 ± 1.0'
    """

    by_seed: Mapping[int, float]
    drawn: bool = True

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.by_seed.values())))

    @property
    def sd(self) -> float | None:
        values = list(self.by_seed.values())
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def text(self, digits: int = 1, sign: str = "") -> str:
        sd = "" if self.sd is None else f" ± {self.sd:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{sd}"

    def minus(self, other: Measured) -> Measured:
        """The difference seed by seed, over the seeds that both were run with."""
        return self._joined(other, lambda a, b: a - b)

    def plus(self, other: Measured) -> Measured:
        """The sum seed by seed."""
        return self._joined(other, lambda a, b: a + b)

    def _joined(self, other: Measured, join: Callable[[float, float], float]) -> Measured:
        one, two = self._for(other.by_seed), other._for(self.by_seed)
        both = {seed: join(one[seed], two[seed]) for seed in one if seed in two}
        # Without a seed in common the means are all there is to compare.
        return Measured(both or {0: join(self.mean, other.mean)}, self.drawn or other.drawn)

    def _for(self, seeds: Mapping[int, float]) -> Mapping[int, float]:
        alone = not self.drawn and len(self.by_seed) == 1
        return dict.fromkeys(seeds, self.mean) if alone else self.by_seed


class Gathered:
    """The runs of a table or figure on the paper's data, or on one setting at hand."""

    def __init__(self, exhibit: Item, on: str | None, cells: Mapping[tuple[str, str], Cell]) -> None:
        self.item, self.on, self.cells = exhibit, on, cells
        self.spots = list(dict.fromkeys(cell.spot.name for cell in cells.values()))

    def cell(self, row: str, spot: str) -> Cell | None:
        return self.cells.get((row, spot))

    def nudged(self, row: str, spot: str) -> list[list[float]]:
        """Errors of a row's runs with nudged weights, by seed."""
        cell = self.cell(row, spot)
        return [] if cell is None else cell.nudged

    def measured(self, row: str, column: Column | str) -> Measured | None:
        """What was measured in a column of the paper, or at a spot; None if not all that it needs was run."""
        if isinstance(column, str):
            column = Column(column, (column,))
        parts: list[Measured] = []
        for place in column.places:
            cell = self.cell(row, place)
            if cell is None or not cell.runs:
                return None
            parts.append(Measured(cell.values(column.domain), cell.drawn))
        total = functools.reduce(Measured.plus, parts)
        return Measured({seed: value / len(parts) for seed, value in total.by_seed.items()}, total.drawn)

    @property
    def runs(self) -> list[Run]:
        """Every run once."""
        return list({id(run): run for cell in self.cells.values() for run in cell.runs}.values())

    @property
    def tuned(self) -> dict[str, dict[str, Any]]:
        """Tuned options by method."""
        return {cell.row.method: cell.tuned for cell in self.cells.values() if cell.runs and cell.tuned}


def gather(
    exhibit: Item,
    runs: Sequence[Run],
    on: str | None = None,
    *,
    protocols: Sequence[str] | None = None,
    tuned: Mapping[str, Mapping[str, Any]] | None = None,
) -> Gathered:
    """Lay runs to the rows of a table or figure.

    Where a row has runs that differ in more than the seed, `tuned` decides; without it that is an error. So it is where
    rows of a place were run over different streams, or on different devices.
    """
    cells: dict[tuple[str, str], Cell] = {}
    for spot in places(exhibit, on, protocols):
        here = [_cell(row, spot, runs, tuned or {}) for row in rows(exhibit, spot)]
        own = _one_stream(spot, [run for cell in here for run in cell.runs])
        cells |= {(cell.row.name, spot.name): replace(cell, own_streams=own) for cell in here}
    return Gathered(exhibit, None if on is None else ALIASES.get(on, on), cells)


def settings_of(runs: Sequence[Run]) -> list[str | None]:
    """Which settings at hand runs are of; None for the paper's own data."""
    data = {run.card["experiment"]["data"] for run in runs}
    at_hand: list[str | None] = [name for name, setting in SETTINGS.items() if setting.fields["data"] in data]
    return at_hand or [None]


def _cell(row: Row, spot: Spot, runs: Sequence[Run], tuned: Mapping[str, Mapping[str, Any]]) -> Cell:
    want = experiment_of(row, spot, tuned).model_dump(mode="json")
    groups: dict[str, list[Run]] = {}
    odd: dict[str, int] = {}
    for run in runs:
        have = run.card["experiment"]
        apart = _apart(have, want, tuned.get(row.method, {}))
        if not apart:
            key = {name: value for name, value in have.items() if name not in _FREE}
            groups.setdefault(json.dumps({**key, **_ran_on(run)}, sort_keys=True), []).append(run)
        elif not apart.keys() & _ROW:
            differences = ", ".join(f"{name} is {mine}, not {its}" for name, (mine, its) in apart.items())
            odd[differences] = odd.get(differences, 0) + 1
    _refuse_several(f"row {row.name!r} at {spot.title}", list(groups), ", or --tuned to choose by options")
    chosen = next(iter(groups.values()), [])
    if len({int(run.card["experiment"]["seed"]) for run in chosen}) < len(chosen):
        raise errors.DataError(
            f"row {row.name!r} at {spot.title} has runs of one seed on several streams: give folders of one kind"
        )
    left_out = [f"{times} of {row.name} at {spot.title} whose {differences}" for differences, times in odd.items()]
    by_seed = sorted(chosen, key=lambda run: int(run.card["experiment"]["seed"]))
    return Cell(row, spot, tuple(by_seed), () if chosen else tuple(left_out))


def _apart(have: Mapping[str, Any], want: Mapping[str, Any], fixed: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """What keeps a run from being one of a row: by name, what it has and what the row has.

    Numbers of the method, such as a learning rate, may have been tuned, but for those that are `fixed`.
    """
    stream, asked = ({k: v for k, v in one["stream"].items() if k not in ("limit", "seed")} for one in (have, want))
    differing = {"stream": (stream, asked)} if stream != asked else {}
    for name in want.keys() - _ANYWHERE - {"stream", "options"}:
        if have.get(name, want[name]) != want[name]:
            differing[name] = have[name], want[name]
    options, wanted = have["options"], want["options"]
    takes = inspect.signature(METHODS[want["method"]]).parameters
    for name in options.keys() | wanted.keys():
        # With a preset what was not given is the preset's.
        default = takes[name].default if name in takes and "preset" not in wanted else None
        mine, its = options.get(name, default), wanted.get(name, default)
        number = isinstance(options.get(name), int | float) and not isinstance(mine, bool)
        if mine != its and not (number and name not in {*fixed, *_OF_POLICIES, "labels"}):
            differing[name] = mine, its
    return dict(sorted(differing.items()))


def _ran_on(run: Run) -> dict[str, Any]:
    """Over which stream a run went, whatever its seed, and on what."""
    stream = {name: value for name, value in run.card["experiment"]["stream"].items() if name != "seed"}
    return {"stream": stream, "made on": run.card["provenance"].get("device")}


def _one_stream(spot: Spot, runs: Sequence[Run]) -> bool:
    """Refuse rows that were run over different streams, or on different devices; say whether seeds have their own."""
    _refuse_several(spot.title, list(dict.fromkeys(json.dumps(_ran_on(run), sort_keys=True) for run in runs)))
    orders: dict[int, int] = {}
    for run in runs:
        seed, order = (int(one.get("seed", 0)) for one in (run.card["experiment"], run.card["experiment"]["stream"]))
        if orders.setdefault(seed, order) != order:
            raise errors.DataError(
                f"{spot.title} has runs of seed {seed} over the streams with seeds {orders[seed]} and {order}: give "
                "folders with one kind of run, with --own-streams or without"
            )
    return any(orders.values())


def _refuse_several(who: str, kinds: Sequence[str], more: str = "") -> None:
    if len(kinds) > 1:
        keys = [json.loads(kind) for kind in kinds]
        differ = [name for name in keys[0] if any(key.get(name) != keys[0][name] for key in keys[1:])]
        raise errors.DataError(
            f"{who} has runs that differ in {', '.join(differ)}: "
            + "; ".join(str({name: key.get(name) for name in differ}) for key in keys)
            + f". Give folders with one kind of run{more}"
        )
