"""Does the demo compare what it says, on seeds that nothing was chosen on, and does its report stand by itself?"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from wise_atta import errors
from wise_atta.bench import demo as demos, demo_report as report
from wise_atta.bench.demo import Demo, paired
from wise_atta.bench.source import cache_folder, digits_model
from wise_atta.bench.svg import Axis, Chart, ticks
from wise_atta.data import models
from wise_atta.data.train import RECIPES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The whole demo on a very short stream."""
    return demos.run(tmp_path_factory.mktemp("demo"), (0, 1), limit=16, jobs=1)


def test_every_row_sees_the_same_batches(demo: Demo) -> None:
    for number in range(len(demo.seeds)):
        streams = {line.cards[number]["provenance"]["stream"]["digest"] for line in demo.lines}
        pixels = {line.cards[number]["provenance"]["stream"]["pixels"] for line in demo.lines}
        assert len(streams) == len(pixels) == 1
    assert len({line.cards[0]["provenance"]["stream"]["pixels"] for line in demo.lines}) == 1
    assert demo.lines[0].cards[0]["provenance"]["stream"] != demo.lines[0].cards[1]["provenance"]["stream"]


def test_no_row_spends_more_than_it_may_at_any_moment(demo: Demo) -> None:
    for line in demo.lines:
        for run in demo.steps(line.name):
            ratio = demos.RATIO if line.allowed is not None else 0
            assert all(row["spent"] <= ratio * row["batch"] for row in run)


def test_differences_are_paired_by_seed(demo: Demo) -> None:
    tent, wise = demo.line("tent"), demo.line("wise, paced")
    assert tent.difference is None and wise.difference is not None
    expected = np.mean(np.subtract(wise.results("error"), tent.results("error")))
    assert wise.difference.mean == pytest.approx(expected)
    assert wise.difference.low <= expected <= wise.difference.high
    alone = np.subtract(wise.results("error"), demo.line("wise, no labels").results("error"))
    assert wise.by_labels is not None and wise.by_labels.mean == pytest.approx(np.mean(alone))
    assert tent.by_labels is None


def test_pictures_that_were_asked_for_are_left_out_for_both(demo: Demo) -> None:
    source = demo.line("source")
    assert source.never_asked and source.difference
    assert source.never_asked.mean == pytest.approx(source.difference.mean), "source asks for none: none is left out"
    asked = {row["sample"].rpartition("/")[2] for row in demo.queries("wise, paced")[0]}
    ours, theirs = demo.line("wise, paced").cards[0], demo.line("tent").cards[0]
    kept = demos._never_asked(ours, theirs, demo.places)
    assert kept[0] == pytest.approx(ours["results"]["error_never_asked"])
    assert asked and kept[1] != theirs["results"]["error"]


def test_the_interval_is_students() -> None:
    chance = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        interval = paired(chance.normal(0.3, 1, 6), np.zeros(6))  # type: ignore[arg-type]
        assert interval is not None
        covered += interval.low <= 0.3 <= interval.high
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)
    assert paired([1.0], [2.0]) is None


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ([-2.0, -2.1, -1.9], "fewer errors"),
        ([2.0, 2.1, 1.9], "more errors"),
        ([-2.0, 2.0, 0.1], "cannot be told apart"),
    ],
)
def test_the_verdict_says_what_the_interval_says(differences: list[float], words: str) -> None:
    line = demos.Line("wise, paced", (), paired(differences, [0.0] * 3), None)
    (verdict,) = line.verdicts()
    assert words in verdict and "tent" in verdict


def test_seeds_that_settings_were_chosen_on_are_not_scored(tmp_path: Path) -> None:
    assert not set(demos.SEEDS) & set(demos.TUNING_SEEDS)
    with pytest.raises(errors.BadConfig, match="1000"):
        demos.run(tmp_path, (0, 1000))
    assert len(demos.SEEDS) >= 10


def test_the_settings_are_those_that_were_recorded() -> None:
    recorded = json.loads((ROOT / "docs" / "results" / "demo-settings.json").read_text())
    assert recorded["seeds"] == list(demos.TUNING_SEEDS)
    assert recorded["frost"] == "procedural", "settings are for an installation without the reference corruptions"
    assert recorded["stream"] == {**demos.STREAM, "limit": demos.LIMIT}
    assert recorded["best"]["tent"]["options"] == demos.TENT
    assert recorded["best"]["wise, uniform"]["options"] == demos.WISE
    for row, trials in recorded["tried"].items():
        assert [trial["options"] for trial in trials] == list(demos.GRID[row])
        assert min(trial["error"] for trial in trials) == recorded["best"][row]["error"]


@pytest.mark.parametrize("page", ["README.md", "docs/guide/demo.md"])
def test_every_number_that_is_quoted_was_printed(page: str) -> None:
    text = (ROOT / page).read_text()
    recorded = json.loads((ROOT / "docs" / "results" / "demo.json").read_text())
    assert recorded["seeds"] == list(demos.SEEDS) and [row["name"] for row in recorded["rows"]] == list(demos.ROWS)
    for row in recorded["rows"]:
        labels = "none" if row["labels_allowed"] is None else f"{row['labels_spent']:g} of {row['labels_allowed']}"
        interval = row["difference"] and demos.Interval(**row["difference"])
        difference = f" {report.difference_text(interval)} " if interval else " "
        assert f"| {row['name']} | {row['error']:.1f} ± {row['error_sd']:.1f} | {labels} |{difference}|" in text
        for name in ("difference_by_labels", "difference_never_asked") if page.startswith("docs") else ():
            if row["difference_by_labels"] is not None:
                assert report.difference_text(demos.Interval(**row[name])) in text


