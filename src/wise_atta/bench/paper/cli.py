"""`wise-atta paper`: list, run and show the paper's tables and figures."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from wise_atta import errors, typed
from wise_atta.bench import rivals
from wise_atta.bench.engines import Engine
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.paper import publish as publishing, tables
from wise_atta.bench.paper.define import ALGORITHM_1, ALIASES, experiments
from wise_atta.bench.paper.gather import Gathered, gather, read, settings_of
from wise_atta.bench.paper.items import ITEMS, item
from wise_atta.bench.sweep import Places, sweep
from wise_atta.bench.terminal import left_out, told, watched
from wise_atta.data import catalog, open_dataset

app = typer.Typer(
    help="Every table and figure of the paper: list them, run them, show them beside the paper's numbers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_HAND = ", ".join([*rivals.SETTINGS, *ALIASES])
Name = Annotated[str, typer.Argument(help="A table or figure; `wise-atta paper list` names them.")]
Runs = Annotated[list[Path] | None, typer.Argument(help="Folders of runs, bundles, or published cards.")]
On = Annotated[str | None, typer.Option(help=f"Data at hand instead of the paper's: {_HAND}.")]
Protocol = Annotated[str, typer.Option(help="ctta, ftta, or both with a comma; by default what the table has.")]
Tuned = Annotated[Path | None, typer.Option(help="Options by method, as `wise-atta rivals --rates` writes them.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
DEFAULT_RUNS = Path("runs/paper")


@app.command("list")
def list_command(as_json: Json = False) -> None:
    """Name every table and figure of the paper, and say how many runs each is."""
    rows: list[dict[str, Any]] = [
        {
            "name": one.name,
            "label": one.label,
            "parts": list(one.parts),
            "title": one.title,
            "runs": len(experiments(one.name)),
            "runs at hand": len(experiments(one.name, "digits")),
            "drawn": one.draw is not None,
        }
        for one in ITEMS.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        typer.echo(
            f"{row['name']:20} {row['label']:28} {row['runs']:4} runs, {row['runs at hand']:3} --on  {row['title']}"
        )
    typer.echo("Run one: wise-atta paper run NAME [--on digits]. Runs that several of them share are made once.")


@app.command("run")
def run_command(
    names: Annotated[list[str], typer.Argument(help="Tables and figures, or all.")],
    on: On = None,
    out: Annotated[
        Path, typer.Option(help="Where runs are written; finished runs there are not repeated.")
    ] = DEFAULT_RUNS,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0,41,58",
    protocol: Protocol = "",
    only: Annotated[list[str] | None, typer.Option(help="Rows by name, with * and ?; repeatable.")] = None,
    tuned: Tuned = None,
    limit: Annotated[int | None, typer.Option(help="At most so many pictures a domain, to shorten.")] = None,
    own_streams: Annotated[
        bool, typer.Option("--own-streams", help="Give each seed but 0 a stream of its own as well.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Runs at once.")] = 1,
    engine: Annotated[str | None, typer.Option(help="inline, process or ray; see `wise-atta sweep`.")] = None,
    address: Annotated[str | None, typer.Option(help="Of a running Ray cluster.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets (WISE_ATTA_DATA).")] = None,
    weights: Annotated[Path | None, typer.Option(help="Folder with weights files (WISE_ATTA_WEIGHTS).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads of a run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and make none.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Make the runs of a table or figure. What was interrupted goes on; what is finished is not repeated.

    Example: wise-atta paper run delay --on digits --limit 64 --seeds 0
    """
    chosen = list(ITEMS) if names == ["all"] else [item(name).name for name in names]
    runs: dict[str, Experiment] = {}
    for name, rows in _rows(chosen, only or []).items():
        for one in experiments(
            name,
            on,
            seeds=typed.listed("--seeds", seeds, int),
            device=device,
            tuned=None if tuned is None else rivals.load_tuned(tuned),
            protocols=_protocols(protocol),
            only=rows,
            limit=limit,
            own_streams=own_streams,
            threads=threads,
        ):
            runs.setdefault(one.digest, one)
    places = Places(out, data, weights)
    if dry_run:
        for one in runs.values():
            done = "done" if (places.of(one) / "card.json").exists() else "to do"
            typer.echo(f"{done}  {places.of(one).name}  {_said(one)}")
        typer.echo(f"{len(runs)} runs")
        return
    _check_here(runs.values(), data)
    with watched(quiet, len(runs), _said) as report:
        chosen_engine = cast(Engine | None, engine)
        sweep(list(runs.values()), places, jobs=jobs, engine=chosen_engine, address=address, report=report)
    for name in chosen:
        typer.echo(f"wise-atta paper show {name} {out}" + (f" --on {on}" if on else ""))


