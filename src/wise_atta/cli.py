"""`wise-atta`, the command line: the demo, single runs, what is installed, and the commands of the other rooms."""

from __future__ import annotations

import importlib
import json
import sys
import time
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from wise_atta import __version__, errors, typed

# This file is loaded before anything is said, so all that is large is imported where it is used.
try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:
    print(
        f"wise-atta's commands need {(missing.name or '').partition('.')[0]}: pip install 'wise-atta[bench]'",
        file=sys.stderr,
    )
    raise SystemExit(4) from None

if TYPE_CHECKING:
    from rich.table import Table

    from wise_atta.bench.demo import Demo
    from wise_atta.bench.experiment import Experiment

app = typer.Typer(
    help="Budgeted active test-time adaptation: a classifier adapts while it predicts and asks for few labels.",
    epilog="Exit codes: 0 done, 1 unexpected, 2 bad usage or configuration, 3 data missing or broken, 4 extra missing.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with an exit code that says how it ended."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        app([argument for argument in words if argument != "--debug"])
    except errors.WiseAttaError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(exit_code(error)) from None
    except OSError as error:
        if debug or error.filename is None:
            raise
        # Such as a folder that may not be looked into, on the way to what was named.
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(3) from None
    except ModuleNotFoundError as error:
        if debug or error.name is None or error.name.startswith("wise_atta"):
            raise
        print(f"error: {error.name} is not installed: `wise-atta doctor` says which extra has it", file=sys.stderr)
        raise SystemExit(4) from None


def exit_code(error: errors.WiseAttaError) -> int:
    """What an error means to a script.

    >>> exit_code(errors.DataError("no such file")), exit_code(errors.BadConfig("ratio is 2"))
    (3, 2)
    """
    if isinstance(error, errors.MissingExtra):
        return 4
    if isinstance(error, errors.DataError | errors.StateMismatch):
        return 3
    if isinstance(error, errors.BadConfig | errors.BadInput | errors.HeadNotFound | errors.NothingToAdapt):
        return 2
    return 1


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"wise-atta {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from. May stand anywhere.")] = False,
) -> None:
    pass


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Turn a package that is not there into the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("wise_atta"):
            raise
        raise errors.MissingExtra(f"this needs {error.name}: pip install 'wise-atta[{name}]'") from error


