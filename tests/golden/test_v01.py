"""What 0.1 wrote is read by the present code: states, exports, ledgers, cards, stopped runs, configurations."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import nets, served, v01
from golden.values import machine

from wise_atta.bench.experiment import Experiment, read_cards, read_mapping
from wise_atta.bench.record import read_json
from wise_atta.bench.run import run
from wise_atta.bench.runs import find
from wise_atta.bench.sweep import expand
from wise_atta.bench.verify import verify
from wise_atta.data import models


def here() -> bool:
    """Whether numbers are rounded as they were where the files were written."""
    return machine() == (v01.FOLDER / "machine.txt").read_text().strip()


@cache
def expected(folder: str) -> dict[str, Any]:
    loaded: dict[str, Any] = v01.load(v01.FOLDER / folder / "expected.pt")
    return loaded


def same(now: torch.Tensor, before: torch.Tensor, tolerance: float) -> None:
    if here():
        assert torch.equal(now, before)
    else:
        torch.testing.assert_close(now, before, rtol=tolerance, atol=tolerance * float(before.abs().max()))


@pytest.mark.parametrize("name", v01.STATES)
def test_a_state_goes_on_to_the_recorded_logits(name: str) -> None:
    case, kept = v01.STATES[name], expected("states")[name]
    adapter = case.make()
    adapter.load_state_dict(v01.load(v01.FOLDER / "states" / f"{v01.file_name(name)}.pt"))
    assert v01.shown(adapter) == kept["saved"]
    now = v01.go_on(adapter, case, v01.STOP + 1)
    narrow = "bf16" in name
    same(now["logits"][0], kept["logits"][0], 5e-2 if narrow else 1e-4)
    if not here():
        return  # learned from numbers that round otherwise, later batches may part
    for part in ("asked", "spent", "learned", "shown"):
        assert now[part] == kept[part], part
    assert all(map(torch.equal, now["logits"], kept["logits"]))
    assert now["weights"].keys() == kept["weights"].keys()
    assert all(torch.equal(now["weights"][key], value) for key, value in kept["weights"].items())


def test_a_state_saved_before_the_first_batch_begins_the_stream() -> None:
    case = v01.STATES["wise, mixed, late"]
    loaded, fresh = case.make(), case.make()
    loaded.load_state_dict(v01.load(v01.FOLDER / "states" / "never-used.pt"))
    ours, theirs = (v01.go_on(adapter, case, 1) for adapter in (loaded, fresh))
    assert all(map(torch.equal, ours["logits"], theirs["logits"]))
    assert ours["learned"] == theirs["learned"] != []


def test_a_saved_state_can_be_saved_again_and_loaded() -> None:
    for name in ("wise, an inbox", "wise, open and pending", "wise, guarded", "cema"):
        case = v01.STATES[name]
        first, second = case.make(), case.make()
        first.load_state_dict(v01.load(v01.FOLDER / "states" / f"{v01.file_name(name)}.pt"))
        second.load_state_dict(first.state_dict())
        ours, theirs = (v01.go_on(adapter, case, v01.STOP + 1) for adapter in (first, second))
        assert all(map(torch.equal, ours["logits"], theirs["logits"])), name


@pytest.mark.parametrize("mode", v01.EXPORTS)
def test_a_pickled_export_predicts_as_recorded(mode: str) -> None:
    module = torch.load(v01.FOLDER / "exports" / f"{mode}.pt", weights_only=False)
    with torch.no_grad():
        same(module(nets.batch("batch-norm", 99)), expected("exports")[mode], 1e-4)


@pytest.fixture(params=list(served.SETTINGS))
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A copy of a ledger of 0.1, and what it is called."""
    file = tmp_path / "ledger.db"
    shutil.copy(v01.FOLDER / "ledgers" / f"{request.param}.db", file)
    return request.param, file


