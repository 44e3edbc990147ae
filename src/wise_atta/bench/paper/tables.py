"""Tables of the paper beside ours as Markdown: paper, ours and the difference."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from wise_atta.bench.nudges import apart, pooled
from wise_atta.bench.paper.gather import TENTHS, Gathered, Measured
from wise_atta.bench.paper.items import PLACES, Block, Column
from wise_atta.bench.table import markdown

NOT_RUN = "not run"
NOTHING = "–"


def text(gathered: Gathered, *, domains: bool = False, tuned: Path | None = None) -> str:
    """Everything there is to print about a table or figure.

    Parameters
    ----------
    domains
        Whether the fifteen corruptions of ImageNet-C's tables are printed, not their mean alone.
    tuned
        The file with tuned options that commands name.
    """
    one = gathered.item
    parts = [f"**{one.title}** ({one.kind} `{one.label}`). The paper: {one.says}"]
    if one.remark:
        parts.append(one.remark)
    if gathered.runs:
        parts.append(basis(gathered))
    parts += _errors_on_hand(gathered) if gathered.on is not None else _errors_of_paper(gathered, domains)
    parts += [part for part in (_quotes(gathered), _tenths(gathered), _queries(gathered)) if part]
    left_out = [reason for cell in gathered.cells.values() for reason in cell.left_out]
    if left_out:
        parts.append("Runs that were left out, since they are not those of a row: " + "; ".join(left_out) + ".")
    commands = missing_commands(gathered, tuned)
    if commands:
        parts.append("Not run, or not with all seeds:\n\n```sh\n" + "\n".join(commands) + "\n```")
    return "\n\n".join(parts) + "\n"


def basis(gathered: Gathered) -> str:
    """What the numbers rest on, in a line: stream, what was tuned, device."""
    cards = [run.card for run in gathered.runs]
    sizes = Counter(
        (card["experiment"]["data"], card["results"]["batches"], card["experiment"]["batch"]) for card in cards
    )
    streams = ", ".join(f"{data} in {batches} batches of {size}" for data, batches, size in sizes)
    rates: dict[str, list[str]] = {}
    for card in cards:
        rate = card["experiment"]["options"].get("lr")
        known = rates.setdefault(card["experiment"]["method"], [])
        if rate is not None and f"{rate:g}" not in known:
            known.append(f"{rate:g}")
    listed = ", ".join(f"{method} {' and '.join(values)}" for method, values in rates.items() if values)
    devices = ", ".join(dict.fromkeys(str(card["provenance"]["device"]) for card in cards))
    torch = ", ".join(dict.fromkeys(str(card["provenance"]["versions"]["torch"]) for card in cards))
    rate = f" Learning rates: {listed}; otherwise the methods' own." if listed else " Learning rates: the methods' own."
    others = dict.fromkeys(
        f"{cell.row.method} {name} {value}"
        for cell in gathered.cells.values()
        if cell.runs
        for name, value in cell.tuned.items()
        if name != "lr"
    )
    rate += f" Other options: {', '.join(others)}." if others else ""
    own = any(card["experiment"]["stream"].get("seed") for card in cards)
    seeds = "Each seed has its own stream." if own else "Seeds change the methods' draws, not the stream."
    return f"{len(cards)} runs: {streams}.{rate} {seeds} {devices}, torch {torch}."


# ---- errors ----------------------------------------------------------------------------------------------------------


def _digits(gathered: Gathered) -> int:
    """As many decimals as the paper prints in this table."""
    numbers = [n for block in gathered.item.blocks for row in block.numbers.values() for n in row.values()]
    return 2 if any(round(number, 1) != number for number in numbers) else 1


def _errors_of_paper(gathered: Gathered, domains: bool) -> list[str]:
    """A table a column of the paper's: paper, ours, difference."""
    digits = _digits(gathered)
    tables = []
    for block in gathered.item.blocks:
        for column in block.columns:
            if column.domain is not None and not domains:
                continue
            lines = [
                [
                    row,
                    *_compared(_number(block, row, column), gathered.measured(row, column), digits),
                    _runs(gathered, row, column),
                ]
                for row in gathered.item.rows
                if any(gathered.cell(row, place) for place in column.places)
            ]
            heads = [_heading(column), "paper", "ours", "difference", "runs"]
            tables.append(markdown(heads, lines))
    return tables


def _heading(column: Column) -> str:
    first = PLACES[column.places[0]].title
    if column.domain is not None:
        return f"{first}, {column.domain.replace('_', ' ')}"
    return first if len(column.places) == 1 else "mean of " + "; ".join(PLACES[place].title for place in column.places)


def _number(block: Block, row: str, column: Column) -> float | None:
    return block.numbers.get(row, {}).get(column.name)


