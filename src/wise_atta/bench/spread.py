"""The spread of runs of one experiment whose weights differ by 1e-7: how far apart they come by chance.

A card's `spread` is what ten such runs gave. It is measured where the card was made: the card's own run is made again
first, and must come out as it did.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from wise_atta import errors
from wise_atta.bench import engines
from wise_atta.bench.experiment import Experiment, read_cards, whole
from wise_atta.bench.inputs import other_inputs
from wise_atta.bench.nudges import family, nudged, summarise
from wise_atta.bench.place import decisive, surroundings
from wise_atta.bench.record import claimed, read_json, write_cards, write_json
from wise_atta.bench.run import NUDGE, pick_device
from wise_atta.bench.runs import change_bundle
from wise_atta.bench.stream_cache import StreamCache
from wise_atta.bench.verify import experiment_of, not_due, once, within

# Told after every run: the card's digest, the number of the nudged run (None: the card's own), and its error.
Report: TypeAlias = Callable[[str, int | None, float], None]
# The error of a run, in per cent, or why there is none.
Outcome: TypeAlias = float | errors.WiseAttaError
_KEPT = "nudged.json"
_WHERE = "Measure it where the card was made"


@dataclass(frozen=True)
class _Task:
    """One run of a card's experiment: its own, or a nudged one.

    `place` is that of the card among those given, which its digest is not: of two copies one may have been changed.
    """

    place: int
    card: Mapping[str, Any]
    number: int | None
    experiment: Experiment
    data: Path | None
    weights: Path | None

    @cached_property
    def _place(self) -> dict[str, Any]:
        assert self.experiment.threads is not None, "see `experiment_of`"
        return surroundings(pick_device(self.experiment.device), self.experiment.threads)

    @property
    def name(self) -> str:
        """What its error is kept under: the experiment, the number, and what decides last bits."""
        number = "own" if self.number is None else self.number
        return f"{self.experiment.digest} {number} {json.dumps(decisive(self._place))}"

    def run(self, cache: StreamCache) -> Outcome:
        try:
            made = once(self.experiment, data=self.data, weights=self.weights, cache=cache, nudge=self.number)
        except errors.WiseAttaError as wrong:
            return _of(self.card, wrong)
        except Exception as error:
            return engines.failure(f"{self.card['digest']} failed", error)
        problems = other_inputs(self.card["provenance"], made["provenance"])
        if problems:
            return _of(self.card, f"{'; '.join(problems)}. {_WHERE}")
        return self.judged(float(made["results"]["error"]))

    def judged(self, error: float) -> Outcome:
        """An error that was found here, now or earlier; where the card's own must come out the same, no other one."""
        due = self.card["results"]["error"]
        if self.number is not None or error == due or not_due(self.card["provenance"], self._place):
            return error
        return _of(self.card, f"it comes out at {error:.4f} % here, not at {due:.4f} %. {_WHERE}")


def which_run(number: int | None, runs: int) -> str:
    """Which run of a card it is, in words.

    >>> which_run(3, 10), which_run(None, 10)
    ('nudged run 3 of 10', 'its own run again')
    """
    return "its own run again" if number is None else f"nudged run {number} of {runs}"


def _of(card: Mapping[str, Any], why: object) -> errors.DataError:
    return errors.DataError(f"{card['digest']}: {why}")


def measure(
    cards: Iterable[Mapping[str, Any]],
    *,
    runs: int = 10,
    fast: Mapping[str, Any] | None = None,
    jobs: int = 1,
    kept: Path | None = None,
    data: Path | None = None,
    weights: Path | None = None,
    report: Report | None = None,
) -> Iterator[tuple[Mapping[str, Any], dict[str, Any] | errors.WiseAttaError]]:
    """Cards with their spreads, each as soon as it is known, or with the reason why a card has none.

    `low` and `high` are three deviations to either side of the mean, or the extremes where those lie further out. A
    card's own run is one more draw of the same lottery, so the spread reaches to it. It must come out as it did; with
    another torch or device it need not, and `put_spreads` leaves out a spread that does not hold the error.

    Parameters
    ----------
    runs
        Nudged runs a card; two at least.
    fast
        How nudged runs compute where the experiment does not say, such as ``{"channels_last": True}``: in another
        order, which is a nudge as well. The spread tells it.
    jobs
        Runs at once, each in a process.
    kept
        A folder that takes the error of every run when it is over. Those that it holds are not made again.
    report
        Called after every run that was made.
    """
    if runs < 2:
        raise errors.BadConfig(f"a spread needs two runs at least, not {runs}")
    tasks: list[_Task] = []
    errors_of: dict[int, dict[int | None, float]] = {}
    for place, card in enumerate(cards):
        try:
            experiment = experiment_of(card)
            pick_device(experiment.device)
        except errors.WiseAttaError as error:
            yield card, _of(card, error)
            continue
        moved = Experiment.parse({**experiment.model_dump(mode="json"), "fast": {**(fast or {}), **experiment.fast}})
        errors_of[place] = {}
        tasks.append(_Task(place, card, None, experiment, data, weights))
        tasks += [_Task(place, card, number, moved, data, weights) for number in range(1, runs + 1)]
    for task, outcome in _outcomes(tasks, lambda task: task.place in errors_of, jobs, kept, report):
        card, of_card = task.card, errors_of.get(task.place)
        if of_card is None:
            continue
        if isinstance(outcome, errors.WiseAttaError):
            del errors_of[task.place]
            yield card, outcome
            continue
        of_card[task.number] = outcome
        if len(of_card) == runs + 1:
            spread, due = summarise([of_card[number] for number in range(1, runs + 1)]), card["results"]["error"]
            if of_card[None] == due:
                spread |= {"low": min(spread["low"], due), "high": max(spread["high"], due)}
            own = card["experiment"].get("fast", {})
            other = {name: value for name, value in (fast or {}).items() if name not in own}
            yield card, spread | ({"fast": other} if other else {})


