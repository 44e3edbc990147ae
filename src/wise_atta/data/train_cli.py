"""`wise-atta train` and `wise-atta evaluate`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from wise_atta import errors
from wise_atta.data import models, train as training

app = typer.Typer(help="Train source models and measure them.")

Data = Annotated[Path | None, typer.Option(help="Folder of the named data sets (WISE_ATTA_DATA).")]
Weights = Annotated[Path | None, typer.Option(help="Folder with weights files, searched first (WISE_ATTA_WEIGHTS).")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; by default CUDA where there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print results as JSON, one a line, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


@app.command()
def train(
    what: Annotated[str, typer.Argument(help="cifar10, pacs, digits, or a folder or zip of class/picture.")],
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Where checkpoint and card are written.")] = Path("models"),
    name: Annotated[str | None, typer.Option(help="Of the files, without ending.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Start from this model, such as wise_atta/resnet18_w32@random.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides initial weights, split, order and augmentation.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Any other part of the recipe, such as rate=0.1; repeatable.")
    ] = None,
    test: Annotated[list[Path] | None, typer.Option(help="A further data set to measure on; repeatable.")] = None,
    weights: Weights = None,
    device: Device = None,
    restart: Annotated[bool, typer.Option(help="Throw away an earlier run of that name.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a source model; an interrupted run goes on where it stopped."""
    recipe = training.RECIPES.get(what, training.RECIPES["folder"])
    options: dict[str, Any] = {"start": model, "epochs": epochs, "seed": seed}
    options = {key: value for key, value in options.items() if value is not None}
    recipe = dataclasses.replace(recipe, **options, **_changes(change or []))
    console = Console(stderr=True, quiet=quiet or as_json)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )

    def report(step: training.Step) -> None:
        if not bar.tasks:
            bar.add_task("", total=step.epochs * step.steps)
        done = (step.epoch - 1) * step.steps + step.step
        loss = "" if step.loss is None else f"  loss {step.loss:.4f}"
        bar.update(bar.tasks[0].id, completed=done, description=f"epoch {step.epoch}/{step.epochs}{loss}")
        if step.ends_epoch and not console.is_terminal:
            console.print(f"epoch {step.epoch}/{step.epochs}{loss}")

    with bar:
        card = training.train(
            what,
            data=data,
            out=out,
            name=name,
            recipe=recipe,
            tests=test or (),
            weights=weights,
            device=device,
            restart=restart,
            report=report,
        )
    if as_json:
        typer.echo(json.dumps(card))
        return
    typer.echo(f"{card['data']['pictures']} pictures of {card['data']['name']}, {card['seconds']:.0f} s")
    for tested in card["tests"]:
        typer.echo(f"{tested['name']}: {_percent(card['errors'][tested['name']], tested['pictures'])}")
    typer.echo(f"weights {card['weights_hash'][:16]} in {out}")


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A model by name, see the guide on models.")],
    what: Annotated[str, typer.Argument(help="A data set by name, or a folder or archive of pictures by class.")],
    data: Data = None,
    weights: Weights = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure a model's error on a data set as it is, without adaptation."""
    source = models.load(model, weights=weights)
    for domain in training.read(what, source, data):
        measured = training.evaluate(source, domain, device=device)
        if as_json:
            typer.echo(json.dumps(measured))
        else:
            typer.echo(
                f"{measured['model']} on {measured['data']}: {_percent(measured['error'], measured['pictures'])}"
            )


def _percent(error: float, pictures: int) -> str:
    return f"{100 * error:.2f} % error, {100 * (1 - error):.2f} % right, {pictures} pictures"


def _changes(texts: list[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    known = {field.name for field in dataclasses.fields(training.Recipe)} - {"start", "epochs", "seed"}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in known:
            raise errors.unknown("part of the recipe", key, known)
        try:
            changes[key] = json.loads(value)
        except ValueError as error:
            raise errors.BadConfig(f"--set {text}: write {key}=NUMBER, or true, false or null") from error
    return changes


if __name__ == "__main__":
    typer.run(train)
