"""Methods side by side on one stream: tuned alike on another stream, run alike, measured in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wise_atta import errors, methods
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.record import read_json, write_cards, write_json
from wise_atta.bench.sweep import Places, Report, sweep
from wise_atta.bench.table import Row, markdown, rows
from wise_atta.bench.tune import Tuned, lay_out, tune

SEEDS = (0, 41, 58)
# Methods that draw nothing: another seed gives the same bits, so one run stands for all.
WITHOUT_CHANCE = frozenset({"source", "bn", "tent", "eta", "sar"})
SLOW = ("cotta", "simatta", "hiltta", "cema", "eata")


@dataclass(frozen=True)
class Setting:
    """A stream with its model, and what else the methods need there.

    Parameters
    ----------
    fields
        Fields of `Experiment` that all runs share.
    tune_on
        The data to tune learning rates on; never the scored one.
    tune_stream
        Options of that stream.
    source_data, teacher
        For eata and cema.
    options
        Options that a method has here whatever its learning rate.
    note
        What a reader must know about the numbers.
    """

    fields: dict[str, Any]
    tune_on: str
    tune_stream: dict[str, Any]
    source_data: str
    teacher: str
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    note: str = ""


# The published value for ten classes; at 0.05 hardly a sample differs enough from the average.
_FEW_CLASSES = {name: {"epsilon": 0.4} for name in ("eta", "eata", "cema")}
_CIFAR_MODEL = "file:models/cifar10-resnet18_w32.safetensors"
_PACS_MODEL = "file:models/pacs-photo.safetensors"
SETTINGS: dict[str, Setting] = {
    "digits": Setting(
        {"data": "digits+c", "model": "digits", "batch": 64},
        tune_on="digits+extra",
        tune_stream={},
        source_data="digits-train",
        teacher="digits",
        options=_FEW_CLASSES,
        note="The teacher of cema is the student's own source model.",
    ),
    "cifar10": Setting(
        {"data": "cifar10+c", "model": _CIFAR_MODEL, "batch": 64, "stream": {"limit": 2176}},
        tune_on="cifar10+extra",
        tune_stream={"limit": 1280},
        source_data="cifar10-train",
        teacher=_CIFAR_MODEL,
        # eata's as published for this data: its default weight is ImageNet's, 2000.
        options=_FEW_CLASSES | {"cotta": {"preset": "cifar10-c"}, "eata": {"epsilon": 0.4, "fisher_weight": 1.0}},
        note="2,176 pictures a corruption: 34 batches of 64, 510 in all. The teacher of cema is the student's own "
        "source model.",
    ),
    "imagenet-sample": Setting(
        {"data": "imagenet-sample+c", "model": "efficientnet_lite0", "batch": 64, "stream": {"cut": False}},
        tune_on="imagenet-sample+extra",
        tune_stream={"limit": 640},
        source_data="imagenet-sample",
        teacher="efficientnet_lite0",
        note="Very likely training pictures of the model, each seen 45 times. The teacher of cema is the student's own "
        "source model.",
    ),
    "pacs": Setting(
        {"data": "pacs", "model": _PACS_MODEL, "batch": 16, "stream": {"domains": ["art_painting", "cartoon"]}},
        tune_on="tree:pacs-photo.zip+extra",
        tune_stream={"limit": 480},
        source_data="tree:pacs-photo.zip",
        teacher=_PACS_MODEL,
        options=_FEW_CLASSES,
        note="Source photo. The teacher of cema is the student's own source model.",
    ),
}


def experiment(setting: Setting, method: str, *, options: Mapping[str, Any] | None = None, **fields: Any) -> Experiment:
    """One run of a method in a setting; `fields` win over the setting's."""
    content = {**setting.fields, **fields, "method": method}
    content["stream"] = {**setting.fields.get("stream", {}), **fields.get("stream", {})}
    content["options"] = {**setting.options.get(method, {}), **(options or {})}
    if method == "eata":
        content["source_data"] = setting.source_data
    if method == "cema":
        content["teacher"] = setting.teacher
    return Experiment.parse(content)


def tune_all(
    setting: Setting,
    names: Sequence[str],
    places: Places,
    *,
    rates: Sequence[float],
    limits: Mapping[str, int] | None = None,
    jobs: int = 1,
    report: Report | None = None,
    **fields: Any,
) -> dict[str, Tuned]:
    """The learning rate of every method that has one, all by the same grid on the same other stream.

    `limits` shortens the tuning stream for slow methods: pictures a domain.
    """
    grids = []
    for name in names:
        if "lr" not in methods.options(name):
            continue
        stream = dict(setting.tune_stream)
        if limits and name in limits:
            stream["limit"] = limits[name]
        scored = experiment(setting, name, **{**fields, "stream": {}})
        base = scored.model_copy(update={"stream": stream})
        grids.append(lay_out(base, on=setting.tune_on, grid={"lr": list(rates)}))
    results = tune(grids, places, jobs=jobs, report=report) if grids else []
    return {tuned.method: tuned for tuned in results}


