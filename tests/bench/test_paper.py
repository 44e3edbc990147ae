"""Does the paper, as kept here, say what the paper says, and can each of its tables and figures be run and shown?"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.made import with_head
from needs import missing
from typer.testing import CliRunner

from wise_atta import errors
from wise_atta.bench import runs as bundles
from wise_atta.bench.experiment import read_cards
from wise_atta.bench.nudges import summarise
from wise_atta.bench.paper import ITEMS, draw, experiments, item, places, tables
from wise_atta.bench.paper.cli import app
from wise_atta.bench.paper.gather import Gathered, Measured, Run, gather, read
from wise_atta.bench.paper.items import NETWORKS, STAGES
from wise_atta.bench.paper.publish import facts
from wise_atta.bench.record import write_cards
from wise_atta.bench.rivals import SETTINGS
from wise_atta.data import models
from wise_atta.model import Classifier

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "paper"
TINY = {"limit": 32, "device": "cpu", "threads": 1}


# ---- against the paper itself ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tex(wise_atta_data: Path) -> str:
    file = wise_atta_data.parent / "paper.tex"
    if file.exists():
        return file.read_text(encoding="utf-8")
    missing(f"needs the paper's source: put paper.tex beside {wise_atta_data}")


def tables_of(tex: str) -> dict[str, list[list[float]]]:
    """The numbers of every table, row by row, without signed differences."""
    by_label = {}
    for body in re.findall(r"\\begin\{table\*?\}(.*?)\\end\{table\*?\}", tex, re.S):
        label = re.search(r"\\label\{(tab:[^}]*)\}", body)
        assert label is not None
        plain = re.sub(r"\\cellcolor\{[^}]*\}", "", body)
        for _ in range(2):  # \gcell{\textbf{53.3}}
            plain = re.sub(r"\\(?:gcell|textbf)\{([^{}]*)\}", r"\1", plain)
        lines = [[cell.strip() for cell in line.split("&")] for line in plain.split(r"\\")]
        numbers = [[float(cell) for cell in cells if re.fullmatch(r"\d+\.\d+", cell)] for cells in lines]
        by_label[label[1]] = [row for row in numbers if row]
    return by_label


def test_every_table_and_figure_of_the_paper_is_listed_and_nothing_else(tex: str) -> None:
    in_paper = re.findall(r"\\label\{((?:tab|fig):[^}]*)\}", tex)
    here = [label for one in ITEMS.values() for label in (one.label, *one.parts)]
    assert sorted(here) == sorted(in_paper)


def test_every_number_of_every_table_is_the_papers(tex: str) -> None:
    printed = tables_of(tex)
    for one in ITEMS.values():
        if one.kind != "table":
            continue
        ours = [list(row.values()) for block in one.blocks for row in block.numbers.values()]
        if one.name == "delay":  # its lines are ours in threes, so the order within a line is another
            flat = Counter(number for row in ours for number in row)
            assert flat == Counter(number for row in printed[one.label] for number in row)
            assert one.number("WISE-ATTA, delay 200", "k-vit") == 93.0
            assert one.number("EATTA, delay 50", "r-vit") == 46.5
        else:
            assert ours == printed[one.label], one.name


def test_numbers_that_only_the_text_gives_stand_in_it(tex: str) -> None:
    figure = item("label-ratio")
    numbers = [n for block in figure.blocks for row in block.numbers.values() for n in row.values()]
    assert len(numbers) == 4
    quoted = [quote.value for one in ITEMS.values() for quote in one.quotes if quote.value not in (None, 35.0)]
    for number in [*numbers, *(abs(value) for value in quoted if value is not None)]:
        assert re.search(rf"(?<!\d){re.escape(f'{number:.2f}')}|(?<!\d){number:.1f}(?!\d)", tex), number
    assert "$58.0$ to $93.0$" in tex  # whose difference is the remaining quote


# ---- definitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [None, *SETTINGS])
def test_every_table_and_figure_has_runs_each_once(on: str | None) -> None:
    for name in ITEMS:
        runs = experiments(name, on)
        assert runs
        assert len({run.digest for run in runs}) == len(runs)


def test_rows_quotes_and_references_name_rows_that_exist() -> None:
    for one in ITEMS.values():
        named = {one.reference, *(q.row for q in one.quotes), *(q.minus for q in one.quotes)}
        named |= {row for block in one.blocks for row in block.numbers}
        assert named <= set(one.rows), one.name


def test_tables_share_the_runs_that_they_have_in_common() -> None:
    def digests(name: str, *only: str) -> set[str]:
        return {run.digest for run in experiments(name, "cifar10", only=only)}

    paced = digests("batch-selection", "WISE-ATTA, budget-paced")
    assert len(paced) == 3
    assert paced == digests("delay", "WISE-ATTA, delay 0") == digests("utility", "Count")
    assert paced == digests("sensitivity", "W 250") == digests("batch-size", "64, WISE-ATTA")
    assert digests("skipped-updates", "*with update") <= digests("label-ratio", "* 0.2")
    assert digests("queries", "WISE-ATTA") <= digests("imagenet-c") & digests("layers")


def test_tuned_options_reach_the_method_that_they_are_for() -> None:
    runs = experiments("batch-selection", "pacs", seeds=[0], tuned={"wise": {"lr": 0.004}, "eatta": {"lr": 0.001}})
    assert {(run.method, run.options["lr"]) for run in runs} == {("wise", 0.004), ("eatta", 0.001)}


def test_the_papers_data_have_the_papers_learning_rates_and_at_hand_the_methods_own() -> None:
    assert {run.options["preset"] for run in experiments("delay")} == {"imagenet-r", "imagenet-k"}
    assert not any("lr" in run.options or "preset" in run.options for run in experiments("delay", "imagenet-sample"))


def test_a_protocol_and_rows_can_be_chosen() -> None:
    runs = experiments("imagenet-c", "cifar10-c", protocols=["ftta"], only=["TENT", "S*"])
    assert {run.protocol for run in runs} == {"ftta"}
    assert {run.method for run in runs} == {"tent", "sar", "simatta"}
    with pytest.raises(errors.UnknownName, match="Did you mean 'TENT'"):
        experiments("imagenet-c", "digits", only=["TENTT"])
    with pytest.raises(errors.UnknownName, match="Did you mean 'cifar10'"):
        experiments("imagenet-c", "cifar")


def test_a_seed_can_have_its_own_stream_and_then_all_rows_have_all_seeds() -> None:
    runs = experiments("imagenet-c", "digits", only=["TENT"], protocols=["ctta"], own_streams=True)
    assert [(run.seed, run.stream.get("seed", 0)) for run in runs] == [(0, 0), (41, 41), (58, 58)]


@pytest.mark.parametrize(
    ("network", "stages"),
    [
        ("wise_atta/digits_cnn@random", STAGES["digits"]),
        ("wise_atta/resnet18_w32@random", STAGES["cifar10"]),
        ("timm/tf_efficientnet_lite0@random", STAGES["imagenet-sample"]),
        ("torchvision/resnet50@random", NETWORKS["rn50"].stages),
        ("torchvision/vit_b_16@random", NETWORKS["vit"].stages),
    ],
)
def test_the_stages_of_a_network_are_four_parts_of_it(network: str, stages: tuple[Any, ...]) -> None:
    classifier = Classifier(models.load(network).module, adapt="head")
    chosen = [set(classifier.select(stage)) for stage in stages]
    assert len(chosen) == 4
    assert all(chosen)
    assert len(set.union(*chosen)) == sum(map(len, chosen))
    assert not set.union(*chosen) & set(classifier.select("head"))


# ---- runs, shown -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of three tables on 15 batches of digits, two seeds."""
    out = tmp_path_factory.mktemp("paper")
    rows = [["delay", "WISE-ATTA, delay 0", "*ATTA, delay 50"], ["queries", "*"], ["label-use", "*"]]
    for name, *only in rows:
        flags = [word for pattern in only for word in ("--only", pattern)]
        result = invoke("run", name, "--on", "digits", "--out", out, "--seeds", "0,41", *flags, "-q", *tiny_flags())
        assert result.exit_code == 0, result.output
    return out