def test_tuning_runs_the_whole_grid_on_its_own_seeds(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = {"tent": [{"lr": 0.0}, {"lr": 0.1}], "wise, uniform": [{"lr": 0.1}]}
    monkeypatch.setattr(demos, "GRID", grid)
    tuned = demos.tune(tmp_path, (1000, 1001), limit=16, jobs=1)
    assert [trial["options"] for trial in tuned["tried"]["tent"]] == grid["tent"]
    assert tuned["best"]["tent"] in tuned["tried"]["tent"]
    assert tuned["best"]["tent"]["error"] == min(trial["error"] for trial in tuned["tried"]["tent"])


# ---- the report ------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page would load, its text, and whether its tags match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text: list[str] = []
        self.pictures = 0
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data")]
        self.pictures += tag == "img"
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_report_needs_nothing_but_itself(demo: Demo) -> None:
    text = report.html(demo)
    page = Page(text)
    assert page.open == []
    assert page.loads and all(value.startswith("data:image/png;base64,") for value in page.loads)
    without_pictures = re.sub(r"data:image/png;base64,[\w+/=]+", "", text)
    assert not re.search(r"https?:|//|@import|url\(|<script|<link", without_pictures)


def test_the_report_shows_every_part(demo: Demo) -> None:
    text = report.html(demo)
    page = Page(text)
    output = " ".join(page.text)
    for line in demo.lines:
        assert line.name in output and report.error_text(line) in output
    for title in (
        "Error over the stream",
        "Labels spent",
        "Labels by tenth",
        "What was asked",
        "Drift against entropy",
    ):
        assert title in output
    assert page.pictures == len(demo.queries("wise, paced")[0])
    assert text.count("<circle") == sum(len(run) for run in demo.queries("wise, paced"))
    assert "nan" not in text


def test_the_report_draws_in_both_themes(demo: Demo) -> None:
    text = report.html(demo)
    assert "prefers-color-scheme:dark" in text
    body = text.partition("</style>")[2]
    assert not re.search(r"(fill|stroke)[=:]\"?#", body), "colours belong to the theme"


def test_one_seed_makes_a_report_without_intervals(demo: Demo) -> None:
    alone = demos.compare([line.cards[0] for line in demo.lines], (0,), demo.places)
    assert alone.line("wise, paced").difference is None
    assert Page(report.html(alone)).open == []


def test_the_picture_is_one_whole_svg(demo: Demo) -> None:
    root = ElementTree.fromstring(report.picture(demo))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len([element for element in root.iter() if element.tag.endswith("polyline")]) == len(demo.lines)


def test_text_in_charts_is_escaped() -> None:
    chart = Chart(10, 10, Axis(0, 1, 0, 10), Axis(0, 1, 10, 0))
    chart.dot(0.5, 0.5, "right", "<b>&")
    chart.text(1, 1, "<i>")
    assert ElementTree.fromstring(chart.svg("a < b")).tag == "svg"


@pytest.mark.parametrize("high", [1e-3, 0.7, 1, 3, 9.99, 150, 12345])
def test_ticks_are_few_round_and_inside(high: float) -> None:
    places = ticks(high)
    assert 2 <= len(places) <= 7
    assert places[0] == 0 and places[-1] <= high * (1 + 1e-6)


def test_json_holds_the_table(demo: Demo) -> None:
    facts: dict[str, Any] = json.loads(json.dumps(demo.to_dict()))
    assert [row["name"] for row in facts["rows"]] == list(demos.ROWS)
    assert facts["pictures"] == 15 * 16


# ---- the network -----------------------------------------------------------------------------------------------------


def test_the_network_is_trained_once_and_then_kept(cache: Path) -> None:
    steps: list[Any] = []
    assert digits_model(report=steps.append).weights_hash == digits_model().weights_hash
    assert not steps


def test_the_network_is_good_on_clean_digits(cache: Path) -> None:
    card = json.loads((cache / "digits.json").read_text())
    assert card["errors"]["digits held out"] < 0.03
    assert card["recipe"]["epochs"] == RECIPES["digits"].epochs


def test_a_broken_or_foreign_network_in_the_cache_is_made_again(cache: Path, tmp_path: Path) -> None:
    import dataclasses

    short = dataclasses.replace(RECIPES["digits"], epochs=1)
    first = digits_model(tmp_path, recipe=short)
    (tmp_path / "digits.safetensors").write_bytes(b"half")
    assert digits_model(tmp_path, recipe=short).weights_hash == first.weights_hash
    other = digits_model(tmp_path, recipe=dataclasses.replace(short, rate=0.05))
    assert other.weights_hash != first.weights_hash
    assert isinstance(other, models.SourceModel) and other.name == "digits"


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WISE_ATTA_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("WISE_ATTA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "wise-atta"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "wise-atta"


# ---- interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_ctrl_c_ends_the_demo_and_its_workers(cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "wise_atta.cli", "demo", "--seeds", "50", "--jobs", "2", "--out", str(tmp_path)]
    # A group of its own, as a terminal would give it, in which nothing ignores the interrupt.
    child = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "seed 0" in line:
            break
    os.killpg(child.pid, signal.SIGINT)
    rest = child.stderr.read()
    assert child.wait(timeout=30) == 130
    assert "seed 49" not in rest and "Traceback" not in rest
