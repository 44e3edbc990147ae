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


def figure(found: Gathered) -> Figure | None:
    """The figure of an item; None where it has none, or nothing was run."""
    item = found.item
    if item.draw is None or not found.runs:
        return None
    panels = [panel for panel in _DRAW[item.draw](found) if panel.series]
    note = f"The paper: {item.says} {item.remark}".strip()
    where = "Dashed or hollow: the paper's numbers." if found.on is None else f"Here on {found.on}."
    return Figure(item.title, panels, f"{where} {note}") if panels else None


def _title(found: Gathered, spot: str) -> str:
    return PLACES[spot].title if found.on is None else spot


def _nudged_title(found: Gathered, spot: str) -> str:
    """With the seeds: what other draws would change is not in their standard errors."""
    runs = [run.card for cell in _at(found, spot) for run in cell.runs]
    seeds = ", ".join(str(seed) for seed in sorted({card["experiment"]["seed"] for card in runs if nudged(card)}))
    return f"{_title(found, spot)}, nudged runs of seed {seeds}"


def _over_seeds(found: Gathered, row: str, spot: str) -> tuple[float, float] | None:
    """Mean and deviation."""
    measured = found.measured(row, spot)
    return None if measured is None else (measured.mean, measured.sd or 0.0)


def _over_nudged(found: Gathered, row: str, spot: str) -> tuple[float, float] | None:
    """Mean and its standard error."""
    runs = found.nudged(row, spot)
    return (pooled(runs)[0], standard_error(runs)) if runs else None


# ---- lines: error against a quantity ---------------------------------------------------------------------------------


def _lines(found: Gathered) -> list[Panel]:
    ours = [
        Panel(
            _title(found, spot),
            "lines",
            found.item.axis,
            ERROR,
            [*_error_lines(found, spot, _over_seeds), *(_paper_lines(found, spot) if found.on is None else [])],
        )
        for spot in found.spots
    ]
    ours += [
        Panel(
            _nudged_title(found, spot),
            "lines",
            found.item.axis,
            ERROR + MEANT,
            _error_lines(found, spot, _over_nudged),
        )
        for spot in found.spots
    ]
    paper = [] if found.on is None else _paper_lines(found, found.spots[0])
    if paper:
        ours.append(Panel("the paper, mean over its benchmarks", "lines", found.item.axis, ERROR, paper))
    return ours


def _line_names(found: Gathered) -> list[str]:
    return list(dict.fromkeys(name for row in found.item.rows.values() for name in row.line))


def _error_lines(found: Gathered, spot: str, over: Over) -> list[Series]:
    lines = []
    for name in _line_names(found):
        rows = [row for row in found.item.rows.values() if name in row.line]
        points = [(float(row.x or 0), *at) for row in rows if (at := over(found, row.name, spot)) is not None]
        if points:
            xs, means, spread = (list(numbers) for numbers in zip(*points, strict=True))
            lines.append(Series(name, xs, means, spread))
    return lines


def _paper_lines(found: Gathered, spot: str) -> list[Series]:
    lines = []
    for name in _line_names(found):
        rows = [row for row in found.item.rows.values() if name in row.line]
        numbers = [
            found.item.number(row.name, spot) if found.on is None else paper_mean(found, row.name, spot) for row in rows
        ]
        points = [(float(row.x or 0), n) for row, n in zip(rows, numbers, strict=True) if n is not None]
        if len(points) > 1:
            lines.append(Series(name, [x for x, _ in points], [y for _, y in points], hollow=True))
    return lines


# ---- bars: what a row gains or loses ---------------------------------------------------------------------------------


def _bars(found: Gathered) -> list[Panel]:
    """Change in error against the reference row: by domain where there are several, else by benchmark."""
    whole = [spot for spot in found.spots if len(_domains(found, spot)) > 1]
    panels = [_bars_by_domain(found, spot) for spot in whole]
    single = [spot for spot in found.spots if spot not in whole]
    if single:
        names = [_title(found, spot) for spot in single]
        columns = [Column(spot, (spot,)) for spot in single]
        panels.append(_bar_panel(found, "benchmarks with one domain", names, columns))
    panels += [_nudged_bars(found, spot) for spot in found.spots]
    if found.on is not None:
        panels += [_paper_bars(found, f"c-{spot.rpartition(' ')[2]}") for spot in whole]
    return panels


def _domains(found: Gathered, spot: str) -> list[str]:
    cells = [cell for (_, where), cell in found.cells.items() if where == spot and cell.runs]
    return list(cells[0].runs[0].card["results"]["by_domain"]) if cells else []