def _errors_on_hand(gathered: Gathered) -> list[str]:
    """A table a protocol. The data are not the paper's: what compares is a row's difference to the reference."""
    digits, reference = _digits(gathered), gathered.item.reference
    versus = f"against {reference}"
    tables, compared, chance = [], False, False
    for spot in gathered.spots:
        base, base_paper = gathered.measured(reference, spot), paper_mean(gathered, reference, spot)
        papers = {row: paper_mean(gathered, row, spot) for row in gathered.item.rows}
        printed = any(paper is not None for paper in papers.values())
        compared = compared or printed
        nudged = {row: runs for row in papers if (runs := gathered.nudged(row, spot))}
        chance = chance or bool(nudged)
        lines = []
        for row, paper in papers.items():
            ours = gathered.measured(row, spot)
            gain = None if ours is None or base is None or row == reference else ours.minus(base)
            gained = None if paper is None or base_paper is None or row == reference else paper - base_paper
            three = _compared(paper, ours, digits, fine=2)
            lines.append(
                [
                    row,
                    *(three if printed else three[1:2]),
                    *([_chance(nudged.get(row, []))] if nudged else []),
                    *([NOTHING if gained is None else f"{gained:+.{digits}f}"] if printed else []),
                    NOTHING if gain is None else gain.text(2, "+"),
                    *([NOTHING if row == reference else _gain(nudged, row, reference)] if reference in nudged else []),
                    _labels(gathered, row, spot),
                    _runs(gathered, row, Column(spot, (spot,))),
                ]
            )
        heads = [
            *([spot, "paper*", "ours", "difference"] if printed else [spot, "ours"]),
            *(["nudged"] if nudged else []),
            *([f"paper, {versus}"] if printed else []),
            f"ours, {versus}",
            *([f"nudged, {versus}"] if reference in nudged else []),
            *("labels", "runs"),
        ]
        tables.append(markdown(heads, lines))
    if compared:
        tables.append(
            "\\* On the paper's own data, mean over its columns: `difference` compares streams, the columns `against` "
            "what a row gains or loses, in points, ours seed by seed."
        )
    if chance:
        tables.append(
            "`nudged`: mean and deviation of runs whose weights were moved by 1e-7, ten for each seed that has them. "
            "So far do runs come apart by chance alone, which seeds that draw the same do not show. `nudged, against`: "
            "the difference of two such means, and its standard error, for the draws of those seeds."
        )
    return tables


def _chance(nudged: Sequence[Sequence[float]]) -> str:
    """Mean over all nudged runs of a row, and their deviation within a seed."""
    return "{:.2f} ± {:.2f}".format(*pooled(nudged)) if nudged else NOTHING


def _gain(nudged: Mapping[str, Sequence[Sequence[float]]], row: str, reference: str) -> str:
    """What a row gains or loses against the reference, over the nudged runs of both."""
    return "{:+.2f} ± {:.2f}".format(*apart(nudged[row], nudged[reference])) if row in nudged else NOTHING


def paper_mean(gathered: Gathered, row: str, spot: str) -> float | None:
    """The paper's mean over the benchmarks of a row, of ImageNet-C those under the spot's protocol."""
    protocol = spot.rpartition(" ")[2]
    numbers = []
    several = {PLACES[c.places[0]].protocol for b in gathered.item.blocks for c in b.columns} >= {"ctta", "ftta"}
    for block in gathered.item.blocks:
        for column in block.columns:
            fits = not several or PLACES[column.places[0]].protocol == protocol
            number = _number(block, row, column)
            if number is not None and fits and len(column.places) == 1 and column.domain is None:
                numbers.append(number)
    # A row that lacks a number of its table has no mean to compare.
    whole = sum(
        column.domain is None and len(column.places) == 1
        for block in gathered.item.blocks
        for column in block.columns
        if not several or PLACES[column.places[0]].protocol == protocol
    )
    return float(np.mean(numbers)) if numbers and len(numbers) == whole else None


def _compared(paper: float | None, ours: Measured | None, digits: int, fine: int | None = None) -> list[str]:
    """Paper, ours and the difference; `fine` is the number of ours' decimals where it is another."""
    return [
        NOTHING if paper is None else f"{paper:.{digits}f}",
        NOT_RUN if ours is None else ours.text(digits if fine is None else fine),
        NOTHING if paper is None or ours is None else f"{ours.mean - paper:+.{digits}f}",
    ]


def _labels(gathered: Gathered, row: str, spot: str) -> str:
    cell = gathered.cell(row, spot)
    if cell is None or not cell.runs:
        return NOTHING
    spent, learned = (
        float(np.mean([count(run.card["results"]) for run in cell.runs]))
        for count in (lambda results: results["labels_spent"], lambda results: results["questions"]["learned"])
    )
    # Late answers come after the end of a short stream.
    return f"{spent:.0f}" + (f", {learned:.0f} in time" if cell.row.delay and learned < spent else "")


