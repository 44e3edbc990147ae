"""The report of a set of runs: one HTML page with tables to sort, lines to hide, and every run with its card."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wise_atta import errors
from wise_atta.bench.demo import Interval
from wise_atta.bench.figures import round_numbers
from wise_atta.bench.page import page, section, smooth
from wise_atta.bench.runs import Run, visits
from wise_atta.bench.svg import NUMBERED_STYLE, Axis, Chart, series, ticks
from wise_atta.bench.value import REPLICATES, Value, by_method, stream_of, value

# Points of a line; a longer stream is shown by means over its neighbours.
MOST = 600
# Lines that are shown at first; the others come by a press on their name.
AT_FIRST = 6
WIDE, RIGHT = 1060.0, 1044.0

Numbers = NDArray[np.float64]

STYLE = (
    NUMBERED_STYLE
    + """
.plot{overflow-x:auto} .plot svg{min-width:620px;touch-action:pan-x pan-y} h3{font-size:14px;margin:16px 0 4px}
.pair{grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr))}
th.by{cursor:pointer;user-select:none} th.by::after{content:" ↕";opacity:.4} td .spark{width:92px;height:22px;
display:block} .names{display:flex;flex-wrap:wrap;gap:5px 8px;margin:8px 0}
.names button,.copy{font:inherit;font-size:13px;color:inherit;
background:none;border:1px solid var(--rule);border-radius:8px;padding:1px 9px;cursor:pointer}
.names button[aria-pressed=false]{opacity:.4} .off{display:none} .heat td{text-align:center;padding:5px 7px;
background:color-mix(in srgb,var(--wrong) calc(var(--heat)*55%),transparent)} .heat td:first-child{background:none;
text-align:left}
.heat th{writing-mode:vertical-rl;transform:rotate(180deg);text-align:left;padding:6px 2px} .heat th:first-child{
writing-mode:initial;transform:none;text-align:left} details{border-top:1px solid var(--rule);padding:8px 0}
summary{cursor:pointer;overflow-wrap:anywhere} pre{background:var(--soft);padding:10px;border-radius:8px;overflow:auto;
max-height:360px;font-size:12px} .warn{border-color:var(--wrong)} .event{color:var(--wrong)}
#tip{position:fixed;pointer-events:none;background:var(--card);border:1px solid var(--rule);border-radius:8px;
padding:6px 9px;font-size:12px;box-shadow:0 2px 10px #0003;display:none;max-width:280px;z-index:9}
#tip i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px}
"""
)

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent), tip = document.getElementById("tip");
const hidden = new Set();
for (const button of document.querySelectorAll(".names button")) {
  const show = () => {
    const on = button.getAttribute("aria-pressed") === "true", of = button.dataset.name;
    on ? hidden.delete(of) : hidden.add(of);
    for (const part of document.querySelectorAll(`[data-of="${of}"]`)) part.classList.toggle("off", !on);
  };
  button.onclick = () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    show();
  };
  show();
}
for (const head of document.querySelectorAll("th.by")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], place = head.cellIndex, way = head.dataset.way === "1" ? -1 : 1;
  head.dataset.way = way;
  const of = row => row.cells[place].dataset.by ?? row.cells[place].textContent;
  const by = (a, b) => (isNaN(a) || isNaN(b) || a === "" || b === "" ? String(a).localeCompare(b) : a - b) * way;
  [...body.rows].sort((a, b) => by(of(a), of(b))).forEach(row => body.append(row));
};
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const one = data[svg.dataset.chart];
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * one.width / box.width;
    const share = (x - one.left) / (one.right - one.left);
    if (share < 0 || share >= 1) { tip.style.display = "none"; return; }
    const batch = Math.floor(share * one.batches), said = [];
    for (const line of one.lines) {
      const at = line.ys[Math.floor(share * line.ys.length)];
      if (at !== null && !hidden.has(line.of)) said.push([at, line]);
    }
    said.sort((a, b) => b[0] - a[0]);
    tip.replaceChildren();
    const title = tip.appendChild(document.createElement("b"));
    title.textContent = `batch ${batch + 1} ${one.domains.filter(d => d[0] <= batch).at(-1)?.[1] ?? ""}`;
    for (const [at, line] of said.slice(0, 12)) {
      const row = tip.appendChild(document.createElement("div")), key = row.appendChild(document.createElement("i"));
      key.style.background = `var(--${line.kind})`;
      row.append(`${line.name}: ${at}`);
    }
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });
  svg.addEventListener("pointerleave", () => tip.style.display = "none");
}
for (const button of document.querySelectorAll(".copy")) button.onclick = () =>
  navigator.clipboard?.writeText(button.previousElementSibling.textContent).then(() => button.textContent = "copied");
"""