def _outcomes(
    tasks: Sequence[_Task], needed: Callable[[_Task], bool], jobs: int, kept: Path | None, report: Report | None
) -> Iterator[tuple[_Task, Outcome]]:
    """What runs gave: those that are kept, then the others, as long as they are needed when their turn comes."""
    with contextlib.nullcontext() if kept is None else claimed(kept):
        known = {} if kept is None else _read(kept / _KEPT)
        before = frozenset(known)
        yield from ((task, task.judged(known[task.name])) for task in tasks if task.name in before)
        waiting = (task for task in tasks if task.name not in before and needed(task))
        for task, outcome in _made(waiting, jobs):
            if not isinstance(outcome, errors.WiseAttaError):
                known[task.name] = outcome
                if kept is not None:
                    write_json(kept / _KEPT, known)
                if report is not None:
                    report(str(task.card["digest"]), task.number, outcome)
            yield task, outcome


def _read(file: Path) -> dict[str, float]:
    known = read_json(file) if file.exists() else {}
    if not all(isinstance(error, float) and math.isfinite(error) for error in known.values()):
        raise errors.DataError(f"{file} does not hold the errors of runs: choose another folder to keep them in")
    return known


def _made(tasks: Iterator[_Task], jobs: int) -> Iterator[tuple[_Task, Outcome]]:
    """Run after run, or many at once, none of which waits for the slowest run of a card."""
    if jobs == 1:
        cache = StreamCache(2)
        yield from ((task, task.run(cache)) for task in tasks)
        return
    running: dict[Future[Outcome], _Task] = {}
    with engines.sharing(jobs), engines.pool(jobs) as pool:
        try:
            while True:
                for task in itertools.islice(tasks, jobs - len(running)):
                    running[pool.submit(_there, task)] = task
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise errors.WiseAttaError("a process died in a run: is there enough memory? Try fewer jobs") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# The streams of a process that runs what others hand to it.
_cache = StreamCache(2)


def _there(task: _Task) -> Outcome:
    """A run in another process, which keeps its streams and decodes by itself if need be."""
    workers = task.experiment.workers or 0
    return replace(task, experiment=task.experiment.model_copy(update={"workers": workers})).run(_cache)


def measured(card: Mapping[str, Any], **how: Any) -> dict[str, Any]:
    """The spread of one card, see `measure`."""
    ((_, spread),) = measure([card], **how)
    if isinstance(spread, errors.WiseAttaError):
        raise spread
    return spread


def borrowed(cards: Sequence[Mapping[str, Any]], runs: int = 10) -> dict[str, dict[str, Any]]:
    """By digest, spreads for the cards that have none, from the same experiments under other seeds.

    Two runs of one experiment lie no further apart than its spread is wide, and the width hardly depends on the seed.
    So a card's error may differ by the width of a sister's, to either side. A sister needs a spread of that many runs.
    """
    sisters: dict[str, list[tuple[float, str]]] = {}
    for card in cards:
        if len(nudged(card)) >= runs:
            width = card["spread"]["high"] - card["spread"]["low"]
            sisters.setdefault(family(card), []).append((width, str(card["digest"])))
    spreads = {}
    for card in cards:
        if not nudged(card) and (near := sisters.get(family(card))):
            (width, digest), error = max(near), card["results"]["error"]
            spreads[str(card["digest"])] = {"nudge": NUDGE, "of": digest, "low": error - width, "high": error + width}
    return spreads


def put_spreads(file: Path, spreads: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Put spreads into a file of cards or a bundle, by digest. Gives what was left out, and why.

    A spread that does not hold the card's own error was not measured where the card was made.

    Parameters
    ----------
    file
        A card, a list of cards as they are published, or a bundle.
    spreads
        By the digest of the experiment; others than those in the file are passed over.
    """
    # Where nothing is a card, that is an error before anything changes; what is none beside others stays as it is.
    left_out: list[str] = []
    if not any(str(card["digest"]) in spreads for card in read_cards(file, results=True, problems=left_out)):
        return left_out

    def put(card: Any) -> None:
        try:
            error = whole(card, str(file))["results"]["error"]
        except errors.DataError:
            return
        spread = spreads.get(card["digest"])
        if spread is None:
            return
        if within(spread, error):
            card["spread"] = dict(spread)
        else:
            left_out.append(
                f"{card['digest']} in {file}: its error, {error:.4f} %, lies outside the spread, "
                f"{spread['low']:.4f} to {spread['high']:.4f} %. {_WHERE}"
            )

    if file.suffix == ".zip":
        change_bundle(file, put)
        return left_out
    content = json.loads(file.read_text(encoding="utf-8"))
    for card in content if isinstance(content, list) else [content]:
        put(card)
    if isinstance(content, list):
        write_cards(file, content)
    else:
        write_json(file, content)
    return left_out


def add_spread(
    folder: Path,
    card: dict[str, Any],
    *,
    runs: int = 10,
    again: bool = False,
    data: Path | None = None,
    weights: Path | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """The card with a spread of at least so many runs, written to its folder."""
    if again or len(nudged(card)) < runs:
        card = {**card, "spread": measured(card, runs=runs, data=data, weights=weights, report=report)}
        write_json(folder / "card.json", card)
    return card
