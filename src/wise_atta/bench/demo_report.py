"""The demo's report: one HTML page that needs nothing but itself, and one small picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wise_atta.bench import demo as demos
from wise_atta.bench.demo import Demo, Interval, Line, signed
from wise_atta.bench.page import page, section, smooth
from wise_atta.bench.runs import visits
from wise_atta.bench.svg import STYLE, THEME, Axis, Chart, ticks
from wise_atta.data import StreamSpec, open_stream

KINDS = {
    "source": "source",
    "bn": "bn",
    "tent": "tent",
    "wise, no labels": "never",
    "wise, uniform": "uniform",
    "wise, paced": "paced",
}
ASKING = ("wise, uniform", "wise, paced")
SHOWN = "wise, paced"
# Errors of a few and of ninety per cent have to be readable in one picture: heights go with the square root.
LEVELS = (0, 1, 5, 10, 20, 40, 60, 90)
TENTHS = 10


def html(demo: Demo) -> str:
    """The whole report as one page, without anything to load."""
    facts = demo.to_dict()
    parts = [
        _head(facts),
        _tiles(demo, facts),
        section("Result", _verdicts(demo) + _table(demo) + _footnote()),
        section(
            "Error over the stream",
            _legend(KINDS) + error_chart(demo).svg("error of every method over the stream"),
            f"Mean over {_seeds(demo)}, smoothed over five batches of one corruption. Scored before the update on each "
            "batch. Heights go with the square root of the error.",
        ),
        '<div class="pair">',
        section(
            "Labels spent", _legend(ASKING) + spending_chart(demo).svg("labels spent against r·t"), _spending_note(demo)
        ),
        section(
            "Labels by tenth of the stream",
            _legend(ASKING) + tenths_chart(demo).svg("labels by tenth of the stream"),
            "Mean over seeds. Uniform allocation spends alike everywhere, paced allocation where batches score high.",
        ),
        "</div>",
        section("What was asked", _asked(demo), _asked_note(demo)),
        section(
            "Drift against entropy of what was asked",
            scatter(demo).svg("drift against entropy of the pictures that were asked for"),
            f"{SHOWN}, {_seeds(demo)}. Drift is how far the prediction has moved from its own slow average. A picture "
            "is asked for because it drifts more than the others of its batch, whatever its entropy.",
        ),
        section("What these numbers rest on", _rests_on(demo, facts)),
    ]
    return page("wise-atta demo", "".join(parts))


def picture(demo: Demo) -> str:
    """A small picture of the result as one SVG file: error over the stream, and error by method."""
    over = error_chart(demo, width=620, height=300, names=False)
    by = _bars(demo, width=360, height=300)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 316" role="img" '
        f'aria-label="error over the stream and by method"><style>{THEME}{STYLE}</style>'
        '<rect width="1000" height="316" rx="12" style="fill:var(--page)"/>'
        f'<g transform="translate(8 12)">{over.body()}</g><g transform="translate(632 12)">{by.body()}</g></svg>\n'
    )


# ---- words and tables ------------------------------------------------------------------------------------------------


def _head(facts: Mapping[str, Any]) -> str:
    return (
        "<h1>A classifier adapts while it predicts</h1>"
        f'<p class="lead dim">A small network trained on clean digits meets {facts["pictures"]:,} pictures under 15 '
        f"corruptions, {facts['batches']} batches one after the other. It adapts to what it sees, and may ask for at "
        f"most one label every {1 / demos.RATIO:g} batches.</p>"
    )


def _tiles(demo: Demo, facts: Mapping[str, Any]) -> str:
    source, wise = demo.line("source"), demo.line(SHOWN)
    share = 100 * wise.spent / facts["pictures"]
    tiles = [
        (f"{source.error:.1f} % → {wise.error:.1f} %", f"error: the model as trained, and {SHOWN}"),
        (f"{wise.spent:.0f} of {facts['pictures']:,}", f"pictures were labelled: {share:.1f} %"),
    ]
    if wise.difference is not None:
        span = f"95 % interval {signed(wise.difference.low)} to {signed(wise.difference.high)}"
        tiles.append(
            (f"{signed(wise.difference.mean)} points", f"error against {demos.BASELINE}, which asks for none; {span}")
        )
    return (
        '<div class="tiles">'
        + "".join(
            f'<section><div class="big">{big}</div><div class="dim">{escape(small)}</div></section>'
            for big, small in tiles
        )
        + "</div>"
    )


def _table(demo: Demo) -> str:
    head = ["method", "error %", "labels", f"difference to {demos.BASELINE}", "the same on pictures never asked for"]
    lines = [
        [
            _key(line.name) + escape(line.name),
            error_text(line),
            labels_text(line),
            difference_text(line.difference),
            difference_text(line.never_asked),
        ]
        for line in demo.lines
    ]
    rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" for cells in lines)
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{escape(h)}</th>" for h in head)}</tr>{rows}</table></div>'


def error_text(line: Line) -> str:
    return f"{line.error:.1f}" + ("" if line.sd is None else f" ± {line.sd:.1f}")


def labels_text(line: Line) -> str:
    return "none" if line.allowed is None else f"{line.spent:g} of {line.allowed}"


def difference_text(interval: Interval | None) -> str:
    return "" if interval is None else f"{signed(interval.mean)} [{signed(interval.low)}, {signed(interval.high)}]"


def _verdicts(demo: Demo) -> str:
    verdicts = [text for name in ASKING for text in demo.line(name).verdicts()]
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in verdicts) + "</ul>" if verdicts else ""


def _footnote() -> str:
    return (
        '<p class="dim note">Error: mean ± deviation over seeds. Difference: paired by seed, in points, with its 95 % '
        "interval by Student's t. A picture comes under every corruption, so a label could help by being remembered: "
        f"the last column leaves out, for the method and for {demos.BASELINE}, each picture that the method asked for. "
        "<i>No labels</i> is the same update with nobody to ask.</p>"
    )


def _legend(names: Mapping[str, str] | Sequence[str]) -> str:
    return '<div class="legend">' + "".join(f"<span>{_key(name)}{escape(name)}</span>" for name in names) + "</div>"


def _key(name: str) -> str:
    return f'<span class="key" style="--colour:var(--{KINDS[name]})"></span>'


def _seeds(demo: Demo) -> str:
    return f"{len(demo.seeds)} seeds" if len(demo.seeds) > 1 else "one seed"


def _spending_note(demo: Demo) -> str:
    return (
        f"At most ⌊{demos.RATIO:g}·t⌋ labels after batch t, at every t. Above: what was spent. Below: labels in hand, "
        "which paced allocation saves for better batches; the area spans all seeds."
    )


def _rests_on(demo: Demo, facts: Mapping[str, Any]) -> str:
    rests = facts["provenance"]
    model, versions = rests["model"], rests["versions"]
    entries = {
        "made by": f"<code>wise-atta demo --seeds {len(demo.seeds)} --limit {facts['stream']['limit']}</code>; "
        "every run's card is in <code>runs</code>",
        "settings": f"tent {escape(str(dict(demos.TENT)))}; wise {escape(str(dict(demos.WISE)))}. Chosen by "
        f"<code>wise-atta demo --tune</code> on seeds {', '.join(map(str, demos.TUNING_SEEDS))}, which are not scored",
        "stream": f"{facts['batches']} batches of {facts['stream']['batch']}, severity {facts['stream']['severity']}; "
        f"the seed decides pictures, order, noise and the method's draws; textures of frost: {rests['frost']}",
        "network": f"{model['architecture']}, trained on the other half; weights {model['weights_hash'][:16]}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in entries.items()) + "</dl>"


# ---- charts ----------------------------------------------------------------------------------------------------------


def error_chart(demo: Demo, width: float = 1060, height: float = 400, names: bool = True) -> Chart:
    """Error of every row over the stream; with `names` the corruptions stand below it."""
    first = demo.steps(demo.lines[0].name)[0]
    bottom = height - (86 if names else 34)
    axis = Axis(0, LEVELS[-1] + 5, bottom, 14 if names else 30, "root")
    chart = Chart(width, height, Axis(0, len(first), 46, width - 8), axis)
    chart.ticks_y(LEVELS, " %")
    spans = visits([str(row["domain"]) for row in first])
    for start, end, domain in spans:
        chart.stroke((start, 0), (start, axis.high), "grid")
        if names:
            middle = chart.x((start + end) / 2)
            chart.text(middle + 4, bottom + 14, domain.replace("_", " "), "tick", "end", turn=-38)
    for line in demo.lines:
        runs = demo.steps(line.name)
        errors = 100 * np.mean([[row["error"] for row in run] for run in runs], axis=0)
        smoothed = np.concatenate([smooth(errors[start:end]) for start, end, _ in spans])
        chart.line(np.arange(len(first)) + 0.5, smoothed, KINDS[line.name])
    if not names:
        chart.text(46, 18, "error over the stream, 15 corruptions one after the other", "head")
        chart.text((46 + width - 8) / 2, bottom + 22, f"batch 1 to {len(first)}", "tick", "middle")
    return chart


def spending_chart(demo: Demo) -> Chart:
    """Labels spent against r·t, and below it the labels in hand."""
    batches = len(demo.steps(SHOWN)[0])
    along = range(1, batches + 1)
    allowed = demos.RATIO * np.arange(1, batches + 1)
    spent = {name: np.array([[row["spent"] for row in run] for run in demo.steps(name)]) for name in ASKING}
    chart = Chart(520, 386, Axis(0, batches, 46, 510), Axis(0, max(1.0, allowed[-1]), 216, 28))
    chart.ticks_y(ticks(allowed[-1]))
    chart.line([0, batches], [0, allowed[-1]], "dim dashed")
    for name in ASKING:
        chart.line(along, spent[name].mean(axis=0), KINDS[name])
    chart.text(chart.x(batches * 0.62), chart.y(allowed[-1] * 0.72), "r·t", "dim", "end")
    saved = {name: np.floor(allowed) - spent[name] for name in ASKING}
    most = max(1.0, float(saved[SHOWN].max()))
    hand = Chart(520, 386, chart.x, Axis(0, most, 350, 254), chart.parts)
    hand.ticks_y(ticks(most, 3))
    hand.ticks_x(ticks(batches))
    hand.area(along, saved[SHOWN].min(axis=0), saved[SHOWN].max(axis=0), KINDS[SHOWN])
    for name in ASKING:
        hand.line(along, saved[name].mean(axis=0), KINDS[name])
    hand.text(46, 16, "spent", "head")
    hand.text(46, 246, "in hand", "head")
    hand.text(510, 380, "batch", "tick", "end")
    return hand


def tenths_chart(demo: Demo) -> Chart:
    """Labels by tenth of the stream, side by side for both ways of allocating them."""
    asked = {name: np.mean([_tenths(run) for run in demo.steps(name)], axis=0) for name in ASKING}
    high = max(1.0, *(float(counts.max()) for counts in asked.values()))
    chart = Chart(520, 350, Axis(0, TENTHS, 46, 510), Axis(0, high * 1.08, 306, 20))
    chart.ticks_y(ticks(high))
    for place, name in enumerate(ASKING):
        for tenth, count in enumerate(asked[name]):
            left = tenth + 0.12 + 0.38 * place
            chart.bar((left, 0), (left + 0.36, count), KINDS[name], f"{name}, tenth {tenth + 1}: {count:.1f} labels")
    for tenth in range(TENTHS):
        chart.text(chart.x(tenth + 0.5), 322, str(tenth + 1), "tick", "middle")
    chart.text(510, 342, "tenth of the stream", "tick", "end")
    return chart


def scatter(demo: Demo) -> Chart:
    """Drift and entropy of every picture that was asked for, right and wrong predictions apart."""
    asked = [row for run in demo.queries(SHOWN) for row in run if row["drift"] is not None]
    high = max((row["drift"] for row in asked), default=1.0)
    chart = Chart(1060, 380, Axis(0, float(np.log(10)), 46, 1050), Axis(0, max(high, 1e-3) * 1.05, 330, 34))
    chart.ticks_y(ticks(chart.y.high))
    chart.ticks_x(ticks(chart.x.high))
    for row in asked:
        kind = "dim" if row["predicted"] == row["truth"] else "wrong"
        chart.dot(row["entropy"], row["drift"], kind, f"{row['domain']}: {row['predicted']}, was {row['truth']}")
    wrong = sum(row["predicted"] != row["truth"] for row in asked)
    chart.text(46, 18, "drift", "head")
    chart.text(1050, 372, "entropy of the prediction (nats)", "tick", "end")
    chart.text(1050, 18, f"{wrong} predicted wrong", "wrong", "end")
    chart.text(900, 18, f"{len(asked) - wrong} predicted right", "dim", "end")
    return chart


def _bars(demo: Demo, width: float, height: float) -> Chart:
    """Error by row with its deviation."""
    high = max(line.error + (line.sd or 0) for line in demo.lines)
    chart = Chart(width, height, Axis(0, high, 106, width - 90), Axis(0, len(demo.lines), 34, height - 20))
    chart.text(8, 18, f"error, {_seeds(demo)}", "head")
    for place, line in enumerate(demo.lines):
        middle = place + 0.5
        chart.bar((0, place + 0.2), (line.error, place + 0.8), KINDS[line.name], f"{line.name}: {error_text(line)} %")
        if line.sd is not None:
            chart.stroke((line.error - line.sd, middle), (line.error + line.sd, middle), "whisker")
        chart.text(98, chart.y(middle) + 4, line.name, "", "end")
        end = chart.x(line.error + (line.sd or 0)) + 7
        asked = "" if line.allowed is None else f" · {line.spent:.0f} labels"
        chart.text(end, chart.y(middle) + 4, f"{error_text(line)} %{asked}", KINDS[line.name])
    return chart


def _tenths(steps: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    counts = np.zeros(TENTHS)
    for t, row in enumerate(steps):
        counts[t * TENTHS // len(steps)] += row["asked"]
    return counts


# ---- pictures --------------------------------------------------------------------------------------------------------


def _asked_note(demo: Demo) -> str:
    return (
        f"Every picture that {SHOWN} asked for with seed {demo.seeds[0]}, as the network saw it: its prediction, and "
        "the answer where that was another."
    )


def _asked(demo: Demo) -> str:
    queries = demo.queries(SHOWN)[0]
    seen = _pixels(demo.line(SHOWN).cards[0], {row["sample"] for row in queries})
    groups: dict[str, list[str]] = {}
    for row in queries:
        groups.setdefault(row["domain"], []).append(_tile(row, seen[row["sample"]]))
    return (
        '<div class="asked">'
        + "".join(
            f'<div><h3>{escape(domain.replace("_", " "))}</h3><div class="wall">{"".join(tiles)}</div></div>'
            for domain, tiles in groups.items()
        )
        + "</div>"
    )


def _tile(row: Mapping[str, Any], pixels: torch.Tensor) -> str:
    right = row["predicted"] == row["truth"]
    caption = f"✓ {row['truth']}" if right else f"{row['predicted']} → {row['truth']}"
    title = f"batch {row['batch']}: predicted {row['predicted']}, answer {row['truth']}, entropy {row['entropy']:.2f}"
    return (
        f'<figure title="{title}"><img alt="a {row["truth"]}" src="{_png(pixels)}">'
        f'<figcaption class="{"right" if right else "wrong"}">{caption}</figcaption></figure>'
    )


def _pixels(card: Mapping[str, Any], samples: set[str]) -> dict[str, torch.Tensor]:
    """The pictures of some samples of a run's stream."""
    pixels: dict[str, torch.Tensor] = {}
    stream, _ = open_stream(StreamSpec.from_dict(card["provenance"]["stream"]["spec"]))
    for batch in stream:
        assert isinstance(batch.inputs, torch.Tensor) and batch.ids is not None
        pixels |= {name: batch.inputs[row] for row, name in enumerate(batch.ids) if name in samples}
    return pixels


def _png(pixels: torch.Tensor) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray((pixels[0] * 255).round().to(torch.uint8).numpy()).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
