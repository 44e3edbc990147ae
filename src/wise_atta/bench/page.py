"""The frame of all HTML pages written here: it loads nothing, for light and dark, for a screen and a phone."""

from __future__ import annotations

from html import escape

import numpy as np
from numpy.typing import NDArray

from wise_atta.bench.svg import STYLE, THEME

PAGE = """
*{box-sizing:border-box} body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 56px} h1{font-size:26px;margin:0 0 4px}
h2{font-size:17px;margin:0 0 4px} p{margin:0 0 8px} .note{margin:12px 0 0;font-size:13px}
.dim{color:var(--dim)} ul{margin:0 0 10px;padding-left:20px} .lead{max-width:78ch;margin-bottom:22px}
section{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:18px 20px;margin-top:18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:14px} .tiles section{margin:0}
.big{font-size:27px;font-weight:650;letter-spacing:-.02em} .pair{display:grid;gap:18px;
grid-template-columns:repeat(auto-fit,minmax(430px,1fr))} .pair section{margin-bottom:0} svg{width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums} th{font-weight:600;color:var(--dim)}
th,td{padding:7px 10px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left} tr:last-child td{border-bottom:0} .scroll{overflow-x:auto}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px;background:var(--colour)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:6px 0 4px} .asked{display:grid;gap:12px 16px;
grid-template-columns:repeat(auto-fill,minmax(300px,1fr))} .asked h3{font-size:12px;margin:0 0 5px;color:var(--dim);
font-weight:600} .wall{display:flex;flex-wrap:wrap;gap:6px} figure{margin:0;width:44px}
figure img{width:44px;height:44px;image-rendering:pixelated;border-radius:5px;display:block}
figcaption{font-size:11px;text-align:center;
font-variant-numeric:tabular-nums} .right{color:var(--right)} .wrong{color:var(--wrong)} code{background:var(--soft);
padding:1px 5px;border-radius:4px;font-size:13px} dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 18px;
margin:8px 0 0} dt{color:var(--dim)} dd{margin:0;overflow-wrap:anywhere}
@media (max-width:520px){.pair{grid-template-columns:1fr}}
"""


def page(title: str, body: str, style: str = "", script: str = "") -> str:
    """A whole page, without anything to load."""
    ends = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(title)}</title><style>{THEME}{STYLE}{PAGE}{style}</style></head>'
        f"<body><main>{body}</main>{ends}</body></html>\n"
    )


def section(title: str, body: str, note: str = "") -> str:
    lead = f'<p class="dim">{note}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"


def smooth(values: NDArray[np.float64], reach: int = 2) -> NDArray[np.float64]:
    """Each value as the mean of itself and up to `reach` neighbours on either side."""
    return np.array([values[max(0, t - reach) : t + reach + 1].mean() for t in range(len(values))])
