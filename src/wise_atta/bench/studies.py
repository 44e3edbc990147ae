"""`wise-atta rivals | tune | sweep | spread | verify | no-harm | ablation | delay`: studies run from a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from wise_atta import errors, methods, typed
from wise_atta.bench import ablation, delay, no_harm, nudges, rivals
from wise_atta.bench.engines import Engine
from wise_atta.bench.experiment import Experiment, card_files, read_cards, read_mapping
from wise_atta.bench.record import read_json
from wise_atta.bench.run import pick_device
from wise_atta.bench.spread import borrowed, measure, put_spreads, which_run
from wise_atta.bench.stream_cache import StreamCache
from wise_atta.bench.sweep import Places, expand, sweep, table
from wise_atta.bench.terminal import left_out, watched
from wise_atta.bench.tune import LEARNING_RATES, lay_out, tune
from wise_atta.bench.verify import Verdict, verify

app = typer.Typer(help="Studies over many runs.", no_args_is_help=True, pretty_exceptions_enable=False)

Out = Annotated[Path, typer.Option(help="Where runs and tables are written; finished runs there are not repeated.")]
Data = Annotated[Path | None, typer.Option(help="Folder of the data sets (WISE_ATTA_DATA).")]
Weights = Annotated[Path | None, typer.Option(help="Folder with weights files (WISE_ATTA_WEIGHTS).")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Threads = Annotated[int | None, typer.Option(help="Threads of a run.")]
Seeds = Annotated[str, typer.Option(help="Seeds, with commas.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


@app.command("rivals")
def rivals_command(
    on: Annotated[str, typer.Argument(help=f"One of {', '.join(rivals.SETTINGS)}.")] = "digits",
    out: Out = Path("runs/rivals"),
    method: Annotated[str, typer.Option(help="Methods, with commas; all by default.")] = "",
    protocol: Annotated[str, typer.Option(help="ctta, ftta, or both with a comma.")] = "ctta",
    seeds: Seeds = "0",
    ratio: Annotated[float, typer.Option(help="Labels a batch of eatta and wise.")] = 0.5,
    limit: Annotated[int | None, typer.Option(help="At most so many pictures a domain.")] = None,
    tuned: Annotated[Path | None, typer.Option(help="Take learning rates from this file instead of tuning.")] = None,
    rates: Annotated[str, typer.Option(help="The grid of learning rates; empty: the methods' own rate.")] = "",
    tune_limit: Annotated[int | None, typer.Option(help="Pictures a domain of the tuning stream.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; seconds a batch are then those of a shared machine.")] = 1,
    data: Data = None,
    weights: Weights = None,
    device: Device = "auto",
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Run methods side by side on one stream: error, labels, forwards, backwards, memory and time, all measured.

    Example: wise-atta rivals digits --limit 64
    """
    setting = rivals.setting(on, ratio)
    names = typed.listed("--method", method, str) if method else list(methods.METHODS)
    places = Places(out / "runs", data, weights)
    stream: dict[str, Any] = {} if limit is None else {"limit": limit}
    shared: dict[str, Any] = {"device": device, "threads": threads}
    with watched(quiet) as report:
        best: dict[str, dict[str, Any]] = {}
        if tuned is not None:
            best = rivals.load_tuned(tuned)
        elif rates:
            short = {} if tune_limit is None else dict.fromkeys(names, tune_limit)
            grid = typed.listed("--rates", rates, float)
            tuned_methods = rivals.tune_all(
                setting,
                names,
                Places(out / "tuning", data, weights),
                rates=grid,
                limits=short,
                jobs=jobs,
                report=report,
                **shared,
            )
            rivals.save_tuned(out / "tuned.json", tuned_methods)
            best = {name: dict(tried.best.options) for name, tried in tuned_methods.items()}
            labels = sum(tried.labels for tried in tuned_methods.values())
            typer.echo(f"Tuned on {setting.tune_on}; the trials asked for {labels} labels there.")
        cards = rivals.compare(
            setting,
            names,
            places,
            tuned=best,
            protocols=typed.listed("--protocol", protocol, str),
            seeds=typed.listed("--seeds", seeds, int),
            jobs=jobs,
            report=report,
            fresh=pick_device(device).type == "cpu",
            stream=stream,
            **shared,
        )
    sections = [setting.note, rivals.cost_table(cards), rivals.error_table(cards), rivals.domain_table(cards)]
    text = "\n\n".join(section for section in sections if section) + "\n"
    rivals.write_report(out, cards, text)
    typer.echo(text)


def _values(text: str) -> list[Any]:
    return typed.listed("--grid", text, typed.value)