def tiny_flags() -> list[str]:
    return [word for name, value in TINY.items() for word in (f"--{name}", str(value))]


def invoke(*words: Any) -> Any:
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(app, [str(word) for word in words])
    finally:
        torch.set_num_threads(threads)


def gathered(name: str, folder: Path) -> Gathered:
    return gather(item(name), read([folder]), "digits")


def test_rows_are_compared_on_the_same_number_of_labels(runs: Path) -> None:
    cells = gathered("label-use", runs).cells.values()
    assert {cell.row.name: set(cell.values(result="labels_spent").values()) for cell in cells} == {
        "uniform": {7.0},
        "budget-paced": {7.0},
        "budget-paced, never ahead": {7.0},
    }


def test_show_prints_paper_ours_and_difference_and_what_was_not_run(runs: Path) -> None:
    result = invoke("show", "tab:label_delay", runs)
    assert result.exit_code == 0, result.output
    lines = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in result.output.splitlines()}
    cells_of_rows = gathered("delay", runs)
    ours = cells_of_rows.measured("WISE-ATTA, delay 50", "digits ctta")
    assert ours is not None
    paper = (52.9 + 47.2 + 65.3 + 67.9) / 4
    row = lines["WISE-ATTA, delay 50"]
    assert row[1:4] == [f"{paper:.1f}", ours.text(2), f"{ours.mean - paper:+.1f}"]
    assert row[-1] == "2 of 3"
    assert lines["WISE-ATTA, delay 200"][2] == tables.NOT_RUN
    assert "wise-atta paper run delay --on digits --limit 32 --device cpu --threads 1" in result.output


