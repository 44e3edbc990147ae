"""Does the study of late labels run what it says, and count answers that never came?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wise_atta import errors
from wise_atta.bench import delay, rivals
from wise_atta.bench.rivals import Setting
from wise_atta.bench.sweep import Places, sweep

SMALL = Setting(
    {"data": "digits+c", "model": "wise_atta/digits_cnn@random", "batch": 8, "threads": 1, "device": "cpu"},
    tune_on="digits+extra",
    tune_stream={},
    source_data="digits-train",
    teacher="digits",
    options={"wise": {"ratio": 0.5, "statistics": "batch"}},
)
STREAM: dict[str, Any] = {"limit": 32, "domains": ["fog", "snow", "contrast"]}


def cells(table: str) -> dict[tuple[str, str], dict[str, str]]:
    """The lines of a table by variant and delay."""
    header, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {(line[0], line[1]): dict(zip(header, line, strict=True)) for line in lines}


def card(tag: str, late: int, seed: int, error: float, **questions: int) -> dict[str, Any]:
    counts = {"asked": 0, "shown": 0, "answered": 0, "learned": 0, "cant_tell": 0, "expired": 0, "stale": 0}
    return {
        "experiment": {"tag": tag, "delay": late, "seed": seed, "stream": {"seed": seed}},
        "results": {"error": error, "error_never_asked": error - 1, "questions": counts | questions},
    }


def test_each_variant_changes_one_thing_where_it_can_differ() -> None:
    runs = delay.experiments(rivals.setting("digits"), [0, 1], lr=1e-3)
    at = {tag: [run.delay for run in runs if run.tag == tag and run.seed == 1] for tag in delay.VARIANTS}
    assert at["no labels"] == [0] and at["plain"] == [0, 50, 100, 150, 200] and at["limit of 100 batches"] == [150, 200]
    assert all(delays == [50, 100, 150, 200] for delays in list(at.values())[2:] if delays != [150, 200])
    assert len({run.digest for run in runs}) == len(runs)
    (weighted,) = (run for run in runs if run.late_weight == 50 and run.delay == 100 and run.seed == 0)
    plain = next(run for run in runs if run.tag == "plain" and run.delay == 100)
    assert weighted.model_copy(update={"late_weight": None, "tag": "plain"}) == plain


def test_seeds_have_streams_of_their_own_where_that_is_wanted() -> None:
    shared, own = (
        delay.experiments(rivals.setting("digits"), [3, 4], lr=1e-3, delays=[0], stream={"limit": 9}, own_streams=way)
        for way in (False, True)
    )
    assert {str(run.stream) for run in shared} == {"{'limit': 9}"}
    assert [run.stream["seed"] for run in own] == [run.seed for run in own]


def test_a_variant_that_does_not_exist_is_named() -> None:
    with pytest.raises(errors.UnknownName, match="plane"):
        delay.experiments(SMALL, [0], lr=1e-3, variants=["plane"])


def test_differences_are_paired_by_seed_and_open_questions_never_came() -> None:
    cards = [
        *(card("no labels", 0, seed, error) for seed, error in ((1, 12.0), (0, 10.0))),
        *(card("plain", 0, seed, error, asked=9, answered=9, learned=9) for seed, error in ((0, 8.0), (1, 11.0))),
        *(card("plain", 50, seed, 20.0, asked=9, answered=6, learned=6) for seed in (0, 1)),
        *(card("limit of 100 batches", 50, seed, 13.0, asked=9, answered=6, stale=6) for seed in (0, 1)),
    ]
    rows = cells(delay.table(cards))
    assert rows["plain", "0"]["against no labels"] == "-1.50 ± 0.71"
    line = rows["limit of 100 batches", "50"]
    assert (line["error %"], line["never asked %"]) == ("13.00 ± 0.00", "12.00 ± 0.00")
    assert line["against plain, same delay"] == "-7.00 ± 0.00" and line["against delay 0"] == "+3.50 ± 2.12"
    assert [line[name] for name in ("asked", "learned", "too old", "never came")] == ["9", "0", "6", "3"]


def test_answers_after_the_end_never_come_unless_asked_early(tmp_path: Path) -> None:
    """Twelve batches and answers after seven: what is asked from the sixth on is never answered."""
    variants = ["no labels", "plain", "asked early", "asked early, weight 1/(1 + age/10)"]
    runs = delay.experiments(SMALL, [0], lr=1e-3, delays=[0, 7], variants=variants, stream=STREAM)
    cards = sweep(runs, Places(tmp_path))
    assert {card["results"]["batches"] for card in cards} == {12}
    rows = cells(delay.table(cards))
    late = {name: int(rows["plain", "7"][name]) for name in ("asked", "learned", "never came")}
    assert late["learned"] + late["never came"] == late["asked"] and late["learned"] <= 2 and late["never came"] > 0
    for variant in variants[2:]:
        early = rows[variant, "7"]
        assert (early["asked"], early["learned"], early["never came"]) == ("5", "5", "0")


def test_variants_that_an_option_makes_the_same_are_one_run_and_two_lines(tmp_path: Path) -> None:
    variants = ["plain", "head alone learns"]
    options = {"supervise_norm": False}
    runs = delay.experiments(
        SMALL, [0, 1], lr=1e-3, options=options, delays=[0, 2], variants=variants, stream=STREAM | {"limit": 8}
    )
    cards = sweep(runs, Places(tmp_path))
    assert [card["experiment"]["tag"] for card in cards] == [run.tag for run in runs]
    assert len(list(tmp_path.iterdir())) == len({run.digest for run in runs}) == 4
    rows = cells(delay.table(cards))
    assert rows["plain", "2"]["error %"] == rows["head alone learns", "2"]["error %"]
    assert rows["head alone learns", "2"]["against plain, same delay"] == "+0.00 ± 0.00"


def test_a_seed_that_one_of_two_lacks_is_not_compared() -> None:
    cards = [card("plain", 0, seed, error) for seed, error in ((0, 8.0), (1, 11.0), (2, 30.0))]
    cards += [card("plain", 50, seed, error) for seed, error in ((2, 32.0), (1, 14.0))]
    assert cells(delay.table(cards))["plain", "50"]["against delay 0"] == "+2.50 ± 0.71"