@dataclass(frozen=True)
class Line:
    """Runs that differ in nothing but the seed.

    Parameters
    ----------
    id
        Unique on the page: what the parts that belong to it are found by.
    kind
        Its colour.
    """

    id: str
    kind: str
    name: str
    ratio: float
    runs: tuple[Run, ...]

    def mean(self, column: str) -> Numbers:
        """A column of the steps, mean over seeds; where it has no number, NaN."""
        length = min(len(run.steps) for run in self.runs)
        rows = [[_number(row.get(column)) for row in run.steps[:length]] for run in self.runs]
        return np.asarray(np.mean(rows, axis=0))

    def results(self, name: str) -> list[float]:
        return [_number(run.results.get(name)) for run in self.runs]

    @property
    def asks(self) -> bool:
        return any(run.results["labels_spent"] for run in self.runs)


class Charts:
    """The charts of a page, and the numbers that are read off them."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def add(self, chart: Chart, title: str, spans: Sequence[tuple[int, int, str]], lines: list[dict[str, Any]]) -> str:
        """A chart over the batches of a stream, with what its lines say."""
        self.data.append(
            {
                "width": chart.width,
                "left": chart.x.start,
                "right": chart.x.end,
                "batches": int(chart.x.high),
                "domains": [[start, domain] for start, _, domain in spans],
                "lines": lines,
            }
        )
        svg = chart.svg(title).replace("<svg ", f'<svg data-chart="{len(self.data) - 1}" ', 1)
        return f'<div class="plot">{svg}</div>'


def html(runs: Sequence[Run], problems: Sequence[str] = (), *, replicates: int = REPLICATES) -> str:
    """The report on some runs as one page, without anything to load.

    Parameters
    ----------
    runs
        Whatever was run; runs over one stream with one model come together.
    problems
        What could not be read, said at the top.
    replicates
        Of the bootstrap behind what labels bought.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(stream_of(run), sort_keys=True, default=str), []).append(run)
    charts = Charts()
    several = f" over {len(groups)} streams" if len(groups) > 1 else ""
    body = [f"<h1>{len(runs)} run{'s' * (len(runs) != 1)}{several}</h1>", _problems(problems)]
    for place, some in enumerate(groups.values()):
        body.append(_group(some, place, charts, replicates))
    facts = json.dumps(charts.data, separators=(",", ":")).replace("<", "\\u003c")
    body.append(f'<div id="tip"></div><script type="application/json" id="data">{facts}</script>')
    return page("wise-atta report", "".join(body), STYLE, SCRIPT)


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in problems)
    return f'<section class="warn"><h2>Could not be read, and is left out</h2><ul>{items}</ul></section>'


def _lines(runs: Sequence[Run], place: int) -> list[Line]:
    groups = by_method(runs)
    several = {name for name, _ in groups if sum(other == name for other, _ in groups) > 1}
    return [
        Line(f"{place}-{n}", series(n), f"{name}, ratio {ratio:g}" if name in several else name, ratio, tuple(some))
        for n, ((name, ratio), some) in enumerate(sorted(groups.items(), key=lambda item: (item[0][1] > 0, *item[0])))
    ]


