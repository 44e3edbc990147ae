"""Is the batch found at which two runs part, and what they rest on, and are equal runs called equal?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.made import made

from wise_atta import cli, errors
from wise_atta.bench import runs
from wise_atta.bench.compare import compare
from wise_atta.bench.record import read_json, read_parquet, write_json, write_parquet
from wise_atta.bench.runs import Run

WRONG = np.zeros((6, 4), dtype=bool)
DOMAINS = ["fog"] * 3 + ["snow"] * 3


def plain(folder: Path, **fields: Any) -> Run:
    return made(folder, WRONG, domains=DOMAINS, **fields)


def with_rows(folder: Path, batch: int, **changes: Any) -> Run:
    """The run in this folder with other numbers from a batch on."""
    rows = read_parquet(folder / "steps.parquet")
    rows = [row | changes if row["batch"] >= batch else row for row in rows]
    write_parquet(folder / "steps.parquet", rows)
    return runs.read(folder)


def test_equal_runs_are_called_identical(tmp_path: Path) -> None:
    comparison = compare(plain(tmp_path / "a"), plain(tmp_path / "b"))
    assert comparison.identical and comparison.first is None and not comparison.partings
    assert comparison.verdict() == "The runs are identical: all 6 batches, to the last bit, and rest on the same"


def test_equal_numbers_under_other_settings_are_identical_and_say_which(tmp_path: Path) -> None:
    comparison = compare(plain(tmp_path / "a", seed=0, tag="x"), plain(tmp_path / "b", seed=1, tag="y"))
    assert comparison.identical and [(f.name, f.a, f.b) for f in comparison.config] == [("seed", 0, 1)]
    assert comparison.verdict().endswith("although their settings differ")


def test_the_first_batch_and_stage_that_differ_are_found(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    plain(tmp_path / "b")
    with_rows(tmp_path / "b", 5, utility=0.75)
    comparison = compare(runs.read(tmp_path / "a"), with_rows(tmp_path / "b", 4, logits=1.5))
    assert comparison.first is not None and not comparison.identical
    assert (comparison.first.stage, comparison.first.batch, comparison.first.domain) == ("logits", 4, "snow")
    assert (comparison.first.a, comparison.first.b) == (1.0, 1.5)
    assert {parting.stage: parting.batch for parting in comparison.partings} == {"logits": 4, "utility": 5}
    assert comparison.verdict() == "The runs part at batch 4 (snow): logits"


def test_rounding_is_told_from_parting(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    plain(tmp_path / "b")
    with_rows(tmp_path / "b", 2, logits=1.0 + 3e-7)
    a, b = runs.read(tmp_path / "a"), with_rows(tmp_path / "b", 5, logits=1.0 + 3e-3)
    (parting,) = compare(a, b).partings
    assert (parting.trace, parting.batch) == (2, 5)
    assert parting.size == pytest.approx(3e-7)
    assert compare(a, b, tolerance=0).partings[0].batch == 2
    wide = compare(a, b, tolerance=0.1)
    assert wide.first is None and not wide.identical
    assert "differ from batch 2 on, but never by more than 0.1" in wide.verdict()


def test_nan_is_equal_to_itself_and_none_to_none(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    plain(tmp_path / "b")
    a, b = (with_rows(tmp_path / name, 1, utility=math.nan, threshold=None) for name in "ab")
    assert compare(a, b).identical
    with_rows(tmp_path / "b", 3, threshold=0.5)
    comparison = compare(a, runs.read(tmp_path / "b"))
    assert comparison.first is not None and (comparison.first.stage, comparison.first.batch, comparison.first.a) == (
        "decision",
        3,
        None,
    )


def test_a_question_more_is_a_decision(tmp_path: Path) -> None:
    a = plain(tmp_path / "a", picked={1: [2]}, ratio=0.5)
    b = plain(tmp_path / "b", picked={1: [2], 3: [0]}, ratio=0.5)
    comparison = compare(a, b)
    assert comparison.first is not None and (
        comparison.first.stage,
        comparison.first.batch,
        comparison.first.column,
    ) == (
        "decision",
        4,
        "asked",
    )
    other = compare(a, plain(tmp_path / "c", picked={1: [3]}, ratio=0.5))
    assert other.first is not None and (other.first.column, other.first.a, other.first.b) == ("picked", [2], [3])


def test_the_gap_is_followed_domain_by_domain(tmp_path: Path) -> None:
    wrong = WRONG.copy()
    wrong[1, :2] = wrong[4, 0] = True
    better = WRONG.copy()
    better[4, 1] = True
    comparison = compare(made(tmp_path / "a", wrong, domains=DOMAINS), made(tmp_path / "b", better, domains=DOMAINS))
    assert [(one.domain, one.first, one.last, one.ahead) for one in comparison.stretches] == [
        ("fog", 1, 3, -2),
        ("snow", 4, 6, -2),
    ]
    assert [one.error_a for one in comparison.stretches] == pytest.approx([100 * 2 / 12, 100 / 12])
    assert (comparison.only_a, comparison.only_b) == (3, 1)


def test_other_data_weights_and_versions_are_named(tmp_path: Path) -> None:
    a = plain(tmp_path / "a")
    plain(tmp_path / "b", severity=3, weights="others", pictures=np.arange(24)[::-1])
    card = read_json(tmp_path / "b" / "card.json")
    card["provenance"]["versions"]["torch"] = "3"
    card["provenance"]["device"] = "H200"
    write_json(tmp_path / "b" / "card.json", card)
    comparison = compare(a, runs.read(tmp_path / "b"))
    assert [field.name for field in comparison.config] == ["severity"] == [field.name for field in comparison.data]
    assert [(field.name, field.b) for field in comparison.weights] == [("weights_hash", "others")]
    assert [field.name for field in comparison.place] == ["versions.torch", "device"]
    assert comparison.first is not None and (comparison.first.stage, comparison.first.batch) == ("data", 1)
    assert comparison.only_a is None, "mistakes on different pictures are not compared one by one"


def test_another_teacher_and_other_source_data_are_named(tmp_path: Path) -> None:
    for name in ("a", "b", "early"):
        plain(tmp_path / name)
        card = read_json(tmp_path / name / "card.json")
        if name != "early":
            card["provenance"] |= {"teacher": {"weights_hash": name}, "source_data": {"pixels": name}}
        write_json(tmp_path / name / "card.json", card)
    a, b, early = (runs.read(tmp_path / name) for name in ("a", "b", "early"))
    comparison = compare(a, b)
    assert [(field.name, field.b) for field in comparison.weights] == [("teacher.weights_hash", "b")]
    assert [(field.name, field.b) for field in comparison.data] == [("source_data.pixels", "b")]
    assert not comparison.place and "although their data and their weights differ" in comparison.verdict()
    silent = compare(a, early)
    assert not silent.weights and not silent.data and not silent.place


def test_runs_of_different_length_are_compared_as_far_as_both_go(tmp_path: Path) -> None:
    comparison = compare(plain(tmp_path / "a"), made(tmp_path / "b", WRONG[:4], domains=DOMAINS[:4]))
    assert not comparison.identical and any("A has 6 batches and B 4" in note for note in comparison.notes)


def test_cards_alone_are_compared_as_cards(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    made(tmp_path / "b", WRONG | (np.arange(4) == 0), domains=DOMAINS)
    for name in ("a", "b"):
        (tmp_path / name / "card.json").rename(tmp_path / f"{name}.json")
    a, b = (runs.read(tmp_path / f"{name}.json") for name in "ab")
    assert "it cannot be said where" in compare(a, b).verdict()
    assert "error" in {field.name for field in compare(a, b).results}
    assert "The results on both cards are the same" in compare(a, a).verdict()


def test_a_run_is_found_in_a_bundle_by_its_digest(tmp_path: Path) -> None:
    a, b = plain(tmp_path / "runs" / "a", seed=0), plain(tmp_path / "runs" / "b", seed=1)
    runs.bundle([tmp_path / "runs"], tmp_path / "runs.zip")
    for run in (a, b):
        bundled = runs.read(tmp_path / f"runs.zip#{run.card['digest']}")
        assert bundled.name == run.name and compare(run, bundled).identical
    with pytest.raises(errors.DataError, match="nothing in"):
        runs.read(tmp_path / "runs.zip#nothing")


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain(tmp_path / "a")
    made(tmp_path / "b", WRONG | (np.arange(4) == 0), domains=DOMAINS, seed=3)
    for flags in ([], ["--json"]):
        with pytest.raises(SystemExit) as left:
            cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), *flags])
        assert not left.value.code
        output = capsys.readouterr().out
        if flags:
            assert json.loads(output)["verdict"] == "The runs part at batch 1 (fog): predictions"
        else:
            assert "seed: 0 | 3" in output and "The runs part at batch 1 (fog): predictions" in output
            assert "in B alone: 6" in output


def test_a_tolerance_below_zero_is_refused(tmp_path: Path) -> None:
    run = plain(tmp_path / "a")
    with pytest.raises(errors.BadConfig, match="tolerance is -1"):
        compare(run, run, tolerance=-1)


def test_a_card_that_stands_alone_is_compared_with_a_run_as_a_card(tmp_path: Path) -> None:
    run = plain(tmp_path / "a")
    write_json(tmp_path / "alone.json", dict(run.card))
    same = compare(runs.read(tmp_path / "alone.json"), run)
    assert same.identical and same.verdict().startswith("The results on both cards are the same")
    write_json(tmp_path / "other.json", {**run.card, "results": {**run.results, "error": 50.0}})
    assert compare(runs.read(tmp_path / "other.json"), run).verdict().startswith("The results differ")
