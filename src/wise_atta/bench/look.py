"""How are finished runs looked at from a terminal? What labels buy, where two runs part, a report, a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from wise_atta.bench import runs

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Runs = Annotated[list[Path], typer.Argument(help="Folders of runs, cards, or bundles; folders are searched.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


@app.callback()
def _looking() -> None:
    """Look at finished runs."""


def _left_out(problems: Sequence[str]) -> None:
    """Say what could not be read, and leave with the exit code of broken data: the rest was shown all the same."""
    for problem in problems:
        Console(stderr=True).print(
            f"left out: {problem}", style="yellow", highlight=False, soft_wrap=True, markup=False
        )
    if problems:
        raise typer.Exit(3)


@app.command("bundle")
def bundle_command(
    paths: Runs,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("runs.zip"),
    queries: Annotated[bool, typer.Option(help="Keep every question; only reports show them.")] = True,
) -> None:
    """Put many finished runs into one small file, which value, compare and report read like the folders.

    Example: wise-atta bundle runs/cifar10 --out cifar10.zip
    """
    found = runs.bundle(paths, out, queries=queries)
    typer.echo(f"{out}: {len(found.runs)} runs, {out.stat().st_size / 2**20:.2f} MiB")
    _left_out(found.problems)