def _group(runs: Sequence[Run], place: int, charts: Charts, replicates: int) -> str:
    """All about the runs over one stream."""
    first, lines = runs[0], _lines(runs, place)
    spec, stream = first.provenance["stream"]["spec"], first.provenance["stream"]
    spans = visits(first.domains)
    lead = (
        f"{spec['data']}, {spec['protocol']}, batches of {spec['batch']}: {first.results['batches']:,} batches, "
        f"{first.results['samples']:,} samples, {len(stream.get('domains') or {}) or len(spans)} domains. Model "
        f"{first.provenance['model'].get('name', first.experiment['model'])}."
    )
    parts = [f'<p class="lead dim">{escape(lead)}</p>', section("Runs", _table(lines), _table_note(lines))]
    seeds = "Mean over seeds" if any(len(line.runs) > 1 for line in lines) else "One run each"
    parts.append(
        section(
            "Error over the stream",
            _names(lines) + _error_chart(lines, spans, charts),
            f"{seeds}, smoothed over five batches of one domain; scored before the update on each batch. Press a name "
            "to show or hide it, hover to read off. Heights go with the square root of the error.",
        )
    )
    asking = [line for line in lines if line.asks]
    if asking:
        parts.append(
            section(
                "Labels spent",
                _spending_chart(asking, spans, charts),
                "Dashed: what was allowed, ratio times batches. In hand: allowed so far and not spent.",
            )
        )
        parts.append(_value(runs, replicates))
    parts.append(section("Error by domain", _heat(lines), "In per cent, mean over seeds; the darker the worse."))
    details = "".join(_details(run, line, charts) for line in lines for run in line.runs)
    parts.append(section("Every run", details, "Utility, entropy, questions, events, and how to run it again."))
    return "".join(parts)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _table(lines: Sequence[Line]) -> str:
    heads = ["method", "error %", "", "never asked %", "labels", "of", "ms a batch", "forwards", "backwards", "runs"]
    rows = []
    for line in lines:
        error, never = line.results("error"), line.results("error_never_asked")
        ms = [float(np.median([_number(row.get("ms")) for row in run.steps])) for run in line.runs]
        batches = np.array(line.results("batches"))
        allowed = line.results("labels_allowed") if line.ratio else [float("nan")]
        forwards, backwards = (np.mean(np.array(line.results(name)) / batches) for name in ("forwards", "backwards"))
        cells = [
            (line.name, _key(line.kind) + escape(line.name)),
            (np.mean(error), _spread(error)),
            ("", _spark(line)),
            (np.mean(never), _spread(never)),
            (np.mean(line.results("labels_spent")), f"{np.mean(line.results('labels_spent')):.4g}"),
            (np.mean(allowed), _or_none(np.mean(allowed), "g")),
            (np.mean(ms), _or_none(np.mean(ms), ".1f")),
            (forwards, f"{forwards:.2f}"),
            (backwards, f"{backwards:.2f}"),
            (len(line.runs), str(len(line.runs))),
        ]
        row = "".join(f'<td data-by="{escape(str(by), quote=True)}">{text}</td>' for by, text in cells)
        rows.append(f"<tr>{row}</tr>")
    head = "".join(f"<th{' class=by' if name else ''}>{escape(name)}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _table_note(lines: Sequence[Line]) -> str:
    several = "mean ± deviation over seeds; " if any(len(line.runs) > 1 for line in lines) else ""
    return (
        f"Error: {several}never asked: over pictures that the run itself never asked for, so methods are not compared "
        "by it. Of: labels allowed. Press a head to sort."
    )


def _heat(lines: Sequence[Line]) -> str:
    domains = list(dict.fromkeys(name for line in lines for run in line.runs for name in run.results["by_domain"]))
    errors_by_line = [
        [float(np.mean([run.results["by_domain"].get(name, np.nan) for run in line.runs])) for name in domains]
        for line in lines
    ]
    high = max((value for row in errors_by_line for value in row if np.isfinite(value)), default=1.0) or 1.0
    rows = "".join(
        f"<tr><td>{_key(line.kind)}{escape(line.name)}</td>"
        + "".join(f'<td style="--heat:{_share(value, high):.3f}">{_or_none(value, ".1f")}</td>' for value in row)
        + "</tr>"
        for line, row in zip(lines, errors_by_line, strict=True)
    )
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in ["", *domains])
    return f'<div class="scroll"><table class="heat"><tr>{head}</tr>{rows}</table></div>'


