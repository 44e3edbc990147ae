"""`wise-atta value | compare | report | bundle`: finished runs, looked at from a terminal."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wise_atta import errors
from wise_atta.bench import runs
from wise_atta.bench.compare import TOLERANCE, Comparison, compare
from wise_atta.bench.record import write_json, write_text
from wise_atta.bench.report import html
from wise_atta.bench.terminal import left_out
from wise_atta.bench.value import REPLICATES, value

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Runs = Annotated[list[Path], typer.Argument(help="Folders of runs, cards, or bundles; folders are searched.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


@app.callback()
def _looking() -> None:
    """Look at finished runs."""


@app.command("bundle")
def bundle_command(
    paths: Runs,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("runs.zip"),
    queries: Annotated[bool, typer.Option(help="Keep every question; only reports show them.")] = True,
) -> None:
    """Put many finished runs into one small file, which value, compare and report read like the folders.

    Example: wise-atta bundle runs/cifar10 --out cifar10.zip
    """
    bundled = runs.bundle(paths, out, queries=queries)
    typer.echo(f"{out}: {len(bundled.runs)} runs, {out.stat().st_size / 2**20:.2f} MiB")
    left_out(bundled.problems)


@app.command("value")
def value_command(
    paths: Runs,
    out: Annotated[
        Path | None, typer.Option(help="A folder for value.png, .svg and .html (the figure), table.md and value.json.")
    ] = None,
    replicates: Annotated[int, typer.Option(min=1, help="Of the bootstrap.")] = REPLICATES,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    as_json: Json = False,
) -> None:
    """Say what labels bought: error against labels spent, beside the best method that asks for none.

    Takes runs over one stream: methods with and without labels, best at several ratios and with several seeds.

    Example: wise-atta value runs/sweep --out value
    """
    read = runs.find(paths)
    try:
        labels_value = value(read.runs, seed=seed, replicates=replicates, left_out=read.problems)
    except errors.WiseAttaError as error:
        if not read.problems:
            raise
        # What is missing may be what could not be read.
        raise errors.DataError("; ".join([str(error), *read.problems])) from error
    if out is not None:
        labels_value.figure().write(out, "value")
        write_text(out / "table.md", labels_value.markdown())
        write_json(out / "value.json", labels_value.to_dict())
    if as_json:
        typer.echo(json.dumps(labels_value.to_dict(), indent=1))
    else:
        console = Console()
        console.print(labels_value.title(), style="bold", highlight=False, markup=False)
        for table in _tables(*labels_value.table(short=True)):
            console.print("", table)
        console.print("\n" + labels_value.note(), style="dim", highlight=False, markup=False)
        for text in labels_value.words():
            console.print(text, highlight=False, soft_wrap=True, markup=False)
        if out is not None:
            console.print(f"Figure, table and numbers: {out}", highlight=False, soft_wrap=True, markup=False)
    left_out(read.problems)


def _tables(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[Table]:
    """What labels bought, in tables that fit into 80 columns: against the best, and against the same without labels."""
    last = len(head) - 1
    for places in ([*range(7), last], [0, 1, *range(7, last)]):
        rows = [[line[place] for place in places] for line in lines if any(line[place] for place in places[2:])]
        if len(places) > 2:
            table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
            for place in places:
                table.add_column(head[place], justify="right" if place else "left", no_wrap=place in (1, 2, 3, last))
            for row in rows:
                table.add_row(*map(escape, row))
            yield table


@app.command("compare")
def compare_command(
    a: Annotated[Path, typer.Argument(help="A run's folder or card, or FILE#DIGEST of a bundle.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    tolerance: Annotated[float, typer.Option(help="By how much numbers may differ, relative if above 1.")] = TOLERANCE,
    as_json: Json = False,
) -> None:
    """Show where two runs part: settings, data, weights, versions, then the first batch, and what comes of it.

    Example: wise-atta compare runs/here runs/there
    """
    comparison = compare(runs.read(a), runs.read(b), tolerance=tolerance)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict(), indent=1))
        return
    _show(comparison, Console())


def _show(comparison: Comparison, console: Console) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    say(f"A  {comparison.a}\nB  {comparison.b}", "dim")
    titles = {"config": "settings", "data": "data", "weights": "weights", "place": "versions and device"}
    for name, title in titles.items():
        fields = getattr(comparison, name)
        say(f"{title}: {'differ' if fields else 'the same'}", "bold" if fields else "")
        for field in fields:
            say(f"  {field.name}: {_text(field.a)} | {_text(field.b)}")
    for note in comparison.notes:
        say(note, "yellow")
    if comparison.partings:
        say(f"batches: differ (tolerance {comparison.tolerance:g})", "bold")
        for parting in comparison.partings:
            trace = f"from batch {parting.trace} on" + (
                "" if parting.size is None else f", by {parting.size:.1g} there"
            )
            where = "never beyond the tolerance"
            if parting.batch is not None:
                values = f"{parting.column} {_text(parting.a)} | {_text(parting.b)}"
                where = f"batch {parting.batch} ({parting.domain}): {values}"
                trace = trace if parting.trace != parting.batch else ""
            say(f"  {parting.stage}: {where}{f'; {trace}' if trace else ''}")
    if comparison.results and comparison.stretches:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for place, name in enumerate(("domain", "batches", "A error %", "B error %", "mistakes A is ahead by")):
            table.add_column(name, justify="right" if place else "left")
        for one in comparison.stretches:
            span = f"{one.first}–{one.last}"
            table.add_row(escape(one.domain), span, f"{one.error_a:.2f}", f"{one.error_b:.2f}", f"{one.ahead:+d}")
        console.print(table)
        if comparison.only_a is not None:
            say(f"Wrong in A alone: {comparison.only_a} samples, in B alone: {comparison.only_b}")
    elif comparison.results and not comparison.partings:
        say("results: differ", "bold")
        for field in comparison.results:
            say(f"  {field.name}: {_text(field.a)} | {_text(field.b)}")
    say(comparison.verdict(), "bold")


def _text(value: object) -> str:
    """A value in a few letters."""
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@app.command("report")
def report_command(
    paths: Runs,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    replicates: Annotated[int, typer.Option(min=1, help="Of the bootstrap.")] = REPLICATES,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one HTML page about a set of runs: tables, lines over the stream, what labels bought, every card.

    Example: wise-atta report runs/sweep --out sweep.html --open
    """
    read = runs.find(paths)
    shown = runs.distinct(read.runs)
    write_text(out, html(shown, read.problems, replicates=replicates))
    typer.echo(f"{out}: {len(shown)} runs, {out.stat().st_size / 2**20:.1f} MiB")
    if open_it:
        webbrowser.open(out.resolve().as_uri())
    left_out(read.problems)