def test_rows_with_nudged_runs_say_and_draw_what_is_chance(runs: Path, tmp_path: Path) -> None:
    assert "nudged" not in tables.text(gathered("delay", runs))
    assert invoke("publish", "delay", runs, "--out", tmp_path).exit_code == 0
    cards = read_cards(tmp_path / "digits" / "delay" / "cards.json")

    def put(row: str, *spreads: list[float] | None) -> None:
        for run, nudged in zip(gathered("delay", runs).cells[row, "digits ctta"].runs, spreads, strict=True):
            (card,) = (card for card in cards if card["digest"] == run.card["digest"])
            card |= {} if nudged is None else {"spread": summarise(nudged)}

    put("WISE-ATTA, delay 0", [8.0, 10.0], [10.0, 14.0])
    put("EATTA, delay 50", [11.0, 12.0], None)
    write_cards(tmp_path / "digits" / "delay" / "cards.json", cards)
    lines = tables.text(gathered("delay", tmp_path)).splitlines()
    rows = {cells[1]: dict(zip(heads, cells, strict=True)) for heads, cells in _table(lines)}
    # Means of 9 and 12; variances of 2 and 8, so a deviation of √5.
    assert rows["WISE-ATTA, delay 0"]["nudged"] == "10.50 ± 2.24"
    assert rows["WISE-ATTA, delay 50"]["nudged"] == tables.NOTHING
    # Variances of the means: 1/2 over 2 of one run's two, (2/2 + 8/2) over 4 of the mean of two such means.
    against = {row: cells["nudged, against WISE-ATTA, delay 0"] for row, cells in rows.items()}
    assert against["EATTA, delay 50"] == f"+1.00 ± {np.sqrt(0.25 + 1.25):.2f}"
    assert against["WISE-ATTA, delay 0"] == against["WISE-ATTA, delay 50"] == tables.NOTHING
    figure = draw.figure(gathered("delay", tmp_path))
    assert figure is not None
    (panel,) = (panel for panel in figure.panels if "nudged" in panel.title)
    assert panel.title == "digits ctta, nudged runs of seed 0, 41"
    lines = {line.name: (list(line.xs), list(line.ys), list(line.spread)) for line in panel.series}
    assert lines["WISE-ATTA"] == ([0.0], [10.5], [pytest.approx(np.sqrt(1.25))])
    assert lines["EATTA"] == ([50.0], [11.5], [0.5])


def _table(lines: list[str]) -> list[tuple[list[str], list[str]]]:
    """Heading and cells of every row of the first table."""
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")]
    return [(rows[0], cells) for cells in rows[2:] if len(cells) == len(rows[0])]