@app.command("tune")
def tune_command(
    file: Annotated[Path, typer.Argument(help="The experiment that will be scored: YAML, TOML, JSON or a card.")],
    on: Annotated[str | None, typer.Option(help="Data to tune on; for X+c it is X+extra.")] = None,
    grid: Annotated[list[str] | None, typer.Option(help="An option and its values, lr=1e-4,1e-3; repeatable.")] = None,
    out: Out = Path("runs/tune"),
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    data: Data = None,
    weights: Weights = None,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Choose options of a method on a stream that is not the scored one.

    Examples: wise-atta tune experiment.yaml, wise-atta tune experiment.yaml --grid lr=1e-3,1e-2 --grid momentum=0,0.9
    """
    points = {"lr": list(LEARNING_RATES)} if not grid else typed.pairs("--grid", grid, _values)
    with watched(quiet or as_json) as report:
        places = Places(out, data, weights)
        tuned = tune([lay_out(Experiment.read(file), on=on, grid=points)], places, jobs=jobs, report=report)[0]
    if as_json:
        typer.echo(json.dumps(tuned.to_dict()))
        return
    for trial in tuned.trials:
        mark = "  <- best" if trial is tuned.best else ""
        outcome = f"{trial.error:.2f} % error" if math.isfinite(trial.error) else "diverged"
        typer.echo(f"{trial.options}: {outcome}, {trial.labels} labels{mark}")
    typer.echo(
        f"Tuned on {tuned.data}; the trials asked for {tuned.labels} labels there, and all {tuned.scored} labels of it "
        "were seen to score them."
    )


@app.command("sweep")
def sweep_command(
    file: Annotated[Path, typer.Argument(help="Fields of an experiment; those that are lists are the axes.")],
    out: Out = Path("runs/sweep"),
    engine: Annotated[
        str | None, typer.Option(help="inline, process or ray; by default processes where there are several jobs.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once; by default one, or one a device.")] = None,
    devices: Annotated[
        str | None, typer.Option(help="GPUs for the processes in turn, cuda:0,cuda:1; by default all there are.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Of a running Ray cluster; by default one is started here.")
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(min=1, help="Batches between checkpoints; by default 100, or more if they would cost over 0.5 %."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Run finished ones once more.")] = False,
    data: Data = None,
    weights: Weights = None,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cards as JSON.")] = False,
) -> None:
    """Run every combination of a grid; finished runs are not repeated, interrupted ones go on, failures stop no other.

    Examples: wise-atta sweep grid.yaml --jobs 4, wise-atta sweep grid.yaml --engine ray --address auto
    """
    names = None if devices is None else typed.listed("--devices", devices, str)
    failed: dict[str, errors.WiseAttaError] = {}
    runs = expand(read_mapping(file))
    with watched(quiet or as_json, len(runs)) as report:
        cards = sweep(
            runs,
            Places(out, data, weights),
            jobs=jobs or len(names or [""]),
            engine=cast(Engine | None, engine),
            devices=names,
            address=address,
            report=report,
            again=again,
            checkpoint=checkpoint,
            failed=failed,
        )
    if as_json:
        typer.echo(json.dumps(cards))
    elif cards:
        typer.echo(table(cards))
    if failed:
        raise next(iter(failed.values()))


@app.command("verify")
def verify_command(
    files: Annotated[list[Path], typer.Argument(help="Cards, lists of cards, folders, bundles; FILE#DIGEST is one.")],
    data: Data = None,
    weights: Weights = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Run cards again: on the same kind of machine every digit must come out, elsewhere logits and error must be near.

    Leaves with 1 where a card does not hold.

    Example: wise-atta verify runs/tent-s0-1a2b3c4d5e6f docs/results/methods/cifar10/cards.json#06c7f2
    """
    verdicts, cache = list[Verdict](), StreamCache(2)
    problems: list[str] = []
    for file in [file for place in files for file in card_files(place) or [place]]:
        try:
            cards = read_cards(file, results=True, problems=problems)
        except errors.DataError as error:
            problems.append(str(error))
            continue
        for card in cards:
            try:
                verdicts.append(verify(card, data=data, weights=weights, cache=cache))
            except errors.WiseAttaError as error:
                problems.append(f"{card['digest']} in {file}: {error}")
                continue
            if not as_json:
                typer.echo(str(verdicts[-1]))
    if as_json:
        typer.echo(json.dumps([verdict.to_dict() for verdict in verdicts]))
    left_out(problems)
    if not all(verdict.holds for verdict in verdicts):
        raise typer.Exit(1)


@app.command("spread")
def spread_command(
    files: Annotated[
        list[Path], typer.Argument(help="Cards, lists of cards, folders of them, or bundles; they are changed.")
    ],
    runs: Annotated[int, typer.Option(min=2, help="How many runs with weights moved by 1e-7.")] = 10,
    measured_in: Annotated[
        Path | None, typer.Option("--from", help="Take spreads from this file, {DIGEST: SPREAD}, and run nothing.")
    ] = None,
    borrow: Annotated[
        bool,
        typer.Option("--borrow", help="Run nothing: cards without one get the width of another seed's, marked `of`."),
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Change nothing: print errors beside the means of their nudged runs.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure those that are known as well.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once, each in a process.")] = 1,
    kept: Annotated[
        Path | None,
        typer.Option(help="A folder for the errors of runs that are over; what it holds is not run again."),
    ] = None,
    fast: Annotated[
        list[str] | None,
        typer.Option(help="How nudged runs compute, as NAME=VALUE; channels_last=true is often faster on a GPU."),
    ] = None,
    data: Data = None,
    weights: Weights = None,
    quiet: Quiet = False,
) -> None:
    """Measure, where they were made, how far the runs of cards come apart by chance, and write it into the cards.

    Cards elsewhere are held to it by `wise-atta verify`. A spread of as many runs is not measured twice.

    Examples: wise-atta spread runs/delay/cards.json --jobs 4 --kept runs/nudged,
    wise-atta spread docs/results --from spreads.json, wise-atta spread docs/results --borrow
    """
    if borrow + show + (measured_in is not None) > 1:
        raise errors.BadConfig("--borrow, --from and --show exclude each other: give one")
    spreads: dict[str, Any] = {} if measured_in is None else read_json(measured_in)
    listed = [file for place in files for file in card_files(place) or [place]]
    for file in listed:
        if not file.is_file():
            raise errors.DataError(f"{file} is no file of cards, and no folder with any: name what is to be changed")
    problems: list[str] = []

    def cards_in(file: Path) -> list[dict[str, Any]]:
        try:
            return read_cards(file, results=True, problems=problems)
        except errors.DataError as error:
            problems.append(str(error))
            return []

    if show:
        cards = [card for file in listed for card in cards_in(file)]
        typer.echo(f"{nudges.table(cards)}\n\n{nudges.odd_ones(cards)}")
        left_out(problems)
        return
    if borrow:
        spreads = borrowed([card for file in listed for card in cards_in(file)], runs)

    def put(file: Path, spreads: dict[str, Any]) -> None:
        try:
            problems.extend(put_spreads(file, spreads))
        except errors.DataError as error:
            problems.append(str(error))

    def report(digest: str, number: int | None, error: float) -> None:
        if not quiet:
            typer.echo(f"{digest}: {which_run(number, runs)}, {error:.2f} % error", err=True)

    # Cards and their places. Of the copies of a card one may have been changed by hand.
    todo: dict[tuple[str, float], tuple[dict[str, Any], list[Path]]] = {}
    for file in () if borrow or measured_in is not None else listed:
        for card in cards_in(file):
            if again or len(nudges.nudged(card)) < runs:
                todo.setdefault((str(card["digest"]), card["results"]["error"]), (card, []))[1].append(file)
    options: dict[str, Any] = typed.pairs("--fast", fast or [])
    cards = [card for card, _ in todo.values()]
    for made, spread in measure(
        cards, runs=runs, fast=options, jobs=jobs, kept=kept, data=data, weights=weights, report=report
    ):
        digest = str(made["digest"])
        if isinstance(spread, errors.WiseAttaError):
            problems.append(str(spread))
            continue
        # Each at once: an interruption costs those that are not whole.
        for file in todo[digest, made["results"]["error"]][1]:
            put(file, {digest: spread})
        if not quiet:
            typer.echo(f"{digest}: {spread['low']:.4f} to {spread['high']:.4f} %", err=True)
    for file in listed:
        put(file, spreads)
        cards = cards_in(file)
        with_one = sum("spread" in card for card in cards)
        typer.echo(f"{file}: {with_one} of {len(cards)} cards have a spread")
    left_out(list(dict.fromkeys(problems)))


@app.command("no-harm")
def no_harm_command(
    on: Annotated[str, typer.Argument(help="digits, cifar10, pacs or imagenet-sample.")] = "digits",
    out: Out = Path("runs/no-harm"),
    clean: Annotated[int, typer.Option(help="Pictures of the clean streams.")] = 448,
    corrupted: Annotated[int, typer.Option(help="Pictures a corruption of the corrupted streams.")] = 192,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,8,64",
    grid: Annotated[
        bool, typer.Option("--grid", help="All that the default was chosen from, not the default.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    data: Data = None,
    weights: Weights = None,
    device: Device = "auto",
    threads: Threads = 1,
    quiet: Quiet = False,
) -> None:
    """The default configuration against the source model, on clean and corrupted, shuffled and sorted streams.

    Examples: wise-atta no-harm digits, wise-atta no-harm digits --grid --clean 96 --corrupted 16 --batches 8
    """
    setting = rivals.setting(on)
    name = no_harm.CLEAN.get(on, on)
    configurations = no_harm.GRID if grid else no_harm.DEFAULT
    limits = {"": clean, "+c": corrupted}
    fields = {"device": device, "threads": threads}
    sizes = typed.listed("--batches", batches, int)
    runs = no_harm.experiments(name, setting.fields["model"], configurations, limits, sizes, **fields)
    with watched(quiet, len(runs)) as report:
        measured = no_harm.measure(runs, Places(out, data, weights), jobs=jobs, report=report)
    typer.echo(no_harm.table(measured))


@app.command("ablation")
def ablation_command(
    on: Annotated[str, typer.Argument(help=f"One of {', '.join(rivals.SETTINGS)}.")] = "digits",
    out: Out = Path("runs/ablation"),
    seeds: Seeds = "0,41,58",
    ratio: Annotated[float, typer.Option(help="Labels a batch.")] = 0.5,
    lr: Annotated[float, typer.Option(help="Learning rate of the published rule.")] = 1e-3,
    paper_lr: Annotated[float, typer.Option(help="Learning rate of the paper's rule.")] = 1e-3,
    limit: Annotated[int | None, typer.Option(help="At most so many pictures a domain.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    data: Data = None,
    weights: Weights = None,
    device: Device = "auto",
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Tell what wise's labels are worth from what its stronger unlabelled step is worth.

    Example: wise-atta ablation digits --lr 1e-2 --paper-lr 2.5e-4
    """
    stream: dict[str, Any] = {} if limit is None else {"limit": limit}
    fields: dict[str, Any] = {"device": device, "threads": threads, "stream": stream}
    runs = ablation.experiments(
        rivals.setting(on, ratio), typed.listed("--seeds", seeds, int), lr=lr, paper_lr=paper_lr, **fields
    )
    _study(runs, out, Places(out / "runs", data, weights), jobs, quiet, ablation.table)


@app.command("delay")
def delay_command(
    on: Annotated[str, typer.Argument(help=f"One of {', '.join(rivals.SETTINGS)}.")] = "digits",
    out: Out = Path("runs/delay"),
    seeds: Seeds = "0,41,58",
    ratio: Annotated[float, typer.Option(help="Labels a batch.")] = 0.5,
    lr: Annotated[float, typer.Option(help="Learning rate of wise.")] = 1e-3,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Another option of wise: head_lr=3e-4.")
    ] = None,
    delays: Annotated[str, typer.Option(help="Batches that answers take, with commas.")] = "0,50,100,150,200",
    variant: Annotated[list[str] | None, typer.Option(help=f"One of {'; '.join(delay.VARIANTS)}. Repeatable.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a batch.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many pictures a domain.")] = None,
    own_streams: Annotated[bool, typer.Option("--own-streams", help="Another stream for each seed.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    data: Data = None,
    weights: Weights = None,
    device: Device = "auto",
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Measure what labels are worth that come late, and what can be done about their age.

    Example: wise-atta delay digits --limit 64 --delays 0,50 --seeds 0
    """
    fields: dict[str, Any] = {"device": device, "threads": threads}
    fields |= {} if batch is None else {"batch": batch}
    fields |= {} if limit is None else {"stream": {"limit": limit}}
    runs = delay.experiments(
        rivals.setting(on, ratio),
        typed.listed("--seeds", seeds, int),
        lr=lr,
        options=typed.pairs("--option", option or []),
        delays=typed.listed("--delays", delays, int),
        variants=variant or list(delay.VARIANTS),
        own_streams=own_streams,
        **fields,
    )
    _study(runs, out, Places(out / "runs", data, weights), jobs, quiet, delay.table)


def _study(
    runs: list[Experiment],
    out: Path,
    places: Places,
    jobs: int,
    quiet: bool,
    table_of: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Run a study, write its cards and its table, and print the table."""
    with watched(quiet, len(runs)) as report:
        cards = sweep(runs, places, jobs=jobs, report=report)
    text = table_of(cards) + "\n"
    rivals.write_report(out, cards, text)
    typer.echo(text)


if __name__ == "__main__":
    app()
