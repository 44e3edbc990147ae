"""How far apart do runs of one experiment come by chance? Their weights differ by 1e-7, in the last bits.

A card's `spread` is what ten such runs gave. It is measured where the card was made: the card's own run is made again
first, and must come out as it did.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from wise_atta import errors
from wise_atta.bench import engines
from wise_atta.bench.chance import family, nudged, summarise
from wise_atta.bench.experiment import Experiment, read_cards
from wise_atta.bench.hold import Shelf
from wise_atta.bench.record import read_json, write_cards, write_json
from wise_atta.bench.run import NUDGE
from wise_atta.bench.runs import change_bundle
from wise_atta.bench.verify import differences, once, other_inputs, within

# Told after every run: the card's digest, the number of the nudged run (None: the card's own), and its error.
Report: TypeAlias = Callable[[str, int | None, float], None]
# Error and, of a card's own run, provenance; or why there is none.
Outcome: TypeAlias = dict[str, Any] | errors.DataError


@dataclass(frozen=True)
class _Task:
    """One run of a card's experiment: its own, or a nudged one."""

    digest: str
    number: int | None
    experiment: Experiment
    data: Path | None
    weights: Path | None
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def name(self) -> str:
        """What its outcome is kept under."""
        fast = json.dumps(self.experiment.fast, sort_keys=True)
        return f"{self.digest} {'own' if self.number is None else self.number} {fast}"

    def run(self, shelf: Shelf) -> Outcome:
        try:
            card = once(self.experiment, data=self.data, weights=self.weights, shelf=shelf, nudge=self.number)
        except errors.DataError as error:
            return error
        outcome = {"error": card["results"]["error"]}
        return outcome if self.number is not None else {**outcome, "provenance": card["provenance"]}


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
) -> Iterator[tuple[str, dict[str, Any] | errors.DataError]]:
    """Spreads by digest, each as soon as it is known; `DataError` for a card that does not come out as it did.

    `low` and `high` are three deviations to either side of the mean, or the extremes where those lie further out. A
    card's own run is one more draw of the same lottery, so the spread reaches to it. With other threads, torch or
    device it may come out otherwise, and `put_spreads` leaves out a spread that does not hold the card's error.

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
        A file that takes every run when it is over. Those that it holds are not made again.
    report
        Called after every run that was made.
    """
    if runs < 2:
        raise errors.BadConfig(f"a spread needs two runs at least, not {runs}")
    open_cards, tasks = {str(card["digest"]): card for card in cards}, list[_Task]()
    for digest, card in open_cards.items():
        experiment = Experiment.parse(card["experiment"])
        moved = Experiment.parse({**experiment.model_dump(mode="json"), "fast": {**(fast or {}), **experiment.fast}})
        tasks.append(_Task(digest, None, experiment, data, weights))
        tasks += [_Task(digest, number, moved, data, weights) for number in range(1, runs + 1)]
    own: dict[str, float] = {}
    found: dict[str, dict[int, float]] = {digest: {} for digest in open_cards}
    for task, outcome in _outcomes(tasks, lambda task: task.digest in open_cards, jobs, kept, report):
        digest = task.digest
        if digest not in open_cards:
            continue
        card = open_cards[digest]
        if task.number is None:
            outcome = _as_promised(card, outcome)
        if isinstance(outcome, errors.DataError):
            del open_cards[digest]
            yield digest, outcome
            continue
        if task.number is None:
            own[digest] = outcome["error"]
        else:
            found[digest][task.number] = outcome["error"]
        if digest in own and len(found[digest]) == runs:
            error = card["results"]["error"]
            spread = summarise([found[digest][number] for number in range(1, runs + 1)])
            if own[digest] == error:
                spread |= {"low": min(spread["low"], error), "high": max(spread["high"], error)}
            yield digest, spread | ({"fast": dict(fast)} if fast else {})


def _as_promised(card: Mapping[str, Any], outcome: Outcome) -> Outcome:
    """What a card's own run gave, or in what it differs from the card, though it should not."""
    if isinstance(outcome, errors.DataError):
        return outcome
    promised, here, error = card["provenance"], outcome["provenance"], card["results"]["error"]
    problems = other_inputs(promised, here)
    if not problems and outcome["error"] != error and not differences(promised, here):
        problems = [f"it comes out at {outcome['error']:.4f} % here, not at {error:.4f} %"]
    if problems:
        return errors.DataError(f"{card['digest']}: {'; '.join(problems)}. Measure it where the card was made")
    return outcome


def _outcomes(
    tasks: Sequence[_Task], needed: Callable[[_Task], bool], jobs: int, kept: Path | None, report: Report | None
) -> Iterator[tuple[_Task, Outcome]]:
    """What runs gave: those that are kept, then the others, as long as they are needed when their turn comes."""
    known = _read(kept) if kept is not None and kept.exists() else {}
    missing = [task for task in tasks if task.name not in known]
    yield from ((task, known[task.name]) for task in tasks if task.name in known)
    waiting = filter(needed, missing)
    shelf = Shelf(2)
    made = ((task, task.run(shelf)) for task in waiting) if jobs == 1 else _in_processes(waiting, jobs)
    for task, outcome in made:
        if not isinstance(outcome, errors.DataError):
            known[task.name] = outcome
            if kept is not None:
                write_json(kept, known)
            if report is not None:
                report(task.digest, task.number, outcome["error"])
        yield task, outcome


def _read(kept: Path) -> dict[str, Any]:
    known = read_json(kept)
    if not all(isinstance(outcome, dict) and "error" in outcome for outcome in known.values()):
        raise errors.DataError(f"{kept} holds no runs of `wise-atta spread`: name another file to keep them in")
    return known


def _in_processes(tasks: Iterator[_Task], jobs: int) -> Iterator[tuple[_Task, Outcome]]:
    """As many at once, none of which waits for the slowest run of a card."""
    running: dict[Future[Outcome], _Task] = {}
    with engines.pool(jobs) as pool:
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


_shelf = Shelf(2)


def _there(task: _Task) -> Outcome:
    """A run in another process, which keeps its streams and has as many threads."""
    torch.set_num_threads(task.threads)
    return task.run(_shelf)


def measured(card: Mapping[str, Any], **how: Any) -> dict[str, Any]:
    """The spread of one card, see `measure`."""
    ((_, found),) = measure([card], **how)
    if isinstance(found, errors.DataError):
        raise found
    return found


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
    found = {}
    for card in cards:
        if not nudged(card) and (near := sisters.get(family(card))):
            (width, digest), error = max(near), card["results"]["error"]
            found[str(card["digest"])] = {"nudge": NUDGE, "of": digest, "low": error - width, "high": error + width}
    return found


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
    read_cards(file, results=True)  # what is no card is an error before anything changes
    left_out = []

    def put(card: dict[str, Any]) -> None:
        found, error = spreads.get(str(card["digest"])), card["results"]["error"]
        if found is None:
            return
        if within(found, error):
            card["spread"] = dict(found)
        else:
            left_out.append(
                f"{card['digest']} in {file}: its error, {error:.4f} %, lies outside the spread, {found['low']:.4f} to "
                f"{found['high']:.4f} %. Measure it where the card was made"
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