def test_the_command_for_what_is_missing_names_the_missing_rows_alone(runs: Path) -> None:
    cells_of_rows = gathered("queries", runs)
    (command,) = tables.missing_commands(cells_of_rows)
    assert command == "wise-atta paper run queries --on digits --limit 32 --device cpu --threads 1"
    cells = {key: cell for key, cell in cells_of_rows.cells.items() if key[0] == "EATTA"}
    some = Gathered(
        cells_of_rows.item,
        "digits",
        {**cells_of_rows.cells, **{k: type(c)(c.row, c.spot, ()) for k, c in cells.items()}},
    )
    whole = {key: type(c)(c.row, c.spot, (*c.runs, *c.runs)) for key, c in some.cells.items()}
    (command,) = tables.missing_commands(Gathered(cells_of_rows.item, "digits", whole))
    assert command == "wise-atta paper run queries --on digits --only EATTA --limit 32 --device cpu --threads 1"


def test_what_is_published_shows_the_same_without_the_runs(runs: Path, tmp_path: Path) -> None:
    for name, series in (("delay", False), ("label-use", True), ("queries", True)):
        result = invoke("publish", name, runs, "--out", tmp_path)
        assert result.exit_code == 0, result.output
        folder = tmp_path / "digits" / name
        drawn = [f"{name}.{kind}" for kind in ("png", "svg", "html")]
        kept = ["cards.json", "table.md", *drawn, *(["series.json"] if series else [])]
        assert sorted(path.name for path in folder.iterdir()) == sorted(kept)
        assert tables.text(gathered(name, folder)) == tables.text(gathered(name, runs))
        assert (folder / "table.md").read_text(encoding="utf-8").startswith(tables.text(gathered(name, runs)))
        page = (folder / f"{name}.html").read_text(encoding="utf-8")
        assert "http" not in page
        assert "<title>" in page
    # Drawn again from what was published, a figure is the same to the byte.
    assert invoke("show", "delay", tmp_path / "digits" / "delay", "--out", tmp_path / "again").exit_code == 0
    for kind in ("svg", "html", "png"):
        assert (tmp_path / "again" / f"delay.{kind}").read_bytes() == (
            tmp_path / "digits" / "delay" / f"delay.{kind}"
        ).read_bytes()


def test_queries_have_entropy_and_drift_for_every_selector(runs: Path) -> None:
    cells_of_rows = gathered("queries", runs)
    for cell in cells_of_rows.cells.values():
        for run in cell.runs:
            assert run.queries is not None
            assert len(run.queries) == run.card["results"]["labels_spent"]
    entropy = {
        cell.row.name: np.mean([query[0] for run in cell.runs for query in run.queries or []])
        for cell in cells_of_rows.cells.values()
    }
    assert max(entropy, key=lambda name: entropy[name]) == "Max-Entropy"


def test_a_bundle_is_read_as_the_folders_are(runs: Path, tmp_path: Path) -> None:
    bundles.bundle([runs], tmp_path / "runs.zip")
    for name in ("label-use", "delay"):
        assert tables.text(gathered(name, tmp_path / "runs.zip")) == tables.text(gathered(name, runs))


def test_runs_of_a_row_that_differ_in_more_than_the_seed_are_refused_unless_told_apart(
    runs: Path, tmp_path: Path
) -> None:
    tuned = tmp_path / "tuned.json"
    tuned.write_text(json.dumps({"wise": {"best": {"lr": 0.02}}}))
    flags = ("--on", "digits", "--seeds", "0", "--only", "uniform", "--tuned", tuned, "-q", *tiny_flags())
    assert invoke("run", "label-use", "--out", tmp_path / "other", *flags).exit_code == 0
    result = invoke("show", "label-use", runs, tmp_path / "other")
    assert isinstance(result.exception, errors.DataError)
    assert "lr" in str(result.exception)
    assert invoke("show", "label-use", tmp_path / "other").exit_code == 0
    told = invoke("show", "label-use", runs, tmp_path / "other", "--tuned", tuned)
    assert told.exit_code == 0
    assert "wise 0.02" in told.output


