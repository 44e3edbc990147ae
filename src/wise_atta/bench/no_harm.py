"""The study of harm: a configuration against the source model, on streams where adaptation is not needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wise_atta.bench.experiment import Experiment
from wise_atta.bench.sweep import Places, Report, sweep
from wise_atta.bench.table import markdown

BATCHES = (1, 8, 64)
# The clean pictures of a setting: those of the domain that the model was trained on.
CLEAN = {"pacs": "tree:pacs-photo.zip"}
# Classes come one after the other: a concentration near 0 puts each class into one clump.
SORTED = {"order": "correlated", "concentration": 1e-4}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "clean, shuffled": ("", {}),
    "clean, sorted": ("", SORTED),
    "corrupted, shuffled": ("+c", {}),
    "corrupted, sorted": ("+c", SORTED),
}


DEFAULT: dict[str, dict[str, Any]] = {"source": {"method": "source"}, "wise": {"method": "wise"}}
# What the default was chosen from: how much the source's statistics count, and the learning rate.
GRID: dict[str, dict[str, Any]] = {
    "source": {"method": "source"},
    **{
        f"prior {prior}, lr {lr:g}": {
            "method": "wise",
            "ratio": 0.2,
            "statistics": "mixed",
            "prior": prior,
            "options": {"lr": lr},
        }
        for prior in (16, 64, 256)
        for lr in (1e-3, 2.5e-4)
    },
    "source statistics, lr 0.00025": {
        "method": "wise",
        "ratio": 0.2,
        "statistics": "source",
        "options": {"lr": 2.5e-4},
    },
}


def experiments(
    data: str,
    model: str,
    configurations: Mapping[str, Mapping[str, Any]],
    limits: Mapping[str, int],
    batches: Sequence[int] = BATCHES,
    **fields: Any,
) -> list[tuple[str, int, str, Experiment]]:
    """Every stream at every batch size under every configuration; `limits` by suffix, pictures a domain."""
    return [
        (
            stream,
            batch,
            name,
            Experiment.parse(
                {
                    "data": data + suffix,
                    "model": model,
                    "batch": batch,
                    "stream": {**options, "limit": limits[suffix]},
                    **fields,
                    **configuration,
                }
            ),
        )
        for stream, (suffix, options) in STREAMS.items()
        for batch in batches
        for name, configuration in configurations.items()
    ]


def measure(
    runs: Sequence[tuple[str, int, str, Experiment]], places: Places, *, jobs: int = 1, report: Report | None = None
) -> dict[tuple[str, int], dict[str, float]]:
    """Error in per cent by (stream, batch size) and configuration."""
    cards = sweep([run[-1] for run in runs], places, jobs=jobs, report=report)
    errors_by_stream: dict[tuple[str, int], dict[str, float]] = {}
    for (stream, batch, name, _), card in zip(runs, cards, strict=True):
        errors_by_stream.setdefault((stream, batch), {})[name] = card["results"]["error"]
    return errors_by_stream


def table(measured: Mapping[tuple[str, int], Mapping[str, float]], against: str = "source") -> str:
    """A line for every stream and batch size; a loss of more than a point to the source is marked."""
    names = list(next(iter(measured.values())))

    def cell(errors: Mapping[str, float], name: str) -> str:
        loses = name != against and errors[name] > errors[against] + 1
        return f"{errors[name]:.1f}" + (" (!)" if loses else "")

    lines = [
        [f"{stream}, batch {batch}", *(cell(errors, name) for name in names)]
        for (stream, batch), errors in measured.items()
    ]
    return markdown(["stream", *names], lines)