# ---- demo ------------------------------------------------------------------------------------------------------------


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="How many seeds; each is a stream of its own.")] = 10,
    limit: Annotated[int, typer.Option(min=1, help="Pictures under each corruption.")] = 320,
    out: Annotated[Path, typer.Option(help="Where report, picture and runs go.")] = Path("demo"),
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in a browser.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes, of one thread each; one a core.")] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Instead, search the settings on seeds that are not scored.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Watch a classifier adapt to a corrupted stream and ask for few labels.

    Trains a small network on one half of scikit-learn's digits (once; it is kept in the user's cache folder), then
    adapts it on the other half under 15 corruptions. Prints a table and writes one HTML report.

    [bold]Examples[/bold]

    wise-atta demo

    wise-atta demo --seeds 3 --out /tmp/demo --open

    wise-atta demo --json > demo.json
    """
    with _extra("bench"):
        from wise_atta.bench import demo as demos, demo_report as report
        from wise_atta.bench.record import write_text
        from wise_atta.bench.source import digits_model

    console = Console(stderr=True, quiet=quiet or as_json)
    began = time.monotonic()
    with console.status("opening the network for digits") as status:
        digits_model(report=lambda step: status.update(f"training on clean digits, epoch {step.epoch}/{step.epochs}"))
    if tune:
        with _watching(console, sum(map(len, demos.GRID.values())) * len(demos.TUNING_SEEDS)) as watch:
            tuned = demos.tune(out, limit=limit, jobs=jobs, report=watch)
        typer.echo(json.dumps(tuned, indent=1) if as_json else _tuned(tuned))
        return
    chosen = tuple(range(seeds))
    with _watching(console, len(chosen) * len(demos.ROWS)) as watch:
        result = demos.run(out, chosen, limit=limit, jobs=jobs, report=watch)
    with console.status("writing the report"):
        pages = {"report.html": report.html(result), "demo.svg": report.picture(result)}
    for name, text in pages.items():
        write_text(out / name, text)
    page = out / "report.html"
    seconds = time.monotonic() - began
    if as_json:
        typer.echo(json.dumps({**result.to_dict(), "report": str(page), "seconds": round(seconds, 1)}, indent=1))
    else:
        _show_demo(result, page, seconds)
    if open_it:
        webbrowser.open(page.resolve().as_uri())


@contextmanager
def _watching(console: Console, runs: int) -> Iterator[Any]:
    """A live view of many runs: how far they are, and the mean error of each row so far."""
    import numpy as np
    from rich.console import Group
    from rich.live import Live
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table

    bar = Progress(TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    task = bar.add_task("", total=runs)
    results_of: dict[str, list[dict[str, Any]]] = {}

    def view() -> Group:
        table = Table("method", "runs", "error % so far", "labels", box=None, header_style="dim")
        for name, results in results_of.items():
            error, labels = (np.mean([result[key] for result in results]) for key in ("error", "labels_spent"))
            table.add_row(name, str(len(results)), f"{error:.1f}", f"{labels:g}")
        return Group(table, bar) if results_of else Group("starting the workers", bar)

    with Live(view(), console=console, refresh_per_second=4, transient=True) as live:

        def report(experiment: Experiment, result: dict[str, Any] | errors.WiseAttaError) -> None:
            if isinstance(result, dict):
                results_of.setdefault(experiment.tag, []).append(result["results"])
            bar.advance(task)
            live.update(view())
            if not console.is_terminal and isinstance(result, dict):
                console.print(f"{experiment.tag}, seed {experiment.seed}: error {result['results']['error']:.1f} %")

        yield report


def _show_demo(result: Demo, page: Path, seconds: float) -> None:
    from rich.table import Table

    from wise_atta.bench import demo_report as report
    from wise_atta.bench.demo import BASELINE

    facts = result.to_dict()
    stream = f"{facts['batches']} batches of {facts['stream']['batch']} digits under 15 corruptions"
    table = Table(
        title=f"{stream}, {len(result.seeds)} seeds",
        caption="error: mean ± deviation over seeds\ndifference: paired by seed, 95 % interval by Student's t",
    )
    table.add_column("method")
    for head in ("error %", "labels spent", f"difference to {BASELINE}"):
        table.add_column(head, justify="right")
    for line in result.lines:
        table.add_row(
            line.name, report.error_text(line), report.labels_text(line), report.difference_text(line.difference)
        )
    console = Console()
    console.print(table)
    for text in (text for line in result.lines if line.allowed is not None for text in line.verdicts()):
        console.print(text, highlight=False, soft_wrap=True)
    if facts["provenance"]["frost"] != "procedural":
        console.print("Frost is photographed here, not drawn: numbers differ from the documented ones.")
    console.print(f"{seconds:.0f} s. Report: {page}", highlight=False, soft_wrap=True)


def _tuned(tuned: dict[str, Any]) -> str:
    lines = [f"mean error % over seeds {', '.join(map(str, tuned['seeds']))}, which the demo does not score"]
    for row, trials in tuned["tried"].items():
        lines += [
            f"{trial['error']:6.2f}  {row}  {trial['options']}" for trial in sorted(trials, key=lambda t: t["error"])
        ]
    return "\n".join([*lines, *(f"best for {row}: {best['options']}" for row, best in tuned["best"].items())])


# ---- run -------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    file: Annotated[
        Path | None, typer.Argument(help="An experiment as YAML, TOML or JSON, a run card, or a run's folder.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="A data set by name, such as digits+c or cifar10+c.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A model by name, such as digits or file:model.safetensors.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="A method by name; `wise-atta methods` lists them.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="An option of the method, such as lr=0.01; repeatable.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="When to ask: paced, uniform, random, always, never.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Labels a batch, at most.")] = None,
    utility: Annotated[str | None, typer.Option(help="The score that paced decides on, and others write down.")] = None,
    selector: Annotated[str | None, typer.Option(help="What to ask: drift, max-entropy, margin, random …")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a batch.")] = None,
    severity: Annotated[int | None, typer.Option(help="Of corruptions, 1 to 5.")] = None,
    protocol: Annotated[str | None, typer.Option(help="ctta, ftta, mixed, gradual, correlated, recurring.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many samples of a domain.")] = None,
    domains: Annotated[str | None, typer.Option(help="Which domains, with commas between them.")] = None,
    delay: Annotated[int | None, typer.Option(help="Answers come so many batches late.")] = None,
    noise: Annotated[float | None, typer.Option(help="Share of wrong answers.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the method's draws.")] = None,
    stream_seed: Annotated[int | None, typer.Option(help="Of the stream's order and noise.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    other: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another field, exhaust=true, or one inside, stream.order=sequential; repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default one below runs/.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets (WISE_ATTA_DATA).")] = None,
    weights: Annotated[Path | None, typer.Option(help="Folder with weights files (WISE_ATTA_WEIGHTS).")] = None,
    again: Annotated[bool, typer.Option("--again", help="Run it once more, over whatever is in the folder.")] = False,
    spread: Annotated[
        int, typer.Option(min=0, help="Then measure how far apart so many runs come whose weights differ by 1e-7.")
    ] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run one experiment and write its card.

    It is described by a file, by flags, or by both, in which case flags win. A run that was interrupted goes on from
    its last checkpoint when the same command is given again; a finished one is not repeated.

    [bold]Examples[/bold]

    wise-atta run --method tent --batch 16 --limit 320 -o lr=0.1

    wise-atta run --dataset cifar10+c --model file:models/cifar10-resnet18.safetensors --method tent --seed 41

    wise-atta run runs/tent-s0-1a2b3c4d5e6f/card.json --method roid --out runs/roid

    wise-atta run experiment.yaml --device cuda --json > card.json

    wise-atta run cards.json#1a2b3c4d5e6f --spread 10
    """
    with _extra("bench"):
        from wise_atta.bench.experiment import Experiment, nested, read_mapping
        from wise_atta.bench.run import finished, run as run_experiment
        from wise_atta.bench.spread import add_spread, which_run
        from wise_atta.bench.sweep import Places

    # Nested before flags come, so that a field of the file inside another does not win over a flag for the whole.
    content = {} if file is None else nested(read_mapping(file))
    flags: dict[str, Any] = {
        **{"data": dataset, "model": model, "method": method, "policy": policy, "ratio": ratio, "utility": utility},
        **{"selector": selector, "batch": batch, "severity": severity, "protocol": protocol, "delay": delay},
        **{"noise": noise, "seed": seed, "device": device, "threads": threads},
    }
    listed = None if domains is None else typed.listed("--domains", domains, str)
    flags |= {"stream.limit": limit, "stream.domains": listed, "stream.seed": stream_seed}
    options: dict[str, Any] = typed.pairs("--option", option or [])
    content |= {name: value for name, value in flags.items() if value is not None}
    content |= {f"options.{name}": value for name, value in options.items()} | typed.pairs("--set", other or [])
    experiment = Experiment.parse(content)
    folder = Places(Path("runs")).of(experiment) if out is None else out
    console = Console(stderr=True, quiet=quiet or as_json)
    if finished(folder, experiment, again) is not None:
        console.print("already done; --again repeats it")
    with _batches(console) as progress:
        card = run_experiment(experiment, folder, data=data, weights=weights, progress=progress, again=again)
    if spread:

        def report(_: str, number: int | None, error: float) -> None:
            console.print(f"{which_run(number, spread)}: error {error:.2f} %", highlight=False)

        card = add_spread(folder, card, runs=spread, again=again, data=data, weights=weights, report=report)
    if as_json:
        typer.echo(json.dumps(card, indent=1))
    else:
        _show_card(card, folder, short=quiet)