def _share(value: float, high: float) -> float:
    """How dark: with the square root, so that errors of a few per cent can be told apart too."""
    return float(np.sqrt(value / high)) if np.isfinite(value) else 0.0


def _value(runs: Sequence[Run], replicates: int) -> str:
    """What labels bought, where there is something to compare with; otherwise why not."""
    title = "What labels buy"
    try:
        labels_value = value(runs, replicates=replicates)
    except errors.WiseAttaError as error:
        return section(title, "", escape(f"Not compared: {error}"))
    verdicts = "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in labels_value.words()) + "</ul>"
    head, lines = labels_value.table()
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    table = f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{rows}</table>"
    keys = "".join(f"<span>{_key(series(n))}{escape(name)}</span>" for n, name in enumerate(labels_value.asking))
    pair = "".join(f"<div>{chart.svg(title)}</div>" for chart in value_charts(labels_value))
    body = f'{verdicts}<div class="legend">{keys}</div><div class="pair">{pair}</div><div class="scroll">{table}</div>'
    return section(title, body, escape(labels_value.note()))


# ---- charts ----------------------------------------------------------------------------------------------------------


def value_charts(labels_value: Value) -> list[Chart]:
    """Error against labels spent, and the difference to the best unlabelled method on the same samples."""
    curves = {method: labels_value.curve(method) for method in labels_value.asking}
    error = {method: [point.error for point in points] for method, points in curves.items()}
    apart = {
        method: [Interval(0.0, 0.0, 0.0) if point.against is None else point.against.all for point in points]
        for method, points in curves.items()
    }
    labels = {method: [point.labels for point in points] for method, points in curves.items()}
    return [
        _against_labels(f"error %; dashed: {labels_value.baseline}", labels, error, labels_value.best.error.mean),
        _against_labels(f"points, against {labels_value.baseline}", labels, apart, 0.0),
    ]


def _against_labels(
    title: str, labels: Mapping[str, list[float]], heights: Mapping[str, list[Interval]], level: float
) -> Chart:
    most = max(max(some) for some in labels.values()) or 1.0
    ends = [level, *(end for some in heights.values() for one in some for end in (one.low, one.high))]
    room = 0.06 * ((max(ends) - min(ends)) or 1.0)
    chart = Chart(520, 330, Axis(0, most, 46, 510), Axis(min(ends) - room, max(ends) + room, 286, 26))
    chart.ticks_y(round_numbers(chart.y.low, chart.y.high))
    chart.ticks_x(ticks(most))
    chart.line([0, most], [level, level], "dim dashed")
    for n, (method, some) in enumerate(heights.items()):
        chart.area(labels[method], [one.low for one in some], [one.high for one in some], series(n))
        chart.line(labels[method], [one.mean for one in some], series(n))
        for x, one in zip(labels[method], some, strict=True):
            tooltip = f"{method}: {x:g} labels, {one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]"
            chart.dot(x, one.mean, f"{series(n)} full", tooltip)
    chart.text(46, 16, title, "head")
    chart.text(510, 324, "labels spent", "tick", "end")
    return chart


