"""Figures for print and for a screen: panels of lines, bars and dots as PNG, SVG and one HTML page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wise_atta.bench.record import replace_file, write_text
from wise_atta.bench.svg import STYLE, THEME, Axis, Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that people who see fewer colours can tell apart, on light and on dark ground (after Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b5cf6", "#7f7f7f")
WIDTH, HEIGHT = 560.0, 340.0
_PAGE = """
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 20px}
h1{font-size:22px;margin:0 0 6px} h2{font-size:15px;margin:0 0 4px}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:18px}
section{border:1px solid var(--rule);border-radius:12px;padding:14px} svg{width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:4px 10px;margin:10px 0} .dim{color:var(--dim)}
button{font:inherit;color:inherit;background:none;border:1px solid var(--rule);border-radius:8px;
padding:2px 10px;cursor:pointer} button[aria-pressed=false]{opacity:.35}
button i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
svg .dot{opacity:.8} svg .many .dot{opacity:.4} svg .hollow.line{stroke-dasharray:5 4}
svg [data-series]:hover{filter:brightness(1.15)}
"""
_SCRIPT = """
for (const button of document.querySelectorAll("button")) button.onclick = () => {
  const on = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", on);
  const parts = document.querySelectorAll(`[data-series="${button.dataset.of}"]`);
  for (const part of parts) part.style.display = on ? "" : "none";
};
"""


@dataclass(frozen=True)
class Series:
    """Numbers of one name.

    Parameters
    ----------
    xs, ys
        Where; for bars `xs` are places among the panel's categories.
    spread
        A deviation for each, or nothing.
    ends
        Instead, from where to where an interval around each goes.
    hollow
        Whether it is drawn as what others report, not as what was measured here.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    spread: Sequence[float] = ()
    ends: Sequence[tuple[float, float]] = ()
    hollow: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Parameters
    ----------
    kind
        How series are drawn. Bars stand side by side over `names`, their categories.
    level
        A height to compare with, drawn as a dashed line.
    """

    title: str
    kind: Literal["lines", "bars", "dots"]
    x: str
    y: str
    series: Sequence[Series]
    names: Sequence[str] = ()
    level: float | None = None


@dataclass(frozen=True)
class Figure:
    """Panels with one legend.

    Examples
    --------
    >>> line = Series("uniform", [0, 1], [20.0, 19.0], [0.1, 0.2])
    >>> page = Figure("Error", [Panel("digits", "lines", "labels", "error %", [line])]).html()
    >>> "<title>uniform: 1, 19 ± 0.2</title>" in page, "http" in page
    (True, False)
    """

    title: str
    panels: Sequence[Panel]
    note: str = ""
    order: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for panel in self.panels:
            for series in panel.series:
                self.order.setdefault(series.name, len(self.order))

    def colour(self, name: str) -> str:
        return COLOURS[self.order[name] % len(COLOURS)]

    def write(self, folder: Path, name: str) -> list[Path]:
        """`NAME.png`, `NAME.svg` and `NAME.html` in a folder."""
        files = [folder / f"{name}.{kind}" for kind in ("png", "svg", "html")]
        for file in files[:2]:
            replace_file(file, partial(self._print, kind=file.suffix[1:]))
        write_text(files[2], self.html())
        return files

    # ---- for print ---------------------------------------------------------------------------------------------------

    def _print(self, file: Path, kind: str) -> None:
        import matplotlib
        from matplotlib.figure import Figure as Canvas

        columns = min(2, len(self.panels))
        lines = math.ceil(len(self.panels) / columns)
        # A fixed salt and no date: the same numbers give the same file.
        with matplotlib.rc_context({"svg.hashsalt": "wise-atta", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
            canvas = Canvas(figsize=(5.2 * columns, 3.4 * lines + 0.5), layout="constrained")
            axes = canvas.subplots(lines, columns, squeeze=False).flatten()
            for panel, axis in zip(self.panels, axes, strict=False):
                self._panel(axis, panel)
            for axis in axes[len(self.panels) :]:
                axis.remove()
            handles: dict[str, Any] = {}
            for axis in axes[: len(self.panels)]:
                for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                    # What was measured comes before what others report.
                    handles.setdefault(label, handle)
            canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
            canvas.suptitle(self.title)
            canvas.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)

    def _panel(self, axis: Axes, panel: Panel) -> None:
        wide = 0.8 / max(1, len(panel.series))
        for place, series in enumerate(panel.series):
            look: dict[str, Any] = {"color": self.colour(series.name), "label": series.name}
            # Matplotlib takes lengths; an interval need not hold what was observed.
            lengths = [(max(0.0, y - low), max(0.0, high - y)) for _, y, (low, high) in _points(series)]
            whiskers = list(zip(*lengths, strict=True)) if series.spread or series.ends else None
            if panel.kind == "bars":
                xs = [x + (place + 0.5) * wide - 0.4 for x in series.xs]
                hollow = {"fill": False, "edgecolor": look["color"]} if series.hollow else {}
                axis.bar(xs, series.ys, wide, yerr=whiskers, error_kw={"lw": 0.8}, **{**look, **hollow})
            elif panel.kind == "dots":
                axis.scatter(series.xs, series.ys, s=8, alpha=0.5, linewidths=0, **look)
            else:
                style = "--" if series.hollow else "-"
                axis.errorbar(series.xs, series.ys, yerr=whiskers, fmt=f"o{style}", ms=3, lw=1.4, capsize=2, **look)
        if panel.level is not None:
            axis.axhline(panel.level, color="0.5", ls="--", lw=1)
        if panel.names:
            turn, side = (45, "right") if _slanted(panel) else (0, "center")
            axis.set_xticks(range(len(panel.names)), panel.names, rotation=turn, ha=side)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)

    # ---- for a screen ------------------------------------------------------------------------------------------------

    def html(self) -> str:
        """One page that loads nothing: hover for numbers, press a name to hide its series."""
        colours = "".join(
            f"svg .line.s{n}{{stroke:{self.colour(name)}}} svg :is(.dot,.bar).s{n}{{fill:{self.colour(name)}}}"
            f"svg .bar.hollow.s{n}{{fill:none;stroke:{self.colour(name)}}}"
            for name, n in self.order.items()
        )
        legend = "".join(
            f'<button aria-pressed="true" data-of="{n}"><i style="background:{self.colour(name)}"></i>'
            f"{escape(name)}</button>"
            for name, n in self.order.items()
        )
        panels = "".join(
            f"<section><h2>{escape(panel.title)}</h2>{self._chart(panel).svg(panel.title)}</section>"
            for panel in self.panels
        )
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            'content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
            f"<title>{escape(self.title)}</title><style>{THEME}{STYLE}{_PAGE}{colours}</style></head><body><main>"
            f'<h1>{escape(self.title)}</h1><p class="dim">{escape(self.note)}</p><div class="legend">{legend}</div>'
            f'<div class="panels">{panels}</div></main><script>{_SCRIPT}</script></body></html>\n'
        )

    def _chart(self, panel: Panel) -> Chart:
        low, high = _span(panel)
        room = 86 if _slanted(panel) else 46
        if panel.names:
            left, right = -0.5, len(panel.names) - 0.5
        else:
            xs = [x for series in panel.series for x in series.xs] or [0.0, 1.0]
            margin = 0.02 * (max(xs) - min(xs) or 1.0)
            left, right = min(xs) - margin, max(xs) + margin
        across, up = Axis(left, right, 58, WIDTH - 12), Axis(low, high, HEIGHT - room, 12)
        chart = Chart(WIDTH, HEIGHT, across, up)
        chart.ticks_y(round_numbers(low, high))
        self._names(chart, panel) if panel.names else chart.ticks_x(round_numbers(left, right))
        if panel.level is not None:
            chart.stroke((left, panel.level), (right, panel.level), "axis dashed")
        for place, series in enumerate(panel.series):
            kind = f"s{self.order[series.name]}{' hollow' if series.hollow else ''}"
            many = " class='many'" if panel.kind == "dots" else ""
            chart.parts.append(f"<g data-series='{self.order[series.name]}'{many}>")
            _draw(chart, panel, place, series, kind)
            chart.parts.append("</g>")
        chart.text((58 + WIDTH) / 2, HEIGHT - 6, panel.x, "tick", "middle")
        chart.text(14, (HEIGHT - room) / 2, panel.y, "tick", "middle", turn=-90)
        return chart

    def _names(self, chart: Chart, panel: Panel) -> None:
        slanted = _slanted(panel)
        for place, name in enumerate(panel.names):
            x, y = chart.x(place), chart.y.start + 16
            chart.text(x + 4 * slanted, y, name, "tick", "end" if slanted else "middle", turn=-38 * slanted)


def _draw(chart: Chart, panel: Panel, place: int, series: Series, kind: str) -> None:
    wide = 0.8 / max(1, len(panel.series))
    if panel.kind == "lines":
        chart.line(series.xs, series.ys, kind)
    for x, y, (low, high) in _points(series):
        where = panel.names[int(x)] if panel.names else f"{x:g}"
        tooltip = f"{series.name}: {where}, {y:.4g}"
        # What three equal numbers deviate by is rounding.
        apart = high - low > 1e-9
        if apart:
            tooltip += f" [{low:.4g}, {high:.4g}]" if series.ends else f" ± {high - y:.2g}"
        if panel.kind == "bars":
            start = x - 0.4 + place * wide
            chart.bar((start, 0), (start + 0.92 * wide, y), kind, tooltip)
            x = start + 0.46 * wide
        else:
            chart.dot(x, y, kind, tooltip)
        if apart:
            chart.stroke((x, low), (x, high), "whisker")


def _points(series: Series) -> Iterator[tuple[float, float, tuple[float, float]]]:
    """Where each is, and from where to where its whisker goes."""
    spread = series.spread or [0.0] * len(series.ys)
    even = [(y - one, y + one) for y, one in zip(series.ys, spread, strict=True)]
    return zip(series.xs, series.ys, series.ends or even, strict=True)


def _slanted(panel: Panel) -> bool:
    """Whether names of categories are too long to stand side by side."""
    neighbours = [len(left) + len(right) for left, right in itertools.pairwise(panel.names)]
    return sum(map(len, panel.names)) > 40 or len(panel.names) * max(neighbours, default=0) > 88


def _span(panel: Panel) -> tuple[float, float]:
    """From lowest to highest, with whiskers; bars stand on 0."""
    ends = [end for series in panel.series for _, _, whisker in _points(series) for end in whisker]
    ends += [0.0] if panel.kind == "bars" else []
    ends += [] if panel.level is None else [panel.level]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    return (low - room if low else 0.0), (high + room if high else 0.0)


def round_numbers(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two values.

    >>> round_numbers(-1.2, 0.9), round_numbers(52.0, 55.0)
    ([-1.0, -0.5, 0.0, 0.5], [52.0, 53.0, 54.0, 55.0])
    """
    rough = max(high - low, 1e-9) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * i, 10) for i in range(first, last + 1)]