@app.command("show")
def show_command(
    name: Name,
    runs: Runs = None,
    on: On = None,
    protocol: Protocol = "",
    tuned: Tuned = None,
    domains: Annotated[bool, typer.Option("--domains", help="Every corruption of ImageNet-C's tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Draw the figure into this folder: PNG, SVG and HTML.")] = None,
    as_json: Json = False,
) -> None:
    """Print the paper's numbers, ours and the difference, mean ± deviation over seeds; draw the figure.

    Example: wise-atta paper show delay runs/paper --on digits --out figures
    """
    problems: list[str] = []
    shown = _gathered(name, runs, on, protocol, tuned, problems)
    if as_json:
        typer.echo(json.dumps([publishing.facts(gathered) for gathered in shown], indent=1))
    else:
        typer.echo("\n".join(tables.text(gathered, domains=domains, tuned=tuned) for gathered in shown).rstrip())
    for gathered in shown:
        for file in publishing.draw(gathered, out) if out is not None else []:
            Console(stderr=True).print(f"drew {file}", highlight=False, soft_wrap=True)
    left_out(problems)


@app.command("publish")
def publish_command(
    name: Name,
    runs: Runs = None,
    on: On = None,
    protocol: Protocol = "",
    tuned: Tuned = None,
    out: Annotated[Path, typer.Option(help="Below it, a folder a setting and table.")] = Path("docs/results/paper"),
) -> None:
    """Write table, cards, series and figures of a table or figure, so that it can be shown again without the runs.

    Example: wise-atta paper publish delay runs/paper --on cifar10
    """
    for gathered in _gathered(name, runs, on, protocol, tuned):
        for file in publishing.publish(gathered, out):
            typer.echo(str(file))


def _gathered(
    name: str,
    paths: Sequence[Path] | None,
    on: str | None,
    protocol: str,
    tuned: Path | None,
    problems: list[str] | None = None,
) -> list[Gathered]:
    """The runs laid out, for the setting asked for, or for all that there are runs of."""
    one = item(name)
    folders = paths or ([DEFAULT_RUNS] if DEFAULT_RUNS.exists() else [])
    runs = read(folders, problems)
    options = None if tuned is None else rivals.load_tuned(tuned)
    settings = [on] if on is not None else settings_of(runs)
    return [gather(one, runs, setting, protocols=_protocols(protocol), tuned=options) for setting in settings]


def _rows(names: Sequence[str], only: Sequence[str]) -> dict[str, list[str]]:
    """The patterns that each table has rows for; one without any is left out, a pattern without any is an error."""
    known = [row for name in names for row in ITEMS[name].rows]
    for pattern in only:
        if not fnmatch.filter(known, pattern):
            raise errors.unknown(f"row of {', '.join(names)}", pattern, known)
    patterns_of = {name: [pattern for pattern in only if fnmatch.filter(ITEMS[name].rows, pattern)] for name in names}
    return {name: patterns for name, patterns in patterns_of.items() if patterns or not only}


def _protocols(text: str) -> list[str] | None:
    known = ("ctta", "ftta")
    protocols = typed.listed("--protocol", text, str) if text else None
    for name in protocols or ():
        if name not in known:
            raise errors.unknown("protocol of the paper", name, known)
    return protocols


def _check_here(runs: Iterable[Experiment], root: Path | None) -> None:
    """Say that a data set or a network is missing, and how to get it, before the first run and not after each."""
    runs = list(runs)
    for name in dict.fromkeys(run.model for run in runs):
        file = Path(name.removeprefix("file:").partition("#")[0])
        if name.startswith("file:") and not file.exists():
            raise errors.DataError(
                f"{file} is not below {Path.cwd()}: go to the folder that holds it, or make it with `wise-atta train`, "
                "see the page on models"
            )
    for name in dict.fromkeys(run.data for run in runs):
        entry = catalog.ENTRIES.get(name.partition("+")[0])
        if entry is not None and entry.places and not catalog.find(entry, catalog.data_root(root)):
            open_dataset(name, root)


def _said(one: Experiment) -> str:
    # Not what every run of wise has in common.
    return told(one, lambda name, value: ALGORITHM_1.get(name) == value or name == "statistics")


if __name__ == "__main__":
    app()
