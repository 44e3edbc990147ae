"""`wise-atta data list | check | fetch | make`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from wise_atta.data import catalog
from wise_atta.data.check import check as check_data
from wise_atta.data.fetch import fetch as fetch_data
from wise_atta.data.make import make as make_data

app = typer.Typer(help="Data sets: what is here, whether it is whole, where it comes from.", no_args_is_help=True)

Data = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets (WISE_ATTA_DATA).")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


@app.command("list")
def list_data(data: Data = None, as_json: Json = False) -> None:
    """Show every data set that is known by name, and which of them are here."""
    root = None if catalog.named_root(data) is None else catalog.data_root(data)
    rows = []
    for entry in catalog.ENTRIES.values():
        counts = entry.counts() or {}
        rows.append(
            {
                "name": entry.name,
                "title": entry.title,
                "here": entry.layout == "digits" or (root is not None and bool(catalog.find(entry, root))),
                "domains": len(counts),
                "pictures": sum(counts.values()),
                "classes": entry.classes,
                "cut": {"resize": entry.resize, "crop": entry.crop, "views": entry.views},
                "download_bytes": sum(item.size or 0 for item in entry.downloads) or None,
                "licence": entry.licence,
                "home": entry.home,
            }
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("name", "here", "pictures", "download", "what it is")
    for row in rows:
        size = row["download_bytes"]
        table.add_row(
            str(row["name"]),
            "yes" if row["here"] else "",
            f"{row['pictures']:,}",
            f"{size / 1e9:.1f} GB" if isinstance(size, int) else "",
            str(row["title"]),
        )
    Console().print(table)
    typer.echo("Also tree:PATH, grid:PATH, npy:PATH and hf:NAME; NAME+c puts corruptions on a clean one.")
    if root is None:
        typer.echo("No data folder was given: use --data or set WISE_ATTA_DATA.")


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="A data set, such as imagenet-r or tree:my/folder.")],
    data: Data = None,
    decode: Annotated[bool, typer.Option(help="Decode every picture, not only hash it.")] = True,
    manifest: Annotated[
        Path | None, typer.Option(help="Compare with this list of hashes; write it if it does not exist.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Count, hash and decode a data set, and name each missing or broken file. Ends with 1 if there is any."""
    with _progress(quiet or as_json) as report:
        findings = check_data(name, data, decode=decode, manifest=manifest, progress=partial(report, name))
    if as_json:
        typer.echo(json.dumps(findings.to_dict(), indent=2))
    else:
        for domain, count in findings.domains.items():
            typer.echo(f"{domain}: {count:,} pictures")
        typer.echo(f"{findings.pictures:,} pictures in {findings.classes} classes, sha256 {findings.sha256}")
        if findings.ignored:
            typer.echo(f"{len(findings.ignored)} other files, such as {findings.ignored[0]}")
        for problem in findings.problems:
            typer.echo(f"PROBLEM {problem}")
        typer.echo(f"{len(findings.problems)} problems" if findings.problems else "whole")
    if findings.problems:
        raise typer.Exit(1)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A data set with an official download, see `list`.")],
    data: Data = None,
    quiet: Quiet = False,
) -> None:
    """Download the official archives, going on where an earlier try stopped; check those that are here."""
    entry = catalog.lookup(name)
    typer.echo(f"{entry.title}\nlicence: {entry.licence}\nhome: {entry.home}", err=True)
    with _progress(quiet, DownloadColumn()) as report:
        paths = fetch_data(name, data, progress=report)
    for path in paths:
        typer.echo(path)


@app.command()
def make(
    name: Annotated[str, typer.Argument(help="A clean data set, such as cifar10 or tree:my/folder.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    data: Data = None,
    corruption: Annotated[list[str] | None, typer.Option(help="Repeatable; by default the fifteen.")] = None,
    severity: Annotated[list[int] | None, typer.Option(help="Repeatable; by default 1 to 5.")] = None,
    form: Annotated[str, typer.Option("--format", help="npy (as CIFAR-10-C), png or jpeg (as ImageNet-C).")] = "npy",
    limit: Annotated[int | None, typer.Option(help="At most so many pictures.")] = None,
    seed: Annotated[int, typer.Option(help="Of the corruptions.")] = 0,
    device: Annotated[str, typer.Option(help="Where the corruptions are computed.")] = "cpu",
    workers: Annotated[int | None, typer.Option(help="Processes that decode.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a corrupted data set to disk."""
    with _progress(quiet) as report:
        card = make_data(
            name,
            out,
            data,
            corruptions=corruption or (),
            severities=severity or (1, 2, 3, 4, 5),
            form=form,
            limit=limit,
            seed=seed,
            device=device,
            workers=workers,
            progress=partial(report, name),
        )
    typer.echo(f"{card['pictures']:,} pictures in {out}; their layout is {'npy' if form == 'npy' else 'grid'}:PATH")


@contextmanager
def _progress(quiet: bool, count: ProgressColumn | None = None) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each thing that is reported on, by name."""
    columns = (TextColumn("{task.description}"), BarColumn(), count or MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, quiet=quiet)) as bar:
        tasks: dict[str, TaskID] = {}

        def report(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield report
