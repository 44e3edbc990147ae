"""Figures of the paper from our numbers: panels of what was measured, the paper's beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from wise_atta.bench.figures import Figure, Panel, Series
from wise_atta.bench.nudges import apart, nudged, pooled, standard_error
from wise_atta.bench.paper.gather import TENTHS, Cell, Gathered
from wise_atta.bench.paper.items import PLACES, Column
from wise_atta.bench.paper.tables import paper_mean

ERROR = "error %"
MEANT = ", mean ± standard error"
# The height of a row at a spot, and how far its whisker goes.
Over = Callable[[Gathered, str, str], tuple[float, float] | None]


def figure(gathered: Gathered) -> Figure | None:
    """The figure of an item; None where it has none, or nothing was run."""
    item = gathered.item
    if item.draw is None or not gathered.runs:
        return None
    panels = [panel for panel in _DRAW[item.draw](gathered) if panel.series]
    note = f"The paper: {item.says} {item.remark}".strip()
    where = "Dashed or hollow: the paper's numbers." if gathered.on is None else f"Here on {gathered.on}."
    return Figure(item.title, panels, f"{where} {note}") if panels else None


def _title(gathered: Gathered, spot: str) -> str:
    return PLACES[spot].title if gathered.on is None else spot


def _nudged_title(gathered: Gathered, spot: str) -> str:
    """With the seeds: what other draws would change is not in their standard errors."""
    runs = [run.card for cell in _at(gathered, spot) for run in cell.runs]
    seeds = ", ".join(str(seed) for seed in sorted({card["experiment"]["seed"] for card in runs if nudged(card)}))
    return f"{_title(gathered, spot)}, nudged runs of seed {seeds}"


def _over_seeds(gathered: Gathered, row: str, spot: str) -> tuple[float, float] | None:
    """Mean and deviation."""
    measured = gathered.measured(row, spot)
    return None if measured is None else (measured.mean, measured.sd or 0.0)


def _over_nudged(gathered: Gathered, row: str, spot: str) -> tuple[float, float] | None:
    """Mean and its standard error."""
    runs = gathered.nudged(row, spot)
    return (pooled(runs)[0], standard_error(runs)) if runs else None


# ---- lines: error against a quantity ---------------------------------------------------------------------------------


def _lines(gathered: Gathered) -> list[Panel]:
    ours = [
        Panel(
            _title(gathered, spot),
            "lines",
            gathered.item.axis,
            ERROR,
            [
                *_error_lines(gathered, spot, _over_seeds),
                *(_paper_lines(gathered, spot) if gathered.on is None else []),
            ],
        )
        for spot in gathered.spots
    ]
    ours += [
        Panel(
            _nudged_title(gathered, spot),
            "lines",
            gathered.item.axis,
            ERROR + MEANT,
            _error_lines(gathered, spot, _over_nudged),
        )
        for spot in gathered.spots
    ]
    paper = [] if gathered.on is None else _paper_lines(gathered, gathered.spots[0])
    if paper:
        ours.append(Panel("the paper, mean over its benchmarks", "lines", gathered.item.axis, ERROR, paper))
    return ours


def _line_names(gathered: Gathered) -> list[str]:
    return list(dict.fromkeys(name for row in gathered.item.rows.values() for name in row.line))


def _error_lines(gathered: Gathered, spot: str, over: Over) -> list[Series]:
    lines = []
    for name in _line_names(gathered):
        rows = [row for row in gathered.item.rows.values() if name in row.line]
        points = [(float(row.x or 0), *at) for row in rows if (at := over(gathered, row.name, spot)) is not None]
        if points:
            xs, means, spread = (list(numbers) for numbers in zip(*points, strict=True))
            lines.append(Series(name, xs, means, spread))
    return lines


def _paper_lines(gathered: Gathered, spot: str) -> list[Series]:
    lines = []
    for name in _line_names(gathered):
        rows = [row for row in gathered.item.rows.values() if name in row.line]
        numbers = [
            gathered.item.number(row.name, spot) if gathered.on is None else paper_mean(gathered, row.name, spot)
            for row in rows
        ]
        points = [(float(row.x or 0), n) for row, n in zip(rows, numbers, strict=True) if n is not None]
        if len(points) > 1:
            lines.append(Series(name, [x for x, _ in points], [y for _, y in points], hollow=True))
    return lines


# ---- bars: what a row gains or loses ---------------------------------------------------------------------------------


def _bars(gathered: Gathered) -> list[Panel]:
    """Change in error against the reference row: by domain where there are several, else by benchmark."""
    whole = [spot for spot in gathered.spots if len(_domains(gathered, spot)) > 1]
    panels = [_bars_by_domain(gathered, spot) for spot in whole]
    single = [spot for spot in gathered.spots if spot not in whole]
    if single:
        names = [_title(gathered, spot) for spot in single]
        columns = [Column(spot, (spot,)) for spot in single]
        panels.append(_bar_panel(gathered, "benchmarks with one domain", names, columns))
    panels += [_nudged_bars(gathered, spot) for spot in gathered.spots]
    if gathered.on is not None:
        panels += [_paper_bars(gathered, f"c-{spot.rpartition(' ')[2]}") for spot in whole]
    return panels


def _domains(gathered: Gathered, spot: str) -> list[str]:
    cells = [cell for (_, where), cell in gathered.cells.items() if where == spot and cell.runs]
    return list(cells[0].runs[0].card["results"]["by_domain"]) if cells else []


def _bars_by_domain(gathered: Gathered, spot: str) -> Panel:
    domains = _domains(gathered, spot)
    columns = [*(Column(f"{spot}/{domain}", (spot,), domain) for domain in domains), Column(spot, (spot,))]
    return _bar_panel(gathered, _title(gathered, spot), [*(d.replace("_", " ") for d in domains), "mean"], columns)


def _bar_panel(gathered: Gathered, title: str, names: Sequence[str], columns: Sequence[Column]) -> Panel:
    series = []
    for row in gathered.item.rows:
        if row == gathered.item.reference:
            continue
        points = []
        for place, column in enumerate(columns):
            ours, base = gathered.measured(row, column), gathered.measured(gathered.item.reference, column)
            if ours is not None and base is not None:
                points.append((place, ours.minus(base)))
        if points:
            spread = [difference.sd or 0.0 for _, difference in points]
            series.append(Series(row, [x for x, _ in points], [d.mean for _, d in points], spread))
    return Panel(title, "bars", "", f"error against {gathered.item.reference}, points", series, names)


def _nudged_bars(gathered: Gathered, spot: str) -> Panel:
    series, base = [], gathered.nudged(gathered.item.reference, spot)
    for row in gathered.item.rows:
        runs = gathered.nudged(row, spot)
        if runs and base and row != gathered.item.reference:
            gain, error = apart(runs, base)
            series.append(Series(row, [0], [gain], [error]))
    return Panel(_nudged_title(gathered, spot), "bars", "", f"points{MEANT}", series, ["all domains"])


def _paper_bars(gathered: Gathered, place: str) -> Panel:
    columns = next(block.columns for block in gathered.item.blocks if place in block.columns[0].places)
    names = ["mean" if column.domain is None else column.domain.replace("_", " ") for column in columns]
    base = [gathered.item.number(gathered.item.reference, column.name) for column in columns]
    series = []
    for row in gathered.item.rows:
        numbers = [gathered.item.number(row, column.name) for column in columns]
        pairs = [
            (x, n - b) for x, (n, b) in enumerate(zip(numbers, base, strict=True)) if n is not None and b is not None
        ]
        if pairs and row != gathered.item.reference:
            series.append(Series(row, [x for x, _ in pairs], [y for _, y in pairs], hollow=True))
    return Panel(f"the paper: {PLACES[place].title}", "bars", "", "points", series, names)


def _rows(gathered: Gathered) -> list[Panel]:
    """Error of every row."""
    panels = []
    for spot in gathered.spots:
        for title, axis, over in (
            (_title(gathered, spot), ERROR, _over_seeds),
            (_nudged_title(gathered, spot), ERROR + MEANT, _over_nudged),
        ):
            rows = {row: at for row in gathered.item.rows if (at := over(gathered, row, spot)) is not None}
            means, spread = [mean for mean, _ in rows.values()], [deviation for _, deviation in rows.values()]
            series = [Series(ERROR, range(len(rows)), means, spread)] if rows else []
            panels.append(Panel(title, "lines", "", axis, series, list(rows)))
    return panels


# ---- what was asked, and when ----------------------------------------------------------------------------------------


def _at(gathered: Gathered, spot: str) -> list[Cell]:
    return [cell for (_, where), cell in gathered.cells.items() if where == spot]


def _tenths(gathered: Gathered) -> list[Panel]:
    panels = []
    for spot in gathered.spots:
        series, level = [], None
        for cell in _at(gathered, spot):
            counts = [count for run in cell.runs if (count := run.tenths) is not None]
            if counts:
                spread = np.std(counts, axis=0, ddof=1) if len(counts) > 1 else np.zeros(TENTHS)
                series.append(Series(cell.row.name, range(TENTHS), np.mean(counts, axis=0).tolist(), spread.tolist()))
                level = float(np.mean(counts))
        names = [str(tenth) for tenth in range(1, TENTHS + 1)]
        panels.append(Panel(_title(gathered, spot), "bars", "tenth of the stream", "labels", series, names, level))
    return panels


def _queries(gathered: Gathered) -> list[Panel]:
    panels = []
    for spot in gathered.spots:
        histograms, dots = [], []
        for cell in _at(gathered, spot):
            asked = [query for run in cell.runs for query in run.queries or []]
            if not asked:
                continue
            entropy, drift = np.array(asked).T
            share = np.clip(entropy / np.log(cell.runs[0].classes), 0, 1)
            density, edges = np.histogram(share, bins=20, range=(0, 1), density=True)
            histograms.append(Series(cell.row.name, ((edges[1:] + edges[:-1]) / 2).tolist(), density.tolist()))
            dots.append(Series(cell.row.name, share.tolist(), drift.tolist()))
        title = _title(gathered, spot)
        panels.append(Panel(f"{title}: entropy", "lines", "entropy / ln C", "density of what was asked", histograms))
        panels.append(Panel(f"{title}: drift", "dots", "entropy / ln C", "drift against the anchor", dots))
    return panels


_DRAW: Mapping[str, Callable[[Gathered], list[Panel]]] = {
    "lines": _lines,
    "bars": _bars,
    "rows": _rows,
    "tenths": _tenths,
    "queries": _queries,
}