def compare(
    setting: Setting,
    names: Sequence[str],
    places: Places,
    *,
    tuned: Mapping[str, Mapping[str, Any]],
    protocols: Sequence[str] = ("ctta",),
    seeds: Sequence[int] = (0,),
    jobs: int = 1,
    report: Report | None = None,
    fresh: bool = False,
    **fields: Any,
) -> list[dict[str, Any]]:
    """Run methods under the same protocols and seeds, with tuned options; methods without chance once.

    `fresh` gives each run a process of its own: on a CPU its peak memory can be told apart in no other way.
    """
    runs = [
        experiment(setting, name, options=tuned.get(name, {}), protocol=protocol, seed=seed, **fields)
        for protocol in protocols
        for name in names
        for seed in (seeds[:1] if name in WITHOUT_CHANCE else seeds)
    ]
    return sweep(runs, places, jobs=jobs, report=report, fresh=fresh)


def costs(card: Mapping[str, Any]) -> list[str]:
    """What one run measured, for the table of costs."""
    results = card["results"]
    batches = results["batches"]
    memory = results["peak_memory"]
    return [
        f"{results['error']:.1f}",
        f"{results['labels_spent']}",
        f"{results['questions']['asked']}",
        f"{results['forwards'] / batches:.2f}",
        f"{results['backwards'] / batches:.2f}",
        "n/a" if memory is None else f"{memory / 2**20:.0f}",
        f"{results['seconds'] / batches:.4f}",
    ]


COSTS = ["method", "error %", "labels spent", "asked", "forwards", "backwards", "peak memory, MiB", "s a batch"]


def cost_table(cards: Sequence[Mapping[str, Any]]) -> str:
    """Error, labels, forwards, backwards, memory and time of every run, a line each."""
    return markdown(COSTS, [[card["experiment"]["method"], *costs(card)] for card in cards])


def error_table(cards: Sequence[Mapping[str, Any]]) -> str:
    """Errors by protocol and method: mean ± deviation over seeds, over all samples and over those never asked for."""
    lines = [
        [
            row.experiment["method"],
            row.experiment["protocol"],
            f"{row.experiment['options'].get('lr', '')}",
            row.text(),
            row.text("error_never_asked"),
            f"{row.mean('labels_spent'):.0f}",
            f"{len(row.cards)}",
        ]
        for row in rows(cards)
    ]
    header = ["method", "protocol", "lr", "error %", "never asked %", "labels", "runs"]
    return markdown(header, lines)


def domain_table(cards: Sequence[Mapping[str, Any]]) -> str:
    """Errors by domain, mean over seeds."""
    by_method = rows(cards)
    domains = list(by_method[0].cards[0]["results"]["by_domain"])

    def mean(row: Row, domain: str) -> str:
        values = [card["results"]["by_domain"][domain] for card in row.cards]
        return f"{sum(values) / len(values):.1f}"

    lines = [
        [f"{row.experiment['method']} ({row.experiment['protocol']})", *(mean(row, domain) for domain in domains)]
        for row in by_method
    ]
    return markdown(["method", *domains], lines)


def save_tuned(path: Path, tuned: Mapping[str, Tuned]) -> None:
    """Keep what tuning found, trial by trial."""
    write_json(path, {name: method.to_dict() for name, method in tuned.items()})


def load_tuned(path: Path) -> dict[str, dict[str, Any]]:
    """The best options by method, as `save_tuned` kept them."""
    try:
        return {name: dict(method["best"]) for name, method in read_json(path).items()}
    except (LookupError, TypeError, ValueError) as error:
        raise errors.DataError(
            f"{path} holds no tuned options: give the tuned.json that `wise-atta rivals --rates …` writes"
        ) from error


def setting(name: str, ratio: float = 0.5) -> Setting:
    """A setting by name, with so many labels a batch for eatta and wise."""
    if name not in SETTINGS:
        raise errors.unknown("setting", name, SETTINGS)
    base = SETTINGS[name]
    active = {method: {"ratio": ratio, **base.options.get(method, {})} for method in ("eatta", "wise")}
    active["wise"]["statistics"] = "batch"  # as all its rivals
    return replace(base, options={**base.options, **active})


def write_report(folder: Path, cards: Sequence[Mapping[str, Any]], text: str) -> None:
    """One JSON file with all cards, a line each, beside the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    write_cards(folder / "cards.json", cards)
    (folder / "table.md").write_text(text, encoding="utf-8")
