"""Does the report stand by itself, tell all runs and what could not be read, and let nothing in them run as code?"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.made import made

from wise_atta import cli, rng
from wise_atta.bench import report, runs
from wise_atta.bench.record import read_parquet, write_parquet
from wise_atta.bench.runs import Run

BATCHES, BATCH = 30, 4
DOMAINS = ["fog"] * 15 + ["snow"] * 15
VOID = {"meta", "rect", "circle", "line", "polyline", "polygon"}


class Checker(HTMLParser):
    """Every tag that is opened is closed, in order; what would be loaded is listed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.seen: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert checker.open == [] and checker.loads == []
    assert not re.search(r"https?://|@import|url\(", text)
    return checker


def mistakes(share: float, who: str, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return rng.numpy(seed, who).random((BATCHES, BATCH)) < share


def some(folder: Path) -> list[Run]:
    shared: dict[str, Any] = {"domains": DOMAINS}
    made_runs = [made(folder / "tent", mistakes(0.3, "tent"), method="tent", **shared)]
    for ratio, seed in ((0.2, 0), (0.5, 0), (0.5, 1)):
        picked = {number: [0] for number in range(0, BATCHES, round(1 / ratio))}
        wrong = mistakes(0.4 - ratio / 2, f"{ratio}", seed)
        made_runs.append(made(folder / f"wise-{ratio}-{seed}", wrong, ratio=ratio, seed=seed, picked=picked, **shared))
    return made_runs


def numbers(text: str) -> list[dict[str, Any]]:
    """What the page's script reads."""
    script = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert script is not None
    content: list[dict[str, Any]] = json.loads(script[1])
    return content


def test_the_page_loads_nothing_and_tells_every_run(tmp_path: Path) -> None:
    text = report.html(some(tmp_path), replicates=50)
    checker = checked(text)
    assert "<h1>4 runs</h1>" in text and checker.seen["details"] == 8, "one a run, and one for its card"
    for name in ("tent", "wise-0.2-0", "wise-0.5-0", "wise-0.5-1"):
        assert f"wise-atta run {tmp_path / name / 'card.json'} --out runs/again" in text
    for title in ("Runs", "Error over the stream", "Labels spent", "What labels buy", "Error by domain", "Every run"):
        assert f"<h2>{title}</h2>" in text
    assert "Best without labels: tent" in text
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text


def test_lines_are_the_means_of_what_was_recorded(tmp_path: Path) -> None:
    made_runs = some(tmp_path)
    error, spent = numbers(report.html(made_runs, replicates=50))[:2]
    assert (error["batches"], error["domains"]) == (BATCHES, [[0, "fog"], [15, "snow"]])
    by_name = {line["name"]: line["ys"] for line in spent["lines"]}
    both = [[row["spent"] for row in run.steps] for run in made_runs[2:]]
    assert by_name["wise, ratio 0.5"] == np.mean(both, axis=0).round(1).tolist()
    tent = next(line["ys"] for line in error["lines"] if line["name"] == "tent")
    rows = [100 * row["error"] for row in made_runs[0].steps]
    assert tent[7] == pytest.approx(np.mean(rows[5:10]), abs=0.05)
    assert tent[14] == pytest.approx(np.mean(rows[12:15]), abs=0.05), "not smoothed across the end of a domain"


def test_runs_over_other_streams_stand_apart(tmp_path: Path) -> None:
    made_runs = [
        *some(tmp_path),
        made(tmp_path / "other", mistakes(0.2, "bn"), method="bn", severity=3, domains=DOMAINS),
    ]
    text = report.html(made_runs, replicates=50)
    checked(text)
    assert "5 runs over 2 streams" in text and text.count("<h2>Error over the stream</h2>") == 2
    assert text.count("<h2>What labels buy</h2>") == 1


def test_names_from_the_data_are_text_and_not_code(tmp_path: Path) -> None:
    evil = "<!--<script></script><script>alert(1)</script>"
    domains = [evil] * BATCHES
    text = report.html(
        [
            made(tmp_path / "a b", mistakes(0.2, "a"), method="tent", domains=domains, tag=evil),
            made(tmp_path / "b", mistakes(0.2, "b"), ratio=0.5, picked={0: [0]}, domains=domains),
        ],
        [f"{evil} cannot be read"],
        replicates=20,
    )
    checker = checked(text)
    assert checker.seen["script"] == 2 and "alert(1)</script>" not in text and "<!--<" not in text
    assert numbers(text)[0]["domains"] == [[0, evil]]
    assert "left out" in text and f"'{tmp_path / 'a b' / 'card.json'}'" in text.replace("&#x27;", "'")


def test_a_long_stream_is_thinned(tmp_path: Path) -> None:
    wrong = rng.numpy(0, "long").random((5000, 1)) < 0.3
    text = report.html([made(tmp_path / "long", wrong, method="tent")])
    assert all(len(line["ys"]) <= report.MOST for chart in numbers(text) for line in chart["lines"])
    assert np.mean(numbers(text)[0]["lines"][0]["ys"]) == pytest.approx(100 * wrong.mean(), abs=0.5)
    assert len(text) < 300_000


def test_events_of_the_guard_are_told(tmp_path: Path) -> None:
    made(tmp_path, mistakes(0.2, "a"), method="tent", domains=DOMAINS)
    rows = read_parquet(tmp_path / "steps.parquet")
    rows[4]["tripped"] = "one class has <all> predictions"
    write_parquet(tmp_path / "steps.parquet", rows)
    text = report.html([runs.read(tmp_path)])
    checked(text)
    assert "The guard stepped in 1 times" in text and "batch 5 (fog): one class has &lt;all&gt; predictions" in text


def test_runs_that_kept_no_hits_are_shown_without_what_needs_them(tmp_path: Path) -> None:
    for run in some(tmp_path):
        rows = read_parquet(run.where / "steps.parquet")
        for row in rows:
            del row["hits"], row["picked"], row["pictures"], row["logits"], row["tripped"]
        write_parquet(run.where / "steps.parquet", rows)
    text = report.html(runs.find([tmp_path]).runs)
    checked(text)
    assert "Not compared: " in text and "Error over the stream" in text


def test_the_command_writes_it_and_names_what_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some(tmp_path / "runs")
    broken = tmp_path / "runs" / "tent" / "card.json"
    broken.write_text("{")
    out = tmp_path / "deep" / "report.html"
    with pytest.raises(SystemExit) as left:
        cli.main(["report", str(tmp_path / "runs"), "--out", str(out), "--replicates", "20"])
    assert left.value.code == 3, "scripts learn that something is missing"
    text = out.read_text()
    checked(text)
    assert str(broken) in text and "<h1>3 runs</h1>" in text
    assert str(broken) in capsys.readouterr().err.replace("\n", "")


@pytest.mark.heavy
@pytest.mark.browser
def test_tables_sort_and_lines_hide_in_a_browser(tmp_path: Path, browser: Any) -> None:
    file = tmp_path / "report.html"
    file.write_text(report.html(some(tmp_path / "runs"), replicates=20))
    tab = browser.new_page(viewport={"width": 390, "height": 844})
    wrong: list[str] = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(file.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") == 390, "a phone need not scroll sideways"
    head = tab.locator("th.by", has_text="error %").first
    orders = []
    for _ in range(2):
        head.click()
        cells = tab.locator("section table tbody tr td:nth-child(2)").all_inner_texts()
        orders.append([float(cell.split()[0]) for cell in cells[:3]])
    assert orders[0] == sorted(orders[0]) and orders[1] == orders[0][::-1]
    tab.locator(".names button").first.click()
    assert tab.locator('g[data-of="0-0"]').first.is_hidden() and tab.locator('g[data-of="0-1"]').first.is_visible()
    chart = tab.locator("svg[data-chart]").first
    chart.scroll_into_view_if_needed()
    chart.hover(position={"x": 200, "y": 60})
    assert "batch" in tab.locator("#tip").inner_text() and "tent" not in tab.locator("#tip").inner_text()
    tab.close()
    assert wrong == []