def changed(run: Run, **fields: Any) -> Run:
    """A run with other fields; `device` is where it was made, and what `options` and `stream` hold is added."""
    card = copy.deepcopy(dict(run.card))
    if "device" in fields:
        card["provenance"]["device"] = fields.pop("device")
    for name, value in fields.items():
        old = card["experiment"][name]
        card["experiment"][name] = {**old, **value} if isinstance(old, dict) else value
    return replace(run, card=card)


def uniform(run: Run) -> bool:
    return run.card["experiment"]["policy"] == "uniform"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": {"limit": 16}}, "digits, CTTA has runs that differ in stream: .*16.*32"),
        ({"device": "another"}, "digits, CTTA has runs that differ in made on"),
        ({"stream": {"seed": 3}}, "runs of seed 0 over the streams with seeds"),
    ],
)
def test_rows_that_were_run_over_different_streams_or_on_different_devices_are_refused(
    runs: Path, fields: dict[str, Any], message: str
) -> None:
    read_runs = read([runs])
    with pytest.raises(errors.DataError, match=message):
        gather(item("label-use"), [changed(run, **fields) if uniform(run) else run for run in read_runs], "digits")
    # All alike, they are another stream or device, and as good.
    first = [changed(run, **fields) for run in read_runs if run.card["experiment"]["seed"] == 0]
    assert gather(item("label-use"), first, "digits").runs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"objective": "roid"}}, "objective is roid, not entropy"),
        ({"options": {"supervise_norm": False}}, "supervise_norm is False, not True"),
        ({"guard": True}, "guard is True, not False"),
        ({"fast": {"precision": "bf16"}}, "fast is {'precision': 'bf16'}, not {}"),
        ({"annotator": "teacher"}, "annotator is teacher, not oracle"),
        ({"teacher": "digits", "source_data": "a"}, "source_data is a, not None, teacher is digits, not None"),
    ],
)
def test_runs_that_are_not_those_of_a_row_are_left_out_and_said_to_be(
    runs: Path, fields: dict[str, Any], message: str
) -> None:
    odd = [changed(run, **fields) if uniform(run) else run for run in read([runs])]
    cells_of_rows = gather(item("label-use"), odd, "digits")
    assert (
        not cells_of_rows.cells["uniform", "digits ctta"].runs
        and cells_of_rows.cells["budget-paced", "digits ctta"].runs
    )
    assert f"2 of uniform at digits, CTTA whose {message}." in tables.text(cells_of_rows)


def test_what_was_tuned_is_named_and_a_default_that_was_said_changes_nothing(runs: Path) -> None:
    assert "Other options" not in tables.text(gathered("label-use", runs))
    options = {"options": {"supervise_norm": True, "lr": 2.5e-4}}
    cells_of_rows = gather(item("label-use"), [changed(run, **options) for run in read([runs])], "digits")
    assert cells_of_rows.cells["uniform", "digits ctta"].runs
    tuned = gather(item("label-use"), [changed(run, options={"lambda_sup": 0.5}) for run in read([runs])], "digits")
    assert "Other options: wise lambda_sup 0.5." in tables.text(tuned)


def test_tuned_options_choose_also_where_there_is_one_kind_of_run(runs: Path) -> None:
    cells_of_rows = gather(item("label-use"), read([runs]), "digits", tuned={"wise": {"lr": 0.02}})
    assert not cells_of_rows.runs
    assert "2 of uniform at digits, CTTA whose lr is 0.00025, not 0.02" in tables.text(cells_of_rows)
    assert len(facts(cells_of_rows)["left_out"]) == 3


def test_two_outcomes_of_one_experiment_are_refused(runs: Path, tmp_path: Path) -> None:
    cards = [dict(run.card) for run in read([runs])]
    write_cards(tmp_path / "cards.json", cards)
    assert len(read([runs, tmp_path])) == len(cards), "the same twice is one"
    cards[0] = {**cards[0], "results": {**cards[0]["results"], "error": 1.0}}
    write_cards(tmp_path / "cards.json", cards)
    with pytest.raises(errors.DataError, match=r"the same experiment, .*, with different outcomes"):
        read([runs, tmp_path])