def _runs(gathered: Gathered, row: str, column: Column) -> str:
    cells = [cell for place in column.places if (cell := gathered.cell(row, place)) is not None]
    return f"{min(len(cell.runs) for cell in cells)} of {max(cell.wanted for cell in cells)}" if cells else NOTHING


# ---- what the text and the figures say -------------------------------------------------------------------------------


def _quotes(gathered: Gathered) -> str:
    lines = []
    for quote in gathered.item.quotes:
        columns: Sequence[str] = [quote.column] if gathered.on is None else gathered.spots
        for name in columns:
            where = Column.parse(name) if gathered.on is None else Column(name, (name,))
            one, two = (gathered.measured(row, where) for row in (quote.row, quote.minus))
            ours = None if one is None or two is None else one.minus(two)
            claim = (
                quote.says if gathered.on is None else f"{quote.row} minus {quote.minus}, {name} (paper: {quote.says})"
            )
            paper = NOTHING if quote.value is None else f"{quote.value:+.2f}"
            differ = NOTHING if ours is None or quote.value is None else f"{ours.mean - quote.value:+.2f}"
            lines.append([claim, paper, NOT_RUN if ours is None else ours.text(2, "+"), differ])
    return markdown(["the text", "paper", "ours", "difference"], lines) if lines else ""


def _tenths(gathered: Gathered) -> str:
    if gathered.item.draw != "tenths":
        return ""
    lines = []
    for cell in gathered.cells.values():
        counts = [run.tenths for run in cell.runs]
        known = [count for count in counts if count is not None]
        cells = [f"{mean:.1f}" for mean in np.mean(known, axis=0)] if known else [NOT_RUN, *[""] * (TENTHS - 1)]
        lines.append([f"{cell.row.name}, {cell.spot.title}", *cells])
    return markdown(["labels by tenth of the stream", *map(str, range(1, TENTHS + 1))], lines)


def _queries(gathered: Gathered) -> str:
    if gathered.item.draw != "queries":
        return ""
    lines = []
    for cell in gathered.cells.values():
        asked = [query for run in cell.runs for query in run.queries or []]
        if asked:
            entropy, drift = np.array(asked).T
            share = entropy / np.log(cell.runs[0].classes)
            numbers = [
                f"{share.mean():.2f}",
                f"{100 * (share > 0.8).mean():.0f} %",
                f"{drift.mean():.3g}",
                f"{np.median(drift):.3g}",
                str(len(asked)),
            ]
        else:
            numbers = [NOT_RUN, *[""] * 4]
        lines.append([f"{cell.row.name}, {cell.spot.title}", *numbers])
    heads = ["asked by", "mean entropy / ln C", "entropy above 0.8 ln C", "mean drift", "median drift", "samples"]
    return markdown(heads, lines)


# ---- what is missing -------------------------------------------------------------------------------------------------


def command(
    gathered: Gathered, only: Sequence[str] = (), protocols: Sequence[str] = (), tuned: Path | None = None
) -> str:
    """The command that runs a table or figure, or some of its rows, as the others were run."""
    cells = [cell for cell in gathered.cells.values() if cell.runs]
    # Under two protocols streams may be of two lengths.
    cells = [cell for cell in cells if cell.spot.setting.fields["protocol"] in protocols] or cells
    runs = [run for cell in cells for run in cell.runs]
    words = ["wise-atta", "paper", "run", gathered.item.name]
    if gathered.on is not None:
        words += ["--on", gathered.on]
    if protocols:
        words += ["--protocol", ",".join(protocols)]
    for row in only:
        words += ["--only", row]
    if tuned is not None:
        words += ["--tuned", str(tuned)]
    if any(run.card["experiment"]["stream"].get("seed") for run in runs):
        words.append("--own-streams")
    limits = {cell.limit for cell in cells}
    devices, threads = ({run.card["experiment"].get(name) for run in runs} for name in ("device", "threads"))
    for flag, values in (
        ("--limit", limits - {None}),
        ("--device", devices - {"auto"}),
        ("--threads", threads - {None}),
    ):
        words += [flag, str(values.pop())] if len(values) == 1 else []
    return shlex.join(words)


def missing_commands(gathered: Gathered, tuned: Path | None = None) -> list[str]:
    """What to run for rows that were not run, or not with all seeds; a command for each protocol if there are two."""
    lacks: dict[str, list[str]] = {}
    all_rows: dict[str, list[str]] = {}
    for cell in gathered.cells.values():
        protocol = str(cell.spot.setting.fields["protocol"])
        for rows in [all_rows] + [lacks] * (len(cell.runs) < cell.wanted):
            names = rows.setdefault(protocol, [])
            names += [] if cell.row.name in names else [cell.row.name]
    return [
        command(gathered, [] if rows == all_rows[protocol] else rows, [protocol] if len(all_rows) > 1 else [], tuned)
        for protocol, rows in lacks.items()
    ]
