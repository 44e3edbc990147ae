"""The demo: digits under 15 corruptions, without and with labels, compared seed by seed.

Stream, learning rates and weights were fixed on other seeds beforehand: `wise-atta demo --tune` runs that grid, and
`docs/results/demo-settings.json` is what it printed.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wise_atta import errors
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.record import read_parquet
from wise_atta.bench.sweep import Places, Report, sweep
from wise_atta.data.corruptions import frost_source

SEEDS = tuple(range(10))
TUNING_SEEDS = tuple(range(1000, 1004))
BASELINE = "tent"
UNLABELLED = "wise, no labels"
RATIO = 0.5

# What all runs share. One thread each, so that numbers do not depend on how many cores there are.
STREAM: Mapping[str, Any] = {"data": "digits+c", "model": "digits", "batch": 16, "device": "cpu", "threads": 1}
LIMIT = 320

TENT: Mapping[str, Any] = {"lr": 0.1}
WISE: Mapping[str, Any] = {"lr": 0.2, "lambda_sup": 0.1, "lambda_ent": 1.0, "head_lr": 3e-4}

_WISE: Mapping[str, Any] = {"method": "wise", "statistics": "batch", "options": WISE}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "source": {"method": "source"},
    "bn": {"method": "bn"},
    "tent": {"method": "tent", "statistics": "batch", "options": TENT},
    # What the labels themselves are worth: the same update, and nobody to ask.
    UNLABELLED: {**_WISE, "policy": "never"},
    "wise, uniform": {**_WISE, "policy": "uniform", "ratio": RATIO},
    "wise, paced": {**_WISE, "policy": "paced", "ratio": RATIO},
}

# The first pair is the paper's.
WEIGHTS = ((0.9, 0.1), (0.3, 1.0), (0.1, 1.0), (0.03, 1.0))
RATES = (0.01, 0.03, 0.06, 0.1, 0.2, 0.4)
HEADS: tuple[Mapping[str, Any], ...] = ({"train_head": "none"}, {"head_lr": 3e-4}, {"head_lr": 1e-3})
GRID: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "tent": [{"lr": lr} for lr in RATES],
    "wise, uniform": [
        {"lr": lr, "lambda_sup": sup, "lambda_ent": ent, **head}
        for lr, (sup, ent), head in itertools.product(RATES, WEIGHTS, HEADS)
    ],
}


def experiment(row: str, seed: int, *, limit: int = LIMIT, options: Mapping[str, Any] | None = None) -> Experiment:
    """One run of the demo. The seed decides pictures, their order, their noise and the method's draws.

    Two rows with one seed see the same batches, so their errors can be compared in pairs.

    >>> experiment("tent", 3).spec() == experiment("wise, paced", 3).spec()
    True
    """
    if row not in ROWS:
        raise errors.unknown("row of the demo", row, ROWS)
    fields = {**STREAM, **ROWS[row], "seed": seed, "stream": {"seed": seed, "limit": limit}, "tag": row}
    if options is not None:
        fields["options"] = options
    return Experiment.parse(fields)


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """Mean of ours − theirs over seeds with its 95 % interval by Student's t; None with fewer than two pairs.

    >>> paired([1.0, 2.0, 4.0], [2.0, 4.0, 5.0])
    Interval(mean=-1.333..., low=-2.767..., high=0.100...)
    """
    from scipy import stats

    differences = np.subtract(ours, theirs)
    n = len(differences)
    if n < 2:
        return None
    mean = float(differences.mean())
    half = float(stats.t.ppf(0.975, n - 1) * differences.std(ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half)


def signed(number: float) -> str:
    """One decimal with its sign.

    >>> signed(-1.25), signed(0.5)
    ('−1.2', '+0.5')
    """
    return f"{number:+.1f}".replace("-", "−")


@dataclass(frozen=True)
class Line:
    """One row of the table.

    Parameters
    ----------
    name
        Method, and policy where it asks.
    cards
        Its runs, by seed.
    difference
        Error minus the baseline's, in points; None for the baseline itself and with one seed.
    never_asked
        The same over pictures that this method never asked for under any corruption, for it and the baseline alike.
    by_labels
        Error minus that of the same update without labels, where labels are asked for.
    """

    name: str
    cards: tuple[Mapping[str, Any], ...]
    difference: Interval | None
    never_asked: Interval | None
    by_labels: Interval | None = None

    def results(self, name: str) -> list[float]:
        return [float(card["results"][name]) for card in self.cards]

    @property
    def error(self) -> float:
        """Mean over seeds, in per cent."""
        return float(np.mean(self.results("error")))

    @property
    def sd(self) -> float | None:
        return float(np.std(self.results("error"), ddof=1)) if len(self.cards) > 1 else None

    @property
    def spent(self) -> float:
        return float(np.mean(self.results("labels_spent")))

    @property
    def allowed(self) -> int | None:
        """The same for every seed; None where nothing is asked."""
        first = self.cards[0]
        return int(first["results"]["labels_allowed"]) if first["experiment"]["ratio"] is not None else None

    def verdicts(self) -> list[str]:
        """What the intervals say, in words."""
        intervals = [(BASELINE, self.difference), ("the same update without labels", self.by_labels)]
        return [f"{self.name}: {_words(interval, than)}" for than, interval in intervals if interval is not None]


def _words(interval: Interval, than: str) -> str:
    span = f"{abs(interval.mean):.1f} points (95 % interval {signed(interval.low)} to {signed(interval.high)})"
    if interval.high < 0:
        return f"fewer errors than {than}, by {span}"
    if interval.low > 0:
        return f"more errors than {than}, by {span}"
    return f"cannot be told apart from {than}, {span}"


@dataclass(frozen=True)
class Demo:
    """What the demo found, and where its runs lie."""

    seeds: tuple[int, ...]
    lines: tuple[Line, ...]
    places: Places

    def line(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    def steps(self, name: str) -> list[list[dict[str, Any]]]:
        """Every run's batches, by seed."""
        return [read_parquet(_folder(card, self.places) / "steps.parquet") for card in self.line(name).cards]

    def queries(self, name: str) -> list[list[dict[str, Any]]]:
        """Every run's questions, by seed."""
        return [read_parquet(_folder(card, self.places) / "queries.parquet") for card in self.line(name).cards]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for scripts."""
        card = self.lines[0].cards[0]
        return {
            "seeds": list(self.seeds),
            "stream": card["provenance"]["stream"]["spec"] | {"seed": "one a run"},
            "batches": card["results"]["batches"],
            "pictures": card["results"]["samples"],
            "baseline": BASELINE,
            "interval": "95 %, Student's t over paired differences by seed",
            "rows": [
                {
                    "name": line.name,
                    "error": line.error,
                    "error_sd": line.sd,
                    "labels_spent": line.spent,
                    "labels_allowed": line.allowed,
                    "difference": None if line.difference is None else asdict(line.difference),
                    "difference_never_asked": None if line.never_asked is None else asdict(line.never_asked),
                    "difference_by_labels": None if line.by_labels is None else asdict(line.by_labels),
                    "errors_by_seed": line.results("error"),
                }
                for line in self.lines
            ],
            "provenance": {
                "model": card["provenance"]["model"],
                "frost": card["provenance"]["stream"]["frost"],
                "versions": card["provenance"]["versions"],
                "threads": card["provenance"]["threads"],
            },
        }


def run(
    out: Path,
    seeds: Sequence[int] = SEEDS,
    *,
    limit: int = LIMIT,
    jobs: int | None = None,
    report: Report | None = None,
) -> Demo:
    """Run every row with every seed, anew, and compare.

    Parameters
    ----------
    out
        Each run gets a folder below `out/runs`, with its card.
    limit
        Pictures of each corruption.
    jobs
        Worker processes; by default one for each core.
    report
        Told about each run when it is over.
    """
    if not seeds or set(seeds) & set(TUNING_SEEDS):
        raise errors.BadConfig(f"seeds {list(seeds)}: give at least one, and none that settings were chosen on")
    places = Places(out / "runs")
    experiments = [experiment(row, seed, limit=limit) for seed in seeds for row in ROWS]
    cards = sweep(experiments, places, jobs=jobs or _cores(), report=report, keep=1, again=True)
    return compare(cards, seeds, places)


def compare(cards: Sequence[Mapping[str, Any]], seeds: Sequence[int], places: Places) -> Demo:
    """Lines of the table from the cards of all runs."""
    by_seed = {(card["experiment"]["tag"], card["experiment"]["seed"]): card for card in cards}
    by_row = {row: tuple(by_seed[row, seed] for seed in seeds) for row in ROWS}
    error = {row: [float(card["results"]["error"]) for card in runs] for row, runs in by_row.items()}
    lines = []
    for row, runs in by_row.items():
        difference = never_asked = by_labels = None
        if row != BASELINE:
            difference = paired(error[row], error[BASELINE])
            both = [_never_asked(*pair, places) for pair in zip(runs, by_row[BASELINE], strict=True)]
            never_asked = paired(*zip(*both, strict=True))
        if ROWS[row].get("ratio"):
            by_labels = paired(error[row], error[UNLABELLED])
        lines.append(Line(row, runs, difference, never_asked, by_labels))
    return Demo(tuple(seeds), tuple(lines), places)


def _never_asked(ours: Mapping[str, Any], theirs: Mapping[str, Any], places: Places) -> tuple[float, float]:
    """The errors of two runs over the pictures that the first never asked for, in per cent."""
    first, second = (read_parquet(_folder(card, places) / "pictures.parquet") for card in (ours, theirs))
    kept = {row["picture"] for row in first if not row["asked"]}
    wrong, seen = (
        [sum(row[what] for row in rows if row["picture"] in kept) for rows in (first, second)]
        for what in ("wrong", "seen")
    )
    return 100 * wrong[0] / max(1, seen[0]), 100 * wrong[1] / max(1, seen[1])


def _cores() -> int:
    return os.cpu_count() or 1


def _folder(card: Mapping[str, Any], places: Places) -> Path:
    return places.of(Experiment.parse(card["experiment"]))


def tune(
    out: Path,
    seeds: Sequence[int] = TUNING_SEEDS,
    *,
    limit: int = LIMIT,
    jobs: int | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Try the grid on seeds that are never scored; every point with its mean error, and the best of each method.

    Both ways of allocating labels take the settings that are best under uniform allocation.
    """
    points = [(row, options) for row, all_options in GRID.items() for options in all_options]
    runs = [experiment(row, seed, limit=limit, options=options) for row, options in points for seed in seeds]
    # Seed by seed, so that a stream in memory serves the whole grid.
    runs.sort(key=lambda run: run.seed)
    cards = sweep(runs, Places(out / "tune"), jobs=jobs or _cores(), report=report, keep=1)
    by_digest = {run.digest: card["results"] for run, card in zip(runs, cards, strict=True)}
    tried: dict[str, list[dict[str, Any]]] = {row: [] for row in GRID}
    for row, options in points:
        results = [by_digest[experiment(row, seed, limit=limit, options=options).digest] for seed in seeds]
        mean = float(np.mean([result["error"] for result in results]))
        tried[row].append({"options": dict(options), "error": round(mean, 3)})
    return {
        "seeds": list(seeds),
        "stream": {**STREAM, "limit": limit},
        "frost": frost_source(),
        "ratio": RATIO,
        "best": {row: min(trials, key=lambda trial: float(trial["error"])) for row, trials in tried.items()},
        "tried": tried,
    }