@contextmanager
def _batches(console: Console) -> Iterator[Any]:
    """A bar over the batches of one run."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("opening", total=None)
        first: list[int] = []

        def progress(number: int, length: int | None, error: float, spent: int) -> None:
            if not first and number > 1:
                console.print(f"goes on from its checkpoint, after batch {number - 1}", highlight=False)
            first[:] = [number]
            status = f"error {100 * error:.1f} %, {spent} labels"
            bar.update(task, completed=number, total=length, description=status)
            if not console.is_terminal and number % max(1, (length or 1000) // 10) == 0:
                console.print(f"batch {number}{f' of {length}' if length else ''}: {status}", highlight=False)

        yield progress


def _show_card(card: dict[str, Any], folder: Path, short: bool) -> None:
    from rich.markup import escape

    results, console = card["results"], Console()
    line = f"{card['experiment']['method']}: error {results['error']:.2f} %"
    if results["labels_allowed"] != 0:
        allowed = "" if results["labels_allowed"] is None else f" of {results['labels_allowed']}"
        line += f", labels {results['labels_spent']}{allowed}"
    if not short:
        console.print(_rows(("domain", "error %"), [(escape(d), f"{e:.1f}") for d, e in results["by_domain"].items()]))
        line += f", {results['batches']} batches, {results['samples']:,} samples, {results['seconds']:.0f} s"
        if "spread" in card:
            line += f", {card['spread']['low']:.2f} to {card['spread']['high']:.2f} % by chance alone"
        line += f". Card: {folder / 'card.json'}"
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(*heads, box=None, header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table


# ---- doctor and methods ----------------------------------------------------------------------------------------------


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which device is used, where data is, and what is missing for which feature."""
    with _extra("bench"):
        from wise_atta.bench.doctor import examine, missing

    examined = examine()
    if as_json:
        typer.echo(json.dumps({**examined, "missing": missing(examined)}, indent=1))
        return
    console, lacks = Console(), missing(examined)
    device, data, cache = examined["device"], examined["data"], examined["cache"]
    core = ", ".join(f"{name} {version or 'missing'}" for name, version in examined["core"].items())
    gpus = ", ".join(device["gpus"]) or "no GPU"
    facts = [
        ("wise-atta", f"{examined['wise-atta']}, Python {examined['python']} on {examined['system']}"),
        ("core", core),
        ("device", f"{device['auto']} ({gpus}, {device['threads']} threads)"),
        ("data folder", data["folder"] or f"none: {data['problem']}"),
        ("data here", ", ".join(data["here"]) or "nothing that is known by name"),
        ("cache", f"{cache['folder']}, digits network {'kept' if cache['digits network'] else 'not trained yet'}"),
    ]
    console.print(_rows(("", ""), facts))
    extras = [
        (extra, "[green]ready[/green]" if extra not in lacks else f"lacks {', '.join(lacks[extra])}", about["for"])
        for extra, about in examined["extras"].items()
    ]
    console.print(_rows(("extra", "", "for"), extras))
    for extra in lacks:
        console.print(f"For {extra}: pip install 'wise-atta[{extra}]'", highlight=False, markup=False)


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods: labels a batch, adapted tensors, memory, where each was published, and its options."""
    from wise_atta import methods as known

    rows = known.list()
    if as_json:
        typer.echo(json.dumps([{**asdict(row), "options": known.options(row.name)} for row in rows], indent=1))
        return
    heads = ("method", "labels a batch", "adapts", "remembers", "published")
    Console().print(_rows(heads, [(r.name, r.labels, r.adapts, r.memory, r.reference) for r in rows]))
    typer.echo("Options of one: wise-atta methods --json")


# ---- commands of other rooms, loaded when they are called ------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """Where a command is written: a function, or a typer app that is the command or (`inside`) holds it."""

    place: str
    extra: str
    help: str
    inside: bool = False

    def __call__(self, name: str, arguments: list[str]) -> None:
        module, _, attribute = self.place.partition(":")
        with _extra(self.extra):
            command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, typer.Typer):
            room = typer.Typer(pretty_exceptions_enable=False)
            room.command(name)(command)
            command = room
        inside = [name] if self.inside else []
        command([*inside, *arguments], prog_name="wise-atta" if inside else f"wise-atta {name}")


_DATA, _MODELS, _STUDIES = "wise_atta.data.cli:app", "wise_atta.data.train_cli:app", "wise_atta.bench.studies:app"
_REPORTS = "wise_atta.bench.report_cli:app"
ROOMS = {
    "data": Room(_DATA, "bench", "Data sets: list them, check them, fetch them, make corrupted ones."),
    "train": Room(_MODELS, "bench", "Train a source model: cifar10, pacs, digits, or a folder by class.", inside=True),
    "evaluate": Room(_MODELS, "bench", "Measure a model's error on a data set, without adaptation.", inside=True),
    "rivals": Room(_STUDIES, "bench", "Run methods side by side on one stream.", inside=True),
    "tune": Room(_STUDIES, "bench", "Choose a method's learning rate on a stream that is not scored.", inside=True),
    "sweep": Room(_STUDIES, "bench", "Run every combination of the fields that are lists.", inside=True),
    "spread": Room(_STUDIES, "bench", "Measure how far cards' runs come apart by chance, and keep it.", inside=True),
    "verify": Room(_STUDIES, "bench", "Run cards again and say whether what they promise holds here.", inside=True),
    "no-harm": Room(_STUDIES, "bench", "Measure where adaptation is worse than none.", inside=True),
    "ablation": Room(_STUDIES, "bench", "Measure what the labels themselves are worth.", inside=True),
    "delay": Room(_STUDIES, "bench", "Measure what labels are worth that come late.", inside=True),
    "value": Room(_REPORTS, "bench", "Say what labels bought, beside the best method without labels.", inside=True),
    "report": Room(_REPORTS, "bench", "Write one HTML page about a set of runs.", inside=True),
    "compare": Room(_REPORTS, "bench", "Show where two runs part.", inside=True),
    "bundle": Room(_REPORTS, "bench", "Put many finished runs into one small file.", inside=True),
    "paper": Room("wise_atta.bench.paper.cli:app", "bench", "Every table and figure of the paper: list, run, show."),
    "serve": Room("wise_atta.serve.cli:serve", "serve", "Put a model behind HTTP: it predicts, learns and asks."),
    "ledger": Room("wise_atta.serve.cli:app", "serve", "The ledger of a service: tokens, export, retention."),
}


def _mount(name: str, room: Room) -> None:
    # Help is the room's own as well, so every argument is passed on as it is.
    passed = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=room.help, context_settings=passed)
    def forward(context: typer.Context) -> None:
        room(name, context.args)


for _name, _room in ROOMS.items():
    _mount(_name, _room)

if __name__ == "__main__":
    main()