def _error_chart(lines: Sequence[Line], spans: Sequence[tuple[int, int, str]], charts: Charts) -> str:
    batches, names = spans[-1][1], len(spans) <= 20
    bottom = 314.0 if names else 366.0
    smoothed = {}
    for line in lines:
        error = 100 * line.mean("error")
        error = error[:batches]
        smoothed[line.id] = np.concatenate(
            [smooth(error[start:end]) for start, end, _ in spans if len(error[start:end])]
        )
    high = max(5.0, *(float(np.nanmax(values)) for values in smoothed.values()))
    chart = Chart(WIDE, 400, Axis(0, batches, 46, RIGHT), Axis(0, high * 1.05, bottom, 14, "root"))
    chart.ticks_y([level for level in (0, 1, 5, 10, 20, 40, 60, 90) if level <= high], " %")
    for start, end, domain in spans if len(spans) <= 60 else ():
        chart.stroke((start, 0), (start, chart.y.high), "grid")
        if names:
            middle = chart.x((start + end) / 2)
            chart.text(middle + 4, bottom + 14, domain.replace("_", " "), "tick", "end", turn=-38)
    if not names:
        chart.ticks_x(ticks(batches))
    told = []
    for line in lines:
        _draw(chart, line.id, smoothed[line.id], f"{line.kind} thin")
        told.append(_told(line, smoothed[line.id], 1))
    return charts.add(chart, "error over the stream", spans, told)


def _spending_chart(lines: Sequence[Line], spans: Sequence[tuple[int, int, str]], charts: Charts) -> str:
    """Labels spent against what was allowed, and below it the labels in hand."""
    batches = spans[-1][1]
    spent = {line.id: line.mean("spent")[:batches] for line in lines}
    hand = {
        line.id: np.floor(line.ratio * np.arange(1, len(spent[line.id]) + 1) + 1e-9) - spent[line.id] for line in lines
    }
    high = max(1.0, *(float(np.nanmax(values)) for values in spent.values()), *(line.ratio * batches for line in lines))
    chart = Chart(WIDE, 420, Axis(0, batches, 46, RIGHT), Axis(0, high, 226, 26))
    chart.ticks_y(ticks(high))
    ends = [
        0.0,
        1.0,
        *(end for values in hand.values() for end in (float(np.nanmin(values)), float(np.nanmax(values)))),
    ]
    below = Chart(WIDE, 420, chart.x, Axis(min(ends), max(ends), 382, 272), chart.parts)
    below.ticks_y(round_numbers(min(ends), max(ends), 3))
    below.ticks_x(ticks(batches))
    told, whole = [], np.array([0.0, batches])
    for line in lines:
        _draw(chart, line.id, line.ratio * whole, "dim dashed", whole)
        _draw(chart, line.id, spent[line.id], line.kind)
        _draw(below, line.id, hand[line.id], f"{line.kind} thin")
        told.append(_told(line, spent[line.id], 1))
    chart.text(46, 16, "spent", "head")
    chart.text(46, 262, "in hand", "head")
    chart.text(RIGHT, 414, "batch", "tick", "end")
    return charts.add(chart, "labels spent and in hand", spans, told)


def _draw(chart: Chart, of: str, values: Numbers, kind: str, xs: Numbers | None = None) -> None:
    """A line over the batches, in parts where numbers are missing, that can be hidden by its name."""
    xs, ys = _thin(np.arange(0.5, len(values)) if xs is None else xs, values)
    chart.parts.append(f'<g data-of="{escape(of, quote=True)}">')
    for start, end, known in visits([str(one) for one in np.isfinite(ys)]):
        if known == "True" and end - start > 1:
            chart.line(xs[start:end], ys[start:end], kind)
    chart.parts.append("</g>")


def _thin(xs: Numbers, ys: Numbers) -> tuple[Numbers, Numbers]:
    """At most `MOST` points: means over neighbours."""
    if len(xs) <= MOST:
        return xs, ys
    edges = np.linspace(0, len(xs), MOST + 1).astype(int)[:-1]
    counts = np.diff([*edges, len(xs)])
    return np.add.reduceat(xs, edges) / counts, np.add.reduceat(ys, edges) / counts