def test_a_ledger_is_served_from_and_its_answers_are_learned(ledger: tuple[str, Path]) -> None:
    name, file = ledger
    kept = json.loads((v01.FOLDER / "ledgers" / "expected.json").read_text())[name]
    assert served.said(file) == kept["kept"]
    assert kept["kept"]["answers"].keys() >= {"accepted", "revoked"}
    with served.opened(name, file) as (client, service):
        assert served.said(file) == kept["kept"], "opened, it says what it said"
        now = served.continued(client, service)
    assert now["taught"] == kept["taught"]
    teaching = {question for question in now["taught"] if not question.startswith("a")}  # the others measure
    assert teaching and teaching <= set(served.said(file)["questions"]["learned"])
    for moment in ("first", "last"):
        for one, before in zip(now[moment], kept[moment], strict=True):
            tops = [{guess["label"]: guess["probability"] for guess in item["top"]} for item in (one, before)]
            assert tops[0] == pytest.approx(tops[1], abs=0 if here() else 1e-3)
    if here():
        assert served.said(file) == kept["after"]


def test_a_ledger_still_revokes_what_a_person_said(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    shutil.copy(v01.FOLDER / "ledgers" / "replayed.db", file)
    before = served.said(file)["answers"]
    with served.opened("replayed", file) as (client, service):
        boss = served.web.token(service, "chief", "admin")
        done = client.post("/streams/default/revoke", json={"by": "good"}, headers=boss).json()
    assert done["exact"] and done["answers"] == before["accepted"] - _by(file, "bad", "accepted")
    assert served.said(file)["answers"]["revoked"] == before["revoked"] + done["answers"]


def _by(file: Path, person: str, status: str) -> int:
    with closing(sqlite3.connect(file)) as connection:
        query = "select count(*) from answers where by = ? and status = ?"
        (count,) = connection.execute(query, (person, status)).fetchone()
        return int(count)


RUNS = ("wise", "eatta", "tent")


@pytest.mark.parametrize("name", RUNS)
def test_a_card_verifies(name: str) -> None:
    verdict = verify(read_json(v01.FOLDER / "experiments" / name / "card.json"))
    assert verdict.holds, str(verdict)
    assert verdict.exact or not here()


def test_a_bundle_holds_the_runs_and_their_cards() -> None:
    folder = v01.FOLDER / "experiments"
    bundled = find([folder / "all.zip"])
    assert not bundled.problems
    assert sorted(one.experiment["method"] for one in bundled.runs) == sorted(RUNS)
    cards = read_cards(folder / "all.zip", results=True)
    assert [card["digest"] for card in cards] == [read_json(folder / n / "card.json")["digest"] for n in RUNS]


def test_a_stopped_run_ends_with_the_numbers_of_a_whole_one(tmp_path: Path) -> None:
    shutil.copytree(v01.FOLDER / "experiments" / "stopped", tmp_path / "stopped")
    whole = read_json(v01.FOLDER / "experiments" / "wise" / "card.json")
    card = run(Experiment.model_validate(whole["experiment"]), tmp_path / "stopped")
    assert card["results"]["resumed"] is True
    assert card["digest"] == whole["digest"]
    names = ("samples", "batches", "labels_spent", "forwards", "backwards", *(["error", "by_domain"] if here() else []))
    assert {name: card["results"][name] for name in names} == {name: whole["results"][name] for name in names}


@pytest.mark.parametrize("name", ["sweep", "wise"])
def test_a_configuration_means_the_experiments_that_it_meant(name: str) -> None:
    folder = v01.FOLDER / "configurations"
    meant = sorted(f"{one.name} {one.digest}" for one in expand(read_mapping(folder / f"{name}.yaml")))
    assert meant == (folder / f"{name}.txt").read_text().splitlines()


def test_the_files_are_small_and_the_model_is_the_one_that_was_served() -> None:
    assert sum(file.stat().st_size for file in v01.FOLDER.rglob("*") if file.is_file()) < 2**21
    model = served.model()
    assert isinstance(model, models.SourceModel)