PUBLISHED = RESULTS / "cifar10" / "imagenet-c"


def test_where_seeds_have_their_own_streams_all_rows_need_all_seeds() -> None:
    """The published runs, as if each seed had its own stream: of what draws nothing there is the first seed alone."""
    shared = gather(item("imagenet-c"), read([PUBLISHED]), "cifar10", protocols=["ctta"])
    own = gather(
        item("imagenet-c"),
        [changed(run, stream={"seed": run.card["experiment"]["seed"]}) for run in read([PUBLISHED])],
        "cifar10",
        protocols=["ctta"],
    )
    gains = []
    for cells_of_rows, wanted in ((shared, 1), (own, 3)):
        assert cells_of_rows.cells["TENT", "cifar10 ctta"].wanted == wanted
        tent, roid = (cells_of_rows.measured(row, "cifar10 ctta") for row in ("TENT", "ROID"))
        assert tent is not None and roid is not None
        gains.append(len(roid.minus(tent).by_seed))
    assert gains == [3, 1], "on another stream it was not run"
    (command,) = tables.missing_commands(own)
    assert "--only TENT" in command and "--own-streams" in command


def test_the_command_for_what_is_missing_keeps_the_length_of_each_protocol_s_stream() -> None:
    def shorter(run: Run) -> Run:
        return changed(run, stream={"limit": {"ctta": 64, "ftta": 32}[run.card["experiment"]["protocol"]]})

    some = [shorter(run) for run in read([PUBLISHED]) if run.card["experiment"]["method"] != "tent"]
    commands = tables.missing_commands(gather(item("imagenet-c"), some, "cifar10"))
    limits = {("ctta" in command, re.findall(r"--limit (\d+)", command)[0]) for command in commands}
    assert limits == {(True, "64"), (False, "32")}


def test_labels_that_came_after_the_end_are_told_from_those_that_were_learned(runs: Path) -> None:
    output = invoke("show", "delay", runs, "--on", "digits").output
    assert re.search(r"^\| WISE-ATTA, delay 0 .*\| 7 \| 2 of 3 \|$", output, re.M)
    late = re.search(r"^\| WISE-ATTA, delay 50 .*\| 7, 0 in time \| 2 of 3 \|$", output, re.M)
    assert late, "15 batches are over before"


def test_a_card_that_cannot_be_read_does_not_hide_the_others(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    (folder / "broken").mkdir()
    (folder / "broken" / "card.json").write_text("{")
    result = invoke("show", "label-use", folder, "--on", "digits")
    assert result.exit_code == 3 and "2 of 3" in result.stdout and "broken/card.json" in result.stderr


@pytest.mark.parametrize("kind", ["bundle", "list"])
def test_nor_does_one_in_a_bundle_or_a_list_of_cards(runs: Path, tmp_path: Path, kind: str) -> None:
    if kind == "bundle":
        file = tmp_path / "runs.zip"
        bundles.bundle([runs], file)
        with_head(file, lambda head: head["runs"].append({"name": "odd", "card": {"card_version": 99}, "stream": 0}))
    else:
        file = tmp_path / "cards.json"
        file.write_text(json.dumps([*read_cards(runs), {"card_version": 99}]))
    whole, shown = (invoke("show", "delay", place, "--on", "digits") for place in (runs, file))
    assert whole.exit_code == 0 and shown.exit_code == 3
    assert shown.stdout == whole.stdout and f"left out: {file}" in shown.stderr
    with pytest.raises(errors.DataError, match="not a run card"):
        read([file])


def test_a_dry_run_prints_the_runs_and_makes_none(runs: Path, tmp_path: Path) -> None:
    flags = ("--on", "digits", "--seeds", "0", "--dry-run", *tiny_flags())
    result = invoke("run", "label-use", "queries", "--out", tmp_path / "none", *flags)
    assert result.output.splitlines()[-1] == "6 runs"
    some = invoke("run", "label-use", "layers", "--only", "uniform", "--only", "stage *", *flags)
    assert some.output.splitlines()[-1] == "5 runs"
    assert not (tmp_path / "none").exists()
    done = invoke("run", "label-use", "--out", runs, *flags).output.splitlines()
    assert [line.split()[0] for line in done[:-1]] == ["done"] * 3


def test_list_names_all_of_them() -> None:
    result = invoke("list")
    assert result.exit_code == 0
    for one in ITEMS.values():
        assert f"{one.name} " in result.output
        assert one.label in result.output
    assert [row["name"] for row in json.loads(invoke("list", "--json").output)] == list(ITEMS)


# ---- what can be wrong -----------------------------------------------------------------------------------------------


def test_a_data_set_that_is_not_there_is_said_before_any_run_with_how_to_get_it(tmp_path: Path) -> None:
    result = invoke("run", "delay", "--data", tmp_path, "--out", tmp_path / "runs", "-q")
    assert isinstance(result.exception, errors.DataError)
    assert "wise-atta data fetch imagenet-r" in str(result.exception)
    assert not (tmp_path / "runs").exists()


def test_a_network_that_is_not_there_is_said_before_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("run", "delay", "--on", "pacs", "--out", tmp_path / "runs", "-q")
    assert isinstance(result.exception, errors.DataError) and "wise-atta train" in str(result.exception)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "dealy"), "Did you mean 'delay'"),
        (("run", "delay", "--on", "digits", "--seeds", "a"), "--seeds a"),
        (("run", "delay", "--on", "digits", "--protocol", "cta"), "Did you mean 'ctta'"),
        (("show", "delay", "nowhere"), "nowhere does not exist"),
    ],
)
def test_bad_words_are_answered_by_what_was_meant(words: tuple[str, ...], message: str) -> None:
    result = invoke(*words)
    assert isinstance(result.exception, errors.WiseAttaError)
    assert message in str(result.exception)


