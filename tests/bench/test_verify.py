"""Does a card hold where it was made, is it held to its spread elsewhere, and is a false one found out?"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from wise_atta import cli, errors
from wise_atta.bench import run as runs
from wise_atta.bench.experiment import CARD_VERSION, Experiment, read_cards, read_mapping
from wise_atta.bench.verify import add_spread, spread, verify

ONE = Experiment(
    data="digits+c",
    model="wise_atta/digits_cnn@random",
    method="tent",
    options={"lr": 0.05},
    batch=8,
    stream={"limit": 32, "domains": ["fog", "snow"]},
    threads=1,
)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    return add_spread(folder, runs.run(ONE, folder), runs=3)


def changed(card: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    """A card that says something else in one place."""
    other = copy.deepcopy(card)
    place = other
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return other


def test_a_card_holds_where_it_was_made(card: dict[str, Any]) -> None:
    verdict = verify(card)
    assert verdict.exact and verdict.holds and verdict.logits == 0
    assert "the same digits are due" in str(verdict) and str(verdict).endswith("holds")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("results", "error"), 12.5, "error is"),
        (("results", "labels_spent"), 3, "labels_spent is 0, not 3"),
        (("first_batch", "digest"), "0" * 16, "other bits"),
        (("provenance", "model", "weights_hash"), "0" * 64, "weights here are others"),
        (("provenance", "stream", "pixels"), "0" * 64, "pixels here are others"),
    ],
)
def test_a_card_that_says_something_else_is_found_out(
    card: dict[str, Any], path: tuple[str, ...], value: Any, words: str
) -> None:
    verdict = verify(changed(card, *path, value=value))
    assert not verdict.holds and words in str(verdict)


def test_elsewhere_a_card_is_held_to_logits_and_spread(card: dict[str, Any]) -> None:
    there = changed(card, "provenance", "versions", "torch", value="1.0")
    verdict = verify(there)
    assert not verdict.exact and verdict.holds and "torch 1.0 there" in str(verdict)
    # The result itself is not promised there, only that it lies within the spread.
    assert verify(changed(there, "results", "error", value=card["results"]["error"] + 1)).holds
    far = {**card["spread"], "low": 0.0, "high": 1.0}
    assert "outside the spread" in str(verify(changed(there, "spread", value=far)))
    logits = [[value + 1e-3 for value in row] for row in card["first_batch"]["logits"]]
    assert "further apart than 0.0001" in str(verify(changed(there, "first_batch", "logits", value=logits)))
    del there["spread"], there["first_batch"]
    said = str(verify(there))
    assert "no spread" in said and "no logits" in said


def test_a_card_of_a_device_that_is_not_here_is_run_on_what_there_is(card: dict[str, Any]) -> None:
    there = changed(card, "experiment", "device", value="xpu:7")
    there["provenance"]["device"] = "some GPU"
    verdict = verify(there)
    assert verdict.holds and "some GPU there, cpu here" in str(verdict)


def test_a_spread_is_that_of_nudged_runs(card: dict[str, Any]) -> None:
    found = card["spread"]
    assert len(found["errors"]) == 3 and found["low"] <= min(found["errors"]) <= max(found["errors"]) <= found["high"]
    assert spread(ONE, runs=3) == found, "the nudges are seeded"
    with pytest.raises(errors.BadConfig, match="two runs"):
        spread(ONE, runs=1)


def test_a_nudge_moves_every_weight_by_its_last_bits_and_leaves_the_model_alone() -> None:
    module = torch.nn.Linear(40, 30)
    before = module.weight.detach().clone()
    first, second = runs.nudged(module, 0, 1), runs.nudged(module, 0, 2)
    assert torch.equal(module.weight, before)
    moved = (first.weight.detach().double() / before.double() - 1).abs()
    assert moved.min() > 0 and moved.max() < 2e-7
    assert not torch.equal(first.weight, second.weight)


def test_a_spread_is_not_measured_twice(tmp_path: Path) -> None:
    once = add_spread(tmp_path, runs.run(ONE, tmp_path), runs=2)
    never = add_spread(tmp_path, once, runs=2, weights=tmp_path / "nowhere", report=lambda *_: pytest.fail("ran"))
    assert never is once
    assert json.loads((tmp_path / "card.json").read_text())["spread"] == once["spread"]


def test_one_card_of_many_is_named_by_its_digest(card: dict[str, Any], tmp_path: Path) -> None:
    other = {**card, "digest": "f" * 12, "experiment": {**card["experiment"], "seed": 5}}
    (tmp_path / "cards.json").write_text(json.dumps([card, other]))
    assert len(read_cards(tmp_path / "cards.json")) == 2
    assert read_mapping(tmp_path / "cards.json#ffff")["seed"] == 5
    with pytest.raises(errors.BadConfig, match=f"holds 2 cards: name one by its digest.*#{card['digest']}"):
        read_mapping(tmp_path / "cards.json")
    with pytest.raises(errors.DataError, match="no card 0123"):
        read_cards(tmp_path / "cards.json#0123")


@pytest.mark.parametrize("text", ["{", "[1]", '{"method": "tent"}', '[{"method": "tent"}]'])
def test_a_file_without_cards_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "cards.json").write_text(text)
    with pytest.raises(errors.DataError, match=r"cards\.json"):
        read_cards(tmp_path / "cards.json")


@pytest.mark.heavy
@pytest.mark.timeout(120)
@pytest.mark.parametrize("file", ["ablation/cards-digits.json", "delay/cards-digits.json"])
def test_a_published_card_gives_the_same_digits_again(file: str, cache: Path) -> None:
    card = read_cards(Path(__file__).parents[2] / "docs" / "results" / file)[0]
    verdict = verify(card)
    if not verdict.exact:
        pytest.skip(f"the same digits are not due here: {'; '.join(verdict.elsewhere)}")
    assert verdict.holds, str(verdict)


def test_a_card_of_a_later_release_is_not_verified(card: dict[str, Any]) -> None:
    with pytest.raises(errors.DataError, match="update wise-atta"):
        verify({**card, "card_version": CARD_VERSION + 1})


def test_verify_leaves_with_1_where_a_card_does_not_hold(card: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(card))
    (tmp_path / "bad.json").write_text(json.dumps(changed(card, "results", "error", value=0.0)))
    good = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "good.json")])
    assert good.exit_code == 0 and "holds" in good.stdout
    both = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "good.json"), str(tmp_path / "bad.json"), "--json"])
    assert both.exit_code == 1
    assert [verdict["holds"] for verdict in json.loads(both.stdout)] == [True, False]


def test_run_measures_the_spread_and_says_when_it_is_already_done(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(ONE.model_dump_json())
    command = ["run", str(tmp_path / "one.json"), "--out", str(tmp_path / "run"), "--spread", "2"]
    first = CliRunner().invoke(cli.app, command)
    assert first.exit_code == 0 and "nudged run 2 of 2" in first.stderr and "by chance alone" in first.stdout
    second = CliRunner().invoke(cli.app, command)
    assert "already done; --again repeats it" in second.stderr and "nudged" not in second.stderr
