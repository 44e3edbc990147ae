"""Is what nudged runs say of an error, and of a difference, what was drawn?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.made import made
from typer.testing import CliRunner

from wise_atta import cli
from wise_atta.bench.nudges import apart, combined, nudged, odd_ones, standard_error, summarise, table
from wise_atta.bench.record import write_cards


@pytest.fixture
def card(tmp_path: Path) -> dict[str, Any]:
    return dict(made(tmp_path / "one", np.eye(4, dtype=bool), method="tent", options={"lr": 0.05}).card)


def test_standard_errors_are_the_deviations_of_means_that_were_drawn() -> None:
    """Two cards with five and ten runs against one with three, drawn four thousand times."""
    draw = np.random.default_rng(0)
    ours = [(draw.normal(1, 1, 5).tolist(), draw.normal(3, 2, 10).tolist()) for _ in range(4000)]
    theirs = [[draw.normal(0, 1.5, 3).tolist()] for _ in range(4000)]
    differences = np.array([apart(one, other) for one, other in zip(ours, theirs, strict=True)])
    variance = (1 / 5 + 4 / 10) / 4
    assert np.mean([standard_error(one) ** 2 for one in ours]) == pytest.approx(variance, rel=0.03)
    assert np.mean(differences[:, 1] ** 2) == pytest.approx(variance + 1.5**2 / 3, rel=0.05)
    assert differences[:, 0].mean() == pytest.approx(2, abs=0.05)
    assert differences[:, 0].var() == pytest.approx(variance + 1.5**2 / 3, rel=0.05)


def test_one_nudged_run_is_as_good_as_none() -> None:
    assert nudged({"spread": {"errors": [10.0]}}) == nudged({"spread": {"low": 9.0, "high": 11.0}}) == nudged({}) == []
    assert nudged({"spread": summarise([10.0, 11.0])}) == [10.0, 11.0]


def test_variances_of_equal_freedom_have_it_together() -> None:
    """Equal ones have all degrees of freedom, and where one is much the largest, it has its own."""
    assert combined([(2.0, 9)] * 3) == (pytest.approx(np.sqrt(6)), pytest.approx(27))
    assert combined([(1e-9, 9), (4.0, 2)]) == (pytest.approx(2), pytest.approx(2))


def test_what_of_an_error_is_chance_is_shown_over_seeds(card: dict[str, Any], tmp_path: Path) -> None:
    def seeded(seed: int, error: float, nudged: list[float]) -> dict[str, Any]:
        fields = {"digest": f"{seed:012}", "experiment": card["experiment"] | {"seed": seed}}
        return {**card, **fields, "results": card["results"] | {"error": error}, "spread": summarise(nudged)}

    (tmp_path / "all").mkdir()
    write_cards(tmp_path / "all" / "cards.json", [seeded(1, 10.0, [8.0, 10.0]), seeded(2, 12.0, [10.0, 14.0])])
    shown = CliRunner().invoke(cli.app, ["spread", str(tmp_path / "all"), "--show"])
    # Means of 9 and 12; variances of 2 and 8, so a deviation of √5.
    assert shown.exit_code == 0 and shown.stdout.splitlines()[2:4] == ["| tent | 2 | 11.00 | 10.50 | 2.24 |", ""]


def test_errors_beyond_all_their_nudged_runs_are_counted_beside_what_chance_would_give() -> None:
    """Of runs drawn alike four thousand times, from a normal distribution and from few values, as small errors are."""
    draw = np.random.default_rng(0)
    for draws, most in ((draw.normal(size=(4000, 11)), 2 / 11), (draw.integers(7, size=(4000, 11)), 0.1)):
        drawn = [{"results": {"error": own}, "spread": {"errors": ten}} for own, *ten in draws.tolist()]
        results = re.findall(r"(\d+)(?= of| would)", odd_ones([*drawn, *drawn, {"results": {"error": 1.0}}]))
        odd, expected = (int(number) for number in results)
        assert 0 < expected <= round(4000 * most) and abs(odd - expected) < 3 * np.sqrt(expected)
    tie = [{"results": {"error": 1.0}, "spread": {"errors": [1.0, 1.0]}}]
    assert odd_ones(tie) == "0 of 1 errors lie below or above all their nudged runs; 0 would by chance."


def test_experiments_of_one_name_are_told_apart_by_what_differs(card: dict[str, Any]) -> None:
    def other(digest: str, **fields: Any) -> dict[str, Any]:
        whole = card["experiment"] | fields
        return {**card, "digest": digest, "experiment": whole, "spread": summarise([10.0, 11.0])}

    kinds = [other("a"), other("b", delay=2), other("c", tag="mine", delay=3), other("d", delay=2, options={})]
    lines = table([*kinds, kinds[0]]).splitlines()[2:]
    assert [line.split("|")[1:3] for line in lines] == [
        [" tent, delay=0, options.lr=0.05 ", " 1 "],
        [" tent, delay=2, options.lr=0.05 ", " 1 "],
        [" mine ", " 1 "],
        [" tent, delay=2 ", " 1 "],
    ]