@pytest.mark.parametrize("content", ["[", "{}", "[1]", '[{"card_version": 99}]', '[{"experiment": {}}]'])
def test_broken_cards_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "cards.json").write_text(content)
    with pytest.raises(errors.DataError, match=r"cards\.json"):
        read([tmp_path])


def test_without_any_run_the_papers_numbers_are_shown_and_ours_are_not_run(tmp_path: Path) -> None:
    result = invoke("show", "utility", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.count(tables.NOT_RUN) == 6 * 4 + 1
    assert "| Count | 52.26 | not run |" in result.output
    assert "wise-atta paper run utility\n" in result.output


def test_differences_are_taken_seed_by_seed_and_what_draws_nothing_stands_for_all_seeds() -> None:
    one, two = Measured({0: 3.0, 41: 5.0, 58: 7.0}), Measured({0: 2.0, 41: 4.0, 58: 6.0})
    assert one.minus(two).by_seed == {0: 1.0, 41: 1.0, 58: 1.0}
    assert one.minus(Measured({0: 1.0}, drawn=False)).by_seed == {0: 2.0, 41: 4.0, 58: 6.0}
    assert Measured({0: 1.0}, drawn=False).minus(one).by_seed == {0: -2.0, 41: -4.0, 58: -6.0}


def test_a_method_run_with_one_seed_of_three_has_no_deviation() -> None:
    whole, partly = Measured({0: 3.0, 41: 5.0, 58: 7.0}), Measured({41: 1.0})
    assert partly.minus(whole).text(1, "+") == "-4.0", "against the same seed alone"
    assert partly.minus(Measured({0: 3.0, 58: 7.0})).text(1, "+") == "-4.0", "against the mean where none is shared"
    cells_of_rows = gather(item("imagenet-c"), read([RESULTS / "cifar10" / "imagenet-c"]), "cifar10")
    cotta, tent, eatta = (cells_of_rows.measured(row, "cifar10 ctta") for row in ("CoTTA", "TENT", "EATTA"))
    assert cotta is not None and tent is not None and eatta is not None
    assert cotta.minus(eatta).sd is None
    assert tent.minus(eatta).sd == pytest.approx(eatta.sd)


def test_queries_has_one_place() -> None:
    assert [spot.name for spot in places("queries")] == ["r-rn"]


def test_the_page_about_it_names_all_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "paper.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([a-z-]+)` \| `([^`]+)`", page, re.M)
    assert named == [(one.name, one.label) for one in ITEMS.values()]
