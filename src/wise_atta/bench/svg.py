"""Lines, bars and points as SVG text, coloured by class for light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

# One colour a series, in both themes; everything drawn names its series as a class and holds no colour itself.
THEME = """
:root{--page:#ffffff;--card:#ffffff;--ink:#1f2937;--dim:#6b7280;--rule:#e5e7eb;--soft:#f3f4f6;
--source:#9ca3af;--bn:#8b5cf6;--tent:#2563eb;--never:#0d9488;--uniform:#d97706;--paced:#e11d48;--right:#15803d;--wrong:#dc2626}
@media (prefers-color-scheme:dark){:root{--page:#0f141b;--card:#161d27;--ink:#e5e7eb;--dim:#9ca3af;--rule:#2b3542;
--soft:#1f2833;--source:#7b8594;--bn:#a78bfa;--tent:#60a5fa;--never:#2dd4bf;--uniform:#fbbf24;--paced:#fb7185;--right:#4ade80;
--wrong:#f87171}}
"""
SERIES = ("source", "bn", "tent", "never", "uniform", "paced", "right", "wrong", "dim")


def _rules(names: Iterable[str]) -> str:
    return "".join(
        f"svg .line.{name}{{stroke:var(--{name})}} svg :is(.area,.dot,.bar,text).{name}{{fill:var(--{name})}}\n"
        for name in names
    )


STYLE = """
svg text{fill:var(--ink);font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
svg .tick{fill:var(--dim);font-size:11px} svg .axis{stroke:var(--dim)} svg .grid{stroke:var(--rule)}
svg .line{fill:none;stroke-width:2;stroke-linejoin:round} svg .dashed{stroke-dasharray:5 4;stroke-width:1.5}
svg .area{opacity:.18;stroke:none} svg .dot{opacity:.55;stroke:none} svg .bar{stroke:none}
svg .whisker{stroke:var(--ink)} svg .head{font-size:13px;font-weight:600}
""" + _rules(SERIES)

# For pictures of whatever was run, series by number: light and dark.
_LIGHT = ["#e11d48", "#2563eb", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#65a30d", "#475569", "#92400e"]
_DARK = ["#fb7185", "#60a5fa", "#34d399", "#fbbf24", "#a78bfa", "#22d3ee", "#f472b6", "#a3e635", "#94a3b8", "#fdba74"]
NUMBERED = tuple(f"s{place}" for place in range(len(_LIGHT)))


def _colours(values: Sequence[str]) -> str:
    return ":root{" + "".join(f"--{name}:{value};" for name, value in zip(NUMBERED, values, strict=True)) + "}"


NUMBERED_STYLE = (
    f"{_colours(_LIGHT)}\n@media (prefers-color-scheme:dark){{{_colours(_DARK)}}}\n"
    f"svg .thin{{stroke-width:1.2}} svg .dot.full{{opacity:1}}\n{_rules(NUMBERED)}"
)


def series(place: int) -> str:
    """The class of the series at a place; colours come again after ten.

    >>> series(0), series(12)
    ('s0', 's2')
    """
    return NUMBERED[place % len(NUMBERED)]


@dataclass(frozen=True)
class Axis:
    """From values to pixels.

    >>> Axis(0, 10, 100, 200)(5), Axis(0, 100, 0, 10, "root")(25)
    (150.0, 5.0)
    """

    low: float
    high: float
    start: float
    end: float
    scale: Literal["linear", "root"] = "linear"

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1)
        share = math.sqrt(max(share, 0.0)) if self.scale == "root" else share
        return round(self.start + share * (self.end - self.start), 1)


@dataclass
class Chart:
    """One picture with a pair of axes; what is added later lies on top."""

    width: float
    height: float
    x: Axis
    y: Axis
    parts: list[str] = field(default_factory=list)

    def line(self, xs: Iterable[float], ys: Iterable[float], kind: str) -> None:
        points = " ".join(f"{self.x(x)},{self.y(y)}" for x, y in zip(xs, ys, strict=True))
        self.parts.append(f'<polyline class="line {kind}" points="{points}"/>')

    def area(self, xs: Sequence[float], lows: Iterable[float], highs: Iterable[float], kind: str) -> None:
        there = [f"{self.x(x)},{self.y(y)}" for x, y in zip(xs, highs, strict=True)]
        back = [f"{self.x(x)},{self.y(y)}" for x, y in zip(xs, lows, strict=True)]
        self.parts.append(f'<polygon class="area {kind}" points="{" ".join(there + back[::-1])}"/>')

    def bar(self, corner: tuple[float, float], other: tuple[float, float], kind: str, title: str) -> None:
        x0, x1 = sorted((self.x(corner[0]), self.x(other[0])))
        y0, y1 = sorted((self.y(corner[1]), self.y(other[1])))
        size = f'x="{x0}" y="{y0}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}"'
        self.parts.append(f'<rect class="bar {kind}" {size} rx="2"><title>{escape(title)}</title></rect>')

    def dot(self, x: float, y: float, kind: str, title: str) -> None:
        place = f'cx="{self.x(x)}" cy="{self.y(y)}" r="3"'
        self.parts.append(f'<circle class="dot {kind}" {place}><title>{escape(title)}</title></circle>')

    def stroke(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        (x0, y0), (x1, y1) = ((self.x(x), self.y(y)) for x, y in (start, end))
        self.parts.append(f'<line class="{kind}" x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", turn: float = 0) -> None:
        """Text at a place in pixels."""
        turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}'
        self.parts.append(f'<text class="{kind}" {place}>{escape(text)}</text>')

    def ticks_x(self, values: Sequence[float]) -> None:
        for value in values:
            self.text(self.x(value), self.y.start + 16, f"{value:g}", "tick", "middle")

    def ticks_y(self, values: Sequence[float], unit: str = "") -> None:
        for value in values:
            self.stroke((self.x.low, value), (self.x.high, value), "axis" if value == self.y.low else "grid")
            self.text(self.x.start - 7, self.y(value) + 4, f"{value:g}{unit}", "tick", "end")

    def body(self) -> str:
        return "".join(self.parts)

    def svg(self, title: str) -> str:
        """The whole picture, for a page that has the style already."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(title)}">'
            f"{self.body()}</svg>"
        )


def ticks(high: float, count: int = 5) -> list[float]:
    """Round numbers from 0 up to about `high`.

    >>> ticks(150), ticks(0.62)
    ([0.0, 50.0, 100.0, 150.0], [0.0, 0.2, 0.4, 0.6])
    """
    rough = max(high, 1e-9) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [round(step * i, 10) for i in range(int(high / step + 1e-9) + 1)]