def _bars_by_domain(found: Gathered, spot: str) -> Panel:
    domains = _domains(found, spot)
    columns = [*(Column(f"{spot}/{domain}", (spot,), domain) for domain in domains), Column(spot, (spot,))]
    return _bar_panel(found, _title(found, spot), [*(d.replace("_", " ") for d in domains), "mean"], columns)


def _bar_panel(found: Gathered, title: str, names: Sequence[str], columns: Sequence[Column]) -> Panel:
    series = []
    for row in found.item.rows:
        if row == found.item.reference:
            continue
        points = []
        for place, column in enumerate(columns):
            ours, base = found.measured(row, column), found.measured(found.item.reference, column)
            if ours is not None and base is not None:
                points.append((place, ours.minus(base)))
        if points:
            spread = [difference.sd or 0.0 for _, difference in points]
            series.append(Series(row, [x for x, _ in points], [d.mean for _, d in points], spread))
    return Panel(title, "bars", "", f"error against {found.item.reference}, points", series, names)


def _nudged_bars(found: Gathered, spot: str) -> Panel:
    series, base = [], found.nudged(found.item.reference, spot)
    for row in found.item.rows:
        runs = found.nudged(row, spot)
        if runs and base and row != found.item.reference:
            gain, error = apart(runs, base)
            series.append(Series(row, [0], [gain], [error]))
    return Panel(_nudged_title(found, spot), "bars", "", f"points{MEANT}", series, ["all domains"])


def _paper_bars(found: Gathered, place: str) -> Panel:
    columns = next(block.columns for block in found.item.blocks if place in block.columns[0].places)
    names = ["mean" if column.domain is None else column.domain.replace("_", " ") for column in columns]
    base = [found.item.number(found.item.reference, column.name) for column in columns]
    series = []
    for row in found.item.rows:
        numbers = [found.item.number(row, column.name) for column in columns]
        pairs = [
            (x, n - b) for x, (n, b) in enumerate(zip(numbers, base, strict=True)) if n is not None and b is not None
        ]
        if pairs and row != found.item.reference:
            series.append(Series(row, [x for x, _ in pairs], [y for _, y in pairs], hollow=True))
    return Panel(f"the paper: {PLACES[place].title}", "bars", "", "points", series, names)


def _rows(found: Gathered) -> list[Panel]:
    """Error of every row."""
    panels = []
    for spot in found.spots:
        for title, axis, over in (
            (_title(found, spot), ERROR, _over_seeds),
            (_nudged_title(found, spot), ERROR + MEANT, _over_nudged),
        ):
            rows = {row: at for row in found.item.rows if (at := over(found, row, spot)) is not None}
            means, spread = [mean for mean, _ in rows.values()], [deviation for _, deviation in rows.values()]
            series = [Series(ERROR, range(len(rows)), means, spread)] if rows else []
            panels.append(Panel(title, "lines", "", axis, series, list(rows)))
    return panels


# ---- what was asked, and when ----------------------------------------------------------------------------------------


def _at(found: Gathered, spot: str) -> list[Cell]:
    return [cell for (_, where), cell in found.cells.items() if where == spot]


def _tenths(found: Gathered) -> list[Panel]:
    panels = []
    for spot in found.spots:
        series, level = [], None
        for cell in _at(found, spot):
            counts = [count for run in cell.runs if (count := run.tenths) is not None]
            if counts:
                spread = np.std(counts, axis=0, ddof=1) if len(counts) > 1 else np.zeros(TENTHS)
                series.append(Series(cell.row.name, range(TENTHS), np.mean(counts, axis=0).tolist(), spread.tolist()))
                level = float(np.mean(counts))
        names = [str(tenth) for tenth in range(1, TENTHS + 1)]
        panels.append(Panel(_title(found, spot), "bars", "tenth of the stream", "labels", series, names, level))
    return panels


def _queries(found: Gathered) -> list[Panel]:
    panels = []
    for spot in found.spots:
        histograms, dots = [], []
        for cell in _at(found, spot):
            asked = [query for run in cell.runs for query in run.queries or []]
            if not asked:
                continue
            entropy, drift = np.array(asked).T
            share = np.clip(entropy / np.log(cell.runs[0].classes), 0, 1)
            density, edges = np.histogram(share, bins=20, range=(0, 1), density=True)
            histograms.append(Series(cell.row.name, ((edges[1:] + edges[:-1]) / 2).tolist(), density.tolist()))
            dots.append(Series(cell.row.name, share.tolist(), drift.tolist()))
        title = _title(found, spot)
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
