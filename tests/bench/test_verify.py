"""Does a card hold where it was made, is it held to its spread elsewhere, and is a false one found out?"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.made import with_head
from typer.testing import CliRunner

from wise_atta import cli, errors
from wise_atta.bench import engines, run as runs, spread as spread_module, studies
from wise_atta.bench.experiment import CARD_VERSION, Experiment, read_cards, read_mapping
from wise_atta.bench.nudges import summarise
from wise_atta.bench.record import claimed, write_cards, write_json
from wise_atta.bench.runs import bundle, find
from wise_atta.bench.spread import add_spread, borrowed, measure, measured, put_spreads
from wise_atta.bench.verify import once, verify

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
        (("provenance", "stream", "frost"), "elsewhere", "textures of frost here are others"),
    ],
)
def test_a_card_that_says_something_else_is_found_out(
    card: dict[str, Any], path: tuple[str, ...], value: Any, words: str
) -> None:
    verdict = verify(changed(card, *path, value=value))
    assert not verdict.holds and words in str(verdict)


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        (
            {"method": "cema", "teacher": ONE.model},
            ("teacher", "weights_hash"),
            "the teacher's weights here are others",
        ),
        ({"method": "eata", "source_data": "digits"}, ("source_data", "fingerprint"), "the source pictures here"),
        ({"method": "eata", "source_data": "digits"}, ("source_data", "pixels"), "the source pixels here are others"),
    ],
)
def test_a_card_also_answers_for_its_teacher_and_source_data(
    card: dict[str, Any], fields: dict[str, Any], path: tuple[str, str], words: str
) -> None:
    assert path[0] not in card["provenance"], "this one has none"
    made = once(ONE.model_copy(update={"options": {}, **fields}))
    assert verify(made).holds
    assert words in str(verify(changed(made, "provenance", *path, value="0" * 64)))
    early = copy.deepcopy(made)
    del early["provenance"][path[0]]
    assert verify(early).holds, "early cards do not tell"


def test_elsewhere_a_card_is_held_to_logits_and_spread(card: dict[str, Any]) -> None:
    there = changed(card, "provenance", "versions", "torch", value="1.0")
    verdict = verify(there)
    assert not verdict.exact and verdict.holds and "torch 1.0 there" in str(verdict)
    # The result itself is not promised there, only that it lies within the spread.
    assert verify(changed(there, "results", "error", value=card["results"]["error"] + 1)).holds
    far = {**card["spread"], "low": 0.0, "high": 1.0}
    assert "outside the spread" in str(verify(changed(there, "spread", value=far)))
    logits = [[value + 1e-3 for value in row] for row in card["first_batch"]["logits"]]
    there["first_batch"]["digest"] = "0" * 16
    assert "further apart than 0.0001" in str(verify(changed(there, "first_batch", "logits", value=logits)))


def test_a_card_without_a_spread_promises_nothing_elsewhere_and_is_not_said_to_be_false(card: dict[str, Any]) -> None:
    there = changed(card, "provenance", "versions", "torch", value="1.0")
    del there["spread"], there["first_batch"]
    verdict = verify(there)
    assert not verdict.holds and not verdict.broken
    output = str(verdict)
    assert (
        "cannot be told" in output and "no spread" in output and "no logits" in output and "does not hold" not in output
    )


def test_small_logits_are_compared_by_their_own_size() -> None:
    """roid divides logits by about the number of classes: of 1e-3 a difference of 1e-5 is not rounding."""
    one = ONE.model_copy(update={"method": "roid", "options": {}})
    card = once(one)
    card["spread"] = summarise([card["results"]["error"]] * 2)
    card["provenance"]["versions"]["torch"], card["first_batch"]["digest"] = "1.0", "0" * 16
    logits = card["first_batch"]["logits"]
    largest = max(abs(value) for row in logits for value in row)
    assert largest < 1
    early = [[round(value, 6) for value in row] for row in logits]
    assert verify(changed(card, "first_batch", "logits", value=early)).holds, "an early card rounds to six decimals"
    moved = [[value + 3e-4 * largest for value in row] for row in logits]
    assert "further apart than 0.0001 of" in str(verify(changed(card, "first_batch", "logits", value=moved)))
    lost = [[math.nan for _ in row] for row in logits]
    assert "further apart" in str(verify(changed(card, "first_batch", "logits", value=lost)))


@pytest.mark.parametrize(
    ("precision", "near", "far"), [("fp32", 5e-5, 5e-4), ("tf32", 5e-3, 5e-2), ("bf16", 0.02, 0.2)]
)
def test_logits_agree_to_the_bits_that_were_asked_for(precision: str, near: float, far: float) -> None:
    card = once(ONE.model_copy(update={"fast": {"precision": precision}}))
    card["spread"] = summarise([card["results"]["error"]] * 2)
    card["provenance"]["versions"]["torch"], card["first_batch"]["digest"] = "1.0", "0" * 16
    logits = np.array(card["first_batch"]["logits"])
    for share, holds in ((near, True), (far, False)):
        moved = logits + share * np.abs(logits).max()
        assert verify(changed(card, "first_batch", "logits", value=moved.tolist())).holds is holds


def test_a_card_of_a_device_that_is_not_here_is_run_on_what_there_is(card: dict[str, Any]) -> None:
    there = changed(card, "experiment", "device", value="xpu:7")
    there["provenance"]["device"] = "some GPU"
    verdict = verify(there)
    assert verdict.holds and "some GPU there, cpu here" in str(verdict)


def bare(card: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in card.items() if name != "spread"}


def test_a_spread_is_that_of_nudged_runs(card: dict[str, Any]) -> None:
    spread = card["spread"]
    assert spread["errors"] == [once(ONE, nudge=number)["results"]["error"] for number in (1, 2, 3)]
    assert spread["low"] <= min(spread["errors"]) <= max(spread["errors"]) <= spread["high"]
    with pytest.raises(errors.BadConfig, match="two runs"):
        measured(card, runs=1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_of_many_cards_share_processes(card: dict[str, Any], tmp_path: Path, jobs: int) -> None:
    other = runs.run(ONE.model_copy(update={"seed": 5}), tmp_path / "other")
    copied = changed(bare(card), "results", "error", value=card["results"]["error"] + 5)
    far = changed(bare(card), "experiment", "device", value="xpu:7") | {"digest": "f" * 12}
    odd = changed(bare(card), "experiment", "method", value="tnet") | {"digest": "e" * 12}
    write_cards(tmp_path / "cards.json", [far, odd, copied, bare(card), other])
    done = CliRunner().invoke(cli.app, ["spread", str(tmp_path / "cards.json"), "--runs", "3", "--jobs", str(jobs)])
    assert done.exit_code == 3 and "2 of 5 cards have a spread" in done.stdout
    for which, why in ((card, "it comes out at"), (far, "device 'xpu:7' cannot be used"), (odd, "unknown method")):
        assert f"left out: {which['digest']}: {why}" in done.stderr
    with_spread = other | {"spread": measured(other, runs=3)}
    assert read_cards(tmp_path / "cards.json") == [far, odd, copied, card, with_spread]


def test_a_process_that_dies_is_told(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = engines.pool(1)
    with contextlib.suppress(BrokenProcessPool):
        broken.submit(os._exit, 1).result()
    monkeypatch.setattr(engines, "pool", lambda _: broken)
    with pytest.raises(errors.WiseAttaError, match="a process died in a run"):
        list(measure([card], runs=2, jobs=2))


def test_runs_that_are_kept_are_not_made_again(
    card: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, made = tmp_path / "kept", list[int | None]()

    def stop(digest: str, number: int | None, error: float) -> None:
        made.append(number)
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(card, runs=3, kept=kept, report=stop)
    assert measured(card, runs=3, kept=kept, report=stop) == card["spread"]
    assert made == [None, 1, 2, 3]
    faster = measured(card, runs=3, kept=kept, fast={"channels_last": True})
    assert faster["fast"] == {"channels_last": True} and len(json.loads((kept / "nudged.json").read_text())) == 7
    monkeypatch.setattr(spread_module, "once", lambda *_, **__: pytest.fail("ran"))
    write_cards(tmp_path / "cards.json", [bare(card)])
    again = ["spread", str(tmp_path / "cards.json"), "--runs", "3", "--kept", str(kept)]
    assert CliRunner().invoke(cli.app, [*again, "--fast", "channels_last=true"]).exit_code == 0
    assert read_cards(tmp_path / "cards.json") == [card | {"spread": faster}]
    with pytest.raises(pytest.fail.Exception, match="ran"):
        measured(changed(card, "provenance", "threads", value=2), runs=3, kept=kept)
    with pytest.raises(errors.BadConfig, match="channels_last"):
        measured(card, runs=3, fast={"chanels_last": True})
    with claimed(kept), pytest.raises(errors.DataError, match="another process"):
        measured(card, runs=3, kept=kept)
    (kept / "nudged.json").write_text('{"a": "1"}')
    with pytest.raises(errors.DataError, match="choose another folder"):
        measured(card, runs=3, kept=kept)


def test_a_kept_error_is_held_to_the_card_like_one_just_found(card: dict[str, Any], tmp_path: Path) -> None:
    assert measured(card, runs=3, kept=tmp_path) == card["spread"]
    false = changed(card, "results", "error", value=card["results"]["error"] + 0.01)
    (_, refused), (_, spread) = measure([false, card], runs=3, kept=tmp_path)
    assert isinstance(refused, errors.DataError) and "not at" in str(refused) and spread == card["spread"]
    elsewhere = changed(false, "provenance", "versions", "torch", value="1.0")
    assert "low" in measured(elsewhere, runs=3, kept=tmp_path), "there it may come out otherwise"


def test_a_run_on_other_pictures_is_not_kept(
    card: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = changed(card, "provenance", "stream", "fingerprint", value="f" * 64)
    monkeypatch.setattr(spread_module, "once", lambda *_, **__: other)
    with pytest.raises(errors.DataError, match="the pictures here are others"):
        measured(card, runs=3, kept=tmp_path)
    assert not (tmp_path / "nudged.json").exists()


def test_a_spread_tells_how_its_runs_computed(card: dict[str, Any]) -> None:
    chosen = changed(card, "experiment", "fast", value={"channels_last": False})
    assert "fast" not in measured(chosen, runs=2, fast={"channels_last": True}), "as the experiment says"


def test_nudged_runs_have_as_many_threads_as_the_card_s(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def watched(*args: Any, **how: Any) -> dict[str, Any]:
        again = once(*args, **how)
        made.append(again["provenance"]["threads"])
        return again

    monkeypatch.setattr(spread_module, "once", watched)
    open_to_any = changed(changed(card, "experiment", "threads", value=None), "provenance", "threads", value=2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        spread_module.measured(changed(open_to_any, "provenance", "device", value="xpu"), runs=2)
    finally:
        torch.set_num_threads(before)
    assert made == [2, 2, 2]


def test_a_file_that_cannot_be_written_costs_no_other_its_spread(
    card: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(file: Path, spreads: Any) -> list[str]:
        if file.parent.name == "a":
            raise errors.DataError("disk full")
        return put_spreads(file, spreads)

    monkeypatch.setattr(studies, "put_spreads", put)
    for name in ("a", "b"):
        write_cards(tmp_path / name / "cards.json", [bare(card)])
    done = CliRunner().invoke(cli.app, ["spread", str(tmp_path), "--runs", "3"])
    assert done.exit_code == 3 and "left out: disk full" in done.stderr
    assert read_cards(tmp_path / "a") == [bare(card)] and read_cards(tmp_path / "b") == [card]


def test_a_run_that_cannot_be_made_leaves_out_its_card_alone(card: dict[str, Any], tmp_path: Path) -> None:
    lost = changed(bare(card), "experiment", "data", value="pacs")
    (_, why), (whole, spread) = measure([lost, card], runs=3, data=tmp_path)
    assert isinstance(why, errors.DataError) and str(why).startswith(f"{card['digest']}: ")
    assert whole is card and spread == card["spread"]


def test_a_run_that_memory_does_not_suffice_for_costs_no_other_its_spread(
    card: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(experiment: Any, **how: Any) -> dict[str, Any]:
        if experiment.seed == 5:
            raise torch.OutOfMemoryError("out of memory")
        return once(experiment, **how)

    monkeypatch.setattr(spread_module, "once", run_out)
    large = changed(bare(card), "experiment", "seed", value=5) | {"digest": "f" * 12}
    (_, why), (_, spread) = measure([large, card], runs=3, kept=tmp_path)
    assert "ffffffffffff failed: OutOfMemoryError: out of memory. Try fewer jobs" in str(why)
    assert spread == card["spread"]


def test_a_spread_reaches_to_the_run_itself_where_that_comes_out_the_same(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = card["results"]["error"]
    monkeypatch.setattr(spread_module, "summarise", lambda _: summarise([error - 2, error - 1.9]))
    assert measured(card, runs=2)["high"] == error
    with pytest.raises(errors.DataError, match="not at"):
        measured(changed(card, "results", "error", value=error + 5), runs=2)
    with pytest.raises(errors.DataError, match="textures of frost"):
        measured(changed(card, "provenance", "stream", "frost", value="other"), runs=2)
    elsewhere = changed(changed(card, "results", "error", value=error + 5), "provenance", "device", value="xpu")
    assert measured(elsewhere, runs=2)["high"] < error - 1, "there it may come out otherwise, and is not reached to"


def test_a_card_borrows_the_width_of_a_spread_from_another_seed(card: dict[str, Any], tmp_path: Path) -> None:
    def other(digest: str, **fields: Any) -> dict[str, Any]:
        return bare(card) | {"digest": digest, "experiment": card["experiment"] | fields}

    width = card["spread"]["high"] - card["spread"]["low"]
    sister, stranger = other("a" * 12, seed=41), other("b" * 12, seed=41, ratio=0.1)
    assert borrowed([card, sister]) == {}, "three runs are too few to lend"
    spreads = borrowed([card, sister, stranger], runs=3)
    error = card["results"]["error"]
    assert list(spreads) == ["a" * 12]
    assert spreads["a" * 12] == {"nudge": 1e-7, "of": card["digest"], "low": error - width, "high": error + width}
    write_cards(tmp_path / "cards.json", [card, sister, stranger])
    done = CliRunner().invoke(cli.app, ["spread", str(tmp_path), "--borrow", "--runs", "3"])
    assert done.exit_code == 0 and "2 of 3 cards have a spread" in done.stdout
    kept = read_cards(tmp_path)
    assert kept == [card, sister | {"spread": spreads["a" * 12]}, stranger]
    assert borrowed(kept, runs=3) == spreads, "what was borrowed is lent to nobody, and is borrowed anew"
    far = changed(
        {**card, "spread": {**spreads["a" * 12], "low": 0.0, "high": 0.1}}, "provenance", "device", value="xpu"
    )
    assert f"as wide as that of {card['digest']}" in str(verify(far))
    both = CliRunner().invoke(cli.app, ["spread", str(tmp_path), "--borrow", "--from", str(tmp_path / "cards.json")])
    assert both.exit_code != 0 and "give one" in str(both.exception)


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


def test_spreads_measured_elsewhere_are_put_into_published_cards_by_their_digest(
    card: dict[str, Any], tmp_path: Path
) -> None:
    plain = bare(card)
    other, third = {**plain, "digest": "f" * 12}, {**plain, "digest": "e" * 12}
    file = tmp_path / "cards.json"
    write_cards(file, [plain, other, third])
    far = {**card["spread"], "low": 0.0, "high": 0.1}
    left_out = put_spreads(file, {card["digest"]: card["spread"], "f" * 12: far, "0" * 12: far})
    assert read_cards(file) == [card, other, third]
    assert len(left_out) == 1 and "f" * 12 in left_out[0] and "outside the spread, 0.0000 to 0.1000" in left_out[0]


def test_spreads_go_into_bundles_and_leave_their_rows_alone(tmp_path: Path) -> None:
    one = add_spread(tmp_path / "run", runs.run(ONE, tmp_path / "run"), runs=2)
    write_json(tmp_path / "run" / "card.json", {name: value for name, value in one.items() if name != "spread"})
    before = bundle([tmp_path / "run"], tmp_path / "runs.zip").runs[0]
    assert "spread" not in read_cards(tmp_path / "runs.zip")[0]
    (tmp_path / "spreads.json").write_text(json.dumps({one["digest"]: one["spread"]}))
    files = [str(tmp_path / "runs.zip"), "--from", str(tmp_path / "spreads.json")]
    assert CliRunner().invoke(cli.app, ["spread", *files]).exit_code == 0
    after = find([tmp_path / "runs.zip"]).runs[0]
    assert after.card == one and after.names == before.names and len(after.steps) == len(before.steps) > 0
    assert [row["wrong"] for row in after.steps] == [row["wrong"] for row in before.steps]


def test_the_command_adds_spreads_to_all_cards_of_a_file_at_once(card: dict[str, Any], tmp_path: Path) -> None:
    plain = bare(card)
    write_cards(tmp_path / "a" / "cards.json", [plain, {**plain, "digest": "f" * 12}])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "card.json").write_text(json.dumps(plain))
    done = CliRunner().invoke(cli.app, ["spread", str(tmp_path / "a" / "cards.json"), "--runs", "3"])
    assert done.exit_code == 0 and "2 of 2 cards have a spread" in done.stdout
    assert [one["spread"] for one in read_cards(tmp_path / "a")] == [card["spread"]] * 2
    known = CliRunner().invoke(cli.app, ["spread", str(tmp_path / "a"), "--runs", "3"])
    assert known.exit_code == 0 and known.stderr == "", "a spread is not measured twice"
    (tmp_path / "spreads.json").write_text(json.dumps({card["digest"]: card["spread"]}))
    merged = CliRunner().invoke(cli.app, ["spread", str(tmp_path), "--from", str(tmp_path / "spreads.json")])
    assert merged.exit_code == 0, merged.output
    assert json.loads((tmp_path / "b" / "card.json").read_text())["spread"] == card["spread"]
    far = {card["digest"]: {**card["spread"], "low": 0.0, "high": 0.1}}
    (tmp_path / "spreads.json").write_text(json.dumps(far))
    refused = CliRunner().invoke(cli.app, ["spread", str(tmp_path / "b"), "--from", str(tmp_path / "spreads.json")])
    assert refused.exit_code == 3 and "left out" in refused.stderr


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


def test_a_card_whose_data_are_not_here_does_not_keep_others_from_being_verified(
    card: dict[str, Any], tmp_path: Path
) -> None:
    lost = changed(card, "experiment", "data", value="tree:nowhere") | {"digest": "f" * 12}
    write_cards(tmp_path / "cards.json", [lost, card])
    done = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "cards.json"), "--json", "--data", str(tmp_path)])
    assert [verdict["holds"] for verdict in json.loads(done.stdout)] == [True]
    assert done.exit_code != 0 and f"{'f' * 12} in {tmp_path / 'cards.json'}" in done.stderr


def test_a_broken_card_does_not_keep_others_from_being_verified(card: dict[str, Any], tmp_path: Path) -> None:
    for name, text in (("a", "{"), ("b", json.dumps(card)), ("c", json.dumps({**card, "card_version": 99}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "card.json").write_text(text)
    result = CliRunner().invoke(cli.app, ["verify", str(tmp_path)])
    assert result.exit_code == 3 and result.stdout.count("holds") == 1
    assert "a/card.json cannot be read" in result.stderr and "update wise-atta" in result.stderr


def test_this_folder_can_be_named_by_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["verify", "."])
    assert result.exit_code == 3 and "was a run finished there?" in result.stderr


def test_run_measures_the_spread_and_says_when_it_is_already_done(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(ONE.model_dump_json())
    command = ["run", str(tmp_path / "one.json"), "--out", str(tmp_path / "run"), "--spread", "2"]
    first = CliRunner().invoke(cli.app, command)
    assert first.exit_code == 0 and "nudged run 2 of 2" in first.stderr and "by chance alone" in first.stdout
    second = CliRunner().invoke(cli.app, command)
    assert "already done; --again repeats it" in second.stderr and "nudged" not in second.stderr


@pytest.mark.parametrize(
    ("part", "value"),
    [("card_version", "1"), ("experiment", "tent"), ("results", None), ("results", {"error": "high"})],
)
def test_what_is_no_card_is_named_and_not_run(card: dict[str, Any], tmp_path: Path, part: str, value: object) -> None:
    write_json(tmp_path / "card.json", {**card, part: value})
    for command in (["verify"], ["spread", "--borrow"]):
        done = CliRunner().invoke(cli.app, [*command, str(tmp_path / "card.json")])
        output = done.output + str(done.exception)
        assert "is not a run card" in output and ("error" if value == {"error": "high"} else part) in output


@pytest.mark.parametrize("kind", ["bundle", "list"])
def test_a_card_among_others_that_is_none_is_named_and_the_others_are_taken(
    card: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    file, odd = tmp_path / ("runs.zip" if kind == "bundle" else "cards.json"), {"card_version": 99, "experiment": {}}
    if kind == "bundle":
        write_json(tmp_path / "run" / "card.json", runs.run(ONE, tmp_path / "run"))
        bundle([tmp_path / "run"], file)
        with_head(file, lambda head: head["runs"].append({"name": "odd", "card": odd, "stream": 0}))
    else:
        write_cards(file, [odd, bare(card), None])  # type: ignore[list-item]
    held = CliRunner().invoke(cli.app, ["verify", str(file)])
    assert held.exit_code == 3 and f"{card['digest']}: the same digits are due" in held.stdout
    assert f"left out: {file}" in held.stderr and "update wise-atta" in held.stderr
    (tmp_path / "spreads.json").write_text(json.dumps({card["digest"]: card["spread"]}))
    put = CliRunner().invoke(cli.app, ["spread", str(file), "--from", str(tmp_path / "spreads.json")])
    assert put.exit_code == 3 and "1 of 1 cards have a spread" in put.stdout and "update wise-atta" in put.stderr
    problems: list[str] = []
    assert [one["spread"] for one in read_cards(file, problems=problems)] == [card["spread"]]
    assert len(problems) == (1 if kind == "bundle" else 2), "what is no card stays as it is"
    assert read_mapping(tmp_path / f"{file.name}#{card['digest']}") == card["experiment"]


@pytest.mark.parametrize("nonsense", [5, {"low": 1.0}, {"low": "a", "high": 2}])
def test_a_spread_that_is_none_is_refused_and_the_card_stays(
    card: dict[str, Any], tmp_path: Path, nonsense: object
) -> None:
    write_cards(tmp_path / "cards.json", [card])
    before = (tmp_path / "cards.json").read_bytes()
    with pytest.raises(errors.DataError, match="is no spread"):
        put_spreads(tmp_path / "cards.json", {card["digest"]: nonsense})  # type: ignore[dict-item]
    assert (tmp_path / "cards.json").read_bytes() == before


def test_a_spread_of_nothing_is_an_error_before_anything_runs(card: dict[str, Any], tmp_path: Path) -> None:
    write_cards(tmp_path / "cards.json", [card])
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / f"cards.json#{card['digest']}"):
        with pytest.raises(errors.DataError, match="no file of cards"):
            CliRunner().invoke(cli.app, ["spread", str(place)], catch_exceptions=False)