def _told(line: Line, values: Numbers, digits: int) -> dict[str, Any]:
    _, ys = _thin(np.arange(len(values), dtype=float), values)
    return {"of": line.id, "name": line.name, "kind": line.kind, "ys": _plain(ys, digits)}


def _spark(line: Line) -> str:
    """The error over the stream in a few letters' room."""
    error = line.mean("error")
    edges = np.unique(np.linspace(0, len(error), 31).astype(int)[:-1])
    means = np.add.reduceat(error, edges) / np.diff([*edges, len(error)])
    chart = Chart(92, 22, Axis(0, max(1, len(means) - 1), 1, 91), Axis(0, 1, 21, 1, "root"))
    chart.line(range(len(means)), means, f"{line.kind} thin")
    return chart.svg("error over the stream").replace("<svg ", '<svg class="spark" ', 1)


# ---- one run ---------------------------------------------------------------------------------------------------------


def _details(run: Run, line: Line, charts: Charts) -> str:
    spans, results = visits(run.domains), run.results
    seed = run.experiment["seed"]
    summary = f"{line.name}, seed {seed}: {results['error']:.2f} % error, {results['labels_spent']} labels"
    parts = []
    if any(row.get("utility") is not None for row in run.steps) and line.asks:
        parts.append(
            "<h3>Utility, threshold (dashed) and questions (dots)</h3>" + _utility_chart(run, line, spans, charts)
        )
    if any(row.get("entropy") is not None for row in run.steps):
        parts.append("<h3>Mean entropy of the predictions, nats</h3>" + _entropy_chart(run, line, spans, charts))
    trips = [row for row in run.steps if row.get("tripped")]
    if trips:
        listed = "".join(
            f"<li>batch {row['batch']} ({escape(row['domain'])}): {escape(row['tripped'])}</li>" for row in trips
        )
        parts.append(f'<h3 class="event">The guard stepped in {len(trips)} times</h3><ul>{listed}</ul>')
    parts.append(_again(run) + _provenance(run))
    event = f' · <span class="event">{len(trips)} guard events</span>' if trips else ""
    return f"<details><summary>{_key(line.kind)}{escape(summary)}{event}</summary>{''.join(parts)}</details>"


def _utility_chart(run: Run, line: Line, spans: Sequence[tuple[int, int, str]], charts: Charts) -> str:
    utility, threshold = (np.array([_number(row.get(name)) for row in run.steps]) for name in ("utility", "threshold"))
    both = np.concatenate([utility, threshold])
    both = both[np.isfinite(both)]
    low, high = (float(both.min()), float(both.max())) if len(both) else (0.0, 1.0)
    room = 0.05 * ((high - low) or 1.0)
    chart = Chart(WIDE, 220, Axis(0, len(run.steps), 46, RIGHT), Axis(low - room, high + room, 186, 12))
    chart.ticks_y(round_numbers(chart.y.low, chart.y.high, 4))
    chart.ticks_x(ticks(len(run.steps)))
    of = f"{line.id}-{run.name}"
    _draw(chart, of, utility, f"{line.kind} thin")
    _draw(chart, of, threshold, "dim dashed")
    for place, row in enumerate(run.steps):
        if row["asked"] and np.isfinite(utility[place]):
            chart.dot(
                place + 0.5, utility[place], "wrong", f"batch {row['batch']}: {row['asked']} asked, {row['domain']}"
            )
    told = [_of_run("utility", line.kind, utility), _of_run("threshold", "dim", threshold)]
    return charts.add(chart, "utility, threshold and questions", spans, told)


