"""Messages about many runs for a terminal: progress, outcomes, and what could not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from wise_atta import errors
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.sweep import Report


def told(one: Experiment, hide: Callable[[str, Any], bool] = lambda name, value: False) -> str:
    """What is run, beside its name: data, protocol, batch size, delay, and the options that are not hidden."""
    options = "".join(f", {name} {value}" for name, value in one.options.items() if not hide(name, value))
    late = f", delay {one.delay}" if one.delay else ""
    return f"{one.data} {one.protocol}, batch {one.batch}{late}{options}{f', {one.tag}' if one.tag else ''}"


@contextmanager
def watched(quiet: bool, total: int | None = None, say: Callable[[Experiment], str] = told) -> Iterator[Report]:
    """A line for every run that is over, and where someone looks on a bar as well.

    Parameters
    ----------
    quiet
        Whether it tells no progress. What went wrong is told all the same.
    total
        How many runs, where that is known beforehand.
    say
        What is run, beside its name.
    """
    console = Console(stderr=True, quiet=quiet)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    shown = columns if total is not None else (TimeElapsedColumn(),)
    with Progress(
        TextColumn("runs"), *shown, console=console, transient=True, disable=not console.is_terminal or quiet
    ) as bar:
        task = bar.add_task("", total=total)

        def report(experiment: Experiment, result: dict[str, Any] | errors.WiseAttaError) -> None:
            bar.advance(task)
            wrong = isinstance(result, errors.WiseAttaError)
            text = str(result)
            if isinstance(result, dict):
                results = result["results"]
                text = f"{results['error']:.2f} % error, {results['labels_spent']} labels, {results['seconds']:.0f} s"
            line = f"{experiment.name} on {say(experiment)}: {text}"
            (Console(stderr=True) if wrong and quiet else console).print(
                line, style="red" if wrong else "", highlight=False, markup=False, soft_wrap=True
            )

        yield report


def left_out(problems: Sequence[str]) -> None:
    """Say what could not be read, and leave with the exit code of broken data: the rest was shown all the same."""
    for problem in problems:
        Console(stderr=True).print(
            f"left out: {problem}", style="yellow", highlight=False, soft_wrap=True, markup=False
        )
    if problems:
        raise typer.Exit(3)