def _entropy_chart(run: Run, line: Line, spans: Sequence[tuple[int, int, str]], charts: Charts) -> str:
    entropy = np.array([_number(row.get("entropy")) for row in run.steps])
    known = entropy[np.isfinite(entropy)]
    high = float(known.max()) if len(known) else 1.0
    chart = Chart(WIDE, 160, Axis(0, len(run.steps), 46, RIGHT), Axis(0, max(high, 1e-3) * 1.05, 126, 12))
    chart.ticks_y(ticks(chart.y.high, 3))
    chart.ticks_x(ticks(len(run.steps)))
    _draw(chart, f"{line.id}-{run.name}", entropy, f"{line.kind} thin")
    for row in run.steps:
        if row.get("tripped"):
            chart.stroke((row["batch"], 0), (row["batch"], chart.y.high), "axis dashed")
    return charts.add(chart, "mean entropy", spans, [_of_run("entropy", line.kind, entropy)])


def _of_run(name: str, kind: str, values: Numbers) -> dict[str, Any]:
    _, ys = _thin(np.arange(len(values), dtype=float), values)
    return {"of": "", "name": name, "kind": kind, "ys": _plain(ys, 4)}


def _again(run: Run) -> str:
    card = run.where / "card.json" if run.where.name == run.name else Path(f"{run.where}#{run.card.get('digest')}")
    return (
        f"<h3>Run it again</h3><p><code>wise-atta run {escape(shlex.quote(str(card)))} --out runs/again</code> "
        '<button class="copy">copy</button></p>'
    )


def _provenance(run: Run) -> str:
    rests = run.provenance
    stream, model = rests["stream"], rests["model"]
    entries: Mapping[str, Any] = {
        "digest": run.card.get("digest"),
        "stream": f"{stream.get('digest')}, pixels {str(stream.get('pixels'))[:16]}",
        "weights": f"{model.get('name')}, {str(model.get('weights_hash'))[:16]}",
        "device": f"{rests.get('device')}, {rests.get('threads')} threads, deterministic {rests.get('deterministic')}",
        "versions": ", ".join(f"{name} {version}" for name, version in (rests.get("versions") or {}).items()),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{escape(str(text))}</dd>" for name, text in entries.items())
    card = escape(json.dumps(run.card, indent=1, ensure_ascii=False))
    return f"<h3>Provenance</h3><dl>{listed}</dl><details><summary>the whole card</summary><pre>{card}</pre></details>"


# ---- small things ----------------------------------------------------------------------------------------------------


def _names(lines: Sequence[Line]) -> str:
    shown = _shown(lines)
    return (
        '<div class="names">'
        + "".join(
            f'<button data-name="{line.id}" aria-pressed="{str(line.id in shown).lower()}">{_key(line.kind)}'
            f"{escape(line.name)}</button>"
            for line in lines
        )
        + "</div>"
    )


def _shown(lines: Sequence[Line]) -> set[str]:
    """What is shown at first. Of many lines: the best without labels, and each asking method's largest ratio."""
    if len(lines) <= AT_FIRST:
        return {line.id for line in lines}
    free = [line for line in lines if not line.asks]
    best = sorted(free, key=lambda line: np.mean(line.results("error")))[: AT_FIRST // 2]
    most = {line.name.partition(", ratio ")[0]: line for line in lines if line.asks}
    return {line.id for line in (*best, *list(most.values())[: AT_FIRST - len(best)])}


def _key(kind: str) -> str:
    return f'<span class="key" style="--colour:var(--{kind})"></span>'


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _plain(values: Numbers, digits: int) -> list[float | None]:
    return [round(float(value), digits) if np.isfinite(value) else None for value in values]


def _or_none(value: float | np.floating[Any], form: str) -> str:
    return f"{float(value):{form}}" if np.isfinite(value) else ""


def _spread(values: Sequence[float]) -> str:
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return ""
    return f"{np.mean(known):.2f}" + (f" ± {np.std(known, ddof=1):.2f}" if len(known) > 1 else "")
