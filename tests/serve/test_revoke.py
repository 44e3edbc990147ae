"""Can labels be made as if they had never been?"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from serve.parts import comes_back, same, settled, twin
from serve.web import post, running, token
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError
from starlette.testclient import TestClient

from wise_atta.serve import ledger as db
from wise_atta.serve.revoke import revoke
from wise_atta.serve.service import Service

# Every sample is asked about, in an order of chance: the questions are the same whatever was learned.
EVERY: dict[str, Any] = {"ratio": 1, "audit": 0, "options": {"labels": 4, "policy": "uniform", "selector": "random"}}

PEOPLE = (("boss", "admin"), ("good", "annotator"), ("bad", "annotator"))


def say(service: Service, client: TestClient, who: dict[str, str], label: int) -> str:
    """Answer the newest question."""
    newest = select(db.Question.id).where(db.Question.state == "open").order_by(db.Question.seq.desc()).limit(1)
    with service.ledger.read() as session:
        name = session.scalars(newest).one()
    reply = client.post("/answers", json={"answers": [{"query": name, "label": label}]}, headers=who)
    assert reply.json() == {"taken": 1, "held": 0}
    return name


def fill(client: TestClient, service: Service, *, bad: bool) -> dict[str, list[str]]:
    """Ten batches; two people answer after each of them, one of them wrongly or not at all."""
    boss = token(service, "boss", "admin")
    people = {name: token(service, name, "annotator") for name in ("good", "bad")}
    answered: dict[str, list[str]] = {"good": [], "bad": []}
    for number in range(10):
        post(client, number, **boss)
        settled(service)
        for name, headers in people.items():
            silent = name == "bad" and not bad
            # Whoever says nothing holds on to what is left, so that the other one gets the same questions.
            questions = client.get(f"/queries?limit={50 if silent else 2}", headers=headers).json()["queries"]
            if silent or not questions:
                continue
            answers = [
                {"query": q["query"], "label": (int(q["query"].split("-")[1]) + (name == "bad")) % 4} for q in questions
            ]
            assert client.post("/answers", json={"answers": answers}, headers=headers).status_code == 200
            answered[name] += [q["query"] for q in questions]
    post(client, 10, **boss)
    settled(service)
    service.boss = boss  # type: ignore[attr-defined]
    return answered


def learned_part(service: Service) -> dict[str, Any]:
    state = service.streams["default"].state.state_dict()["adapter"]
    return {name: state[name] for name in ("update", "anchor", "running", "guard", "age")}


def test_while_the_log_reaches_back_the_state_is_as_if_the_labels_had_never_come(tmp_path: Path) -> None:
    with running(tmp_path / "a", keep_log=1, checkpoint_events=7, **EVERY) as (client, service):
        answered = fill(client, service, bad=True)
        poisoned = learned_part(service)
        done = client.post("/streams/default/revoke", json={"by": "bad"}, headers=service.boss).json()  # type: ignore[attr-defined]
        assert done["exact"] and done["answers"] == len(answered["bad"]) > 10
        clean = learned_part(service)
        account = service.streams["default"].state.spent
        with service.ledger.read() as session:
            assert {row.query for row in session.scalars(select(db.Learned))} == set(answered["good"])
            for name in answered["bad"]:
                row = session.get(db.Question, ("default", name))
                assert row is not None and row.state == "open"
        settled(service)
        assert service.streams["default"].serving.version is service.streams["default"].state.adapter.classifier.live
    with running(tmp_path / "b", keep_log=1, **EVERY) as (client, service):
        fill(client, service, bad=False)
        same(clean, learned_part(service))
        assert account == service.streams["default"].state.spent
    with pytest.raises(AssertionError):
        same(clean, poisoned)


def test_questions_stay_as_asked_even_where_another_history_would_have_asked_others(tmp_path: Path) -> None:
    with running(tmp_path, keep_log=1, ratio=0.6, audit=0.2, options={"labels": 2, "lr": 0.05}) as (client, service):
        answered = fill(client, service, bad=True)
        before = service.streams["default"].state.state_dict()["adapter"]
        assert client.post("/streams/default/revoke", json={"by": "bad"}, headers=service.boss).json()["exact"]  # type: ignore[attr-defined]
        after = service.streams["default"].state.state_dict()["adapter"]
        same(before["policy"], after["policy"])
        same(before["selector"], after["selector"])
        opened = {item["query"]["id"] for item in after["desk"]["open"]}
        teaching = {name for name in answered["bad"] if not name.startswith("a")}
        assert teaching and teaching <= opened
        with service.ledger.read() as session:
            rows = session.scalars(select(db.Question.id).where(~db.Question.audit)).all()
        known = opened | set(after["desk"]["closed"]) | {item["query"]["id"] for item in after["desk"]["pending"]}
        assert set(rows) == known


def test_without_the_log_it_starts_from_a_checkpoint_and_says_that_it_is_approximate(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_events=7, **EVERY) as (client, service):
        answered = fill(client, service, bad=True)
        boss = service.boss  # type: ignore[attr-defined]
        done = client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss).json()
        assert not done["exact"] and done["answers"] == len(answered["bad"])
        # Late labels are learned a few at a time.
        for number in (11, 12, 13):
            post(client, number, **boss)
            settled(service)
        with service.ledger.read() as session:
            assert {row.query for row in session.scalars(select(db.Learned))} == set(answered["good"])
        notices = client.get("/notices", headers=boss).json()
        assert any(item["kind"] == "revoked" and item["body"]["exact"] is False for item in notices)


def test_labels_are_learned_again_as_old_as_they_were_and_what_is_new_goes_first(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_events=6, late_limit=3, **EVERY) as (client, service):
        boss, good, bad = (token(service, *who) for who in PEOPLE)
        post(client, 0, **boss)
        settled(service)
        say(service, client, bad, 2)
        for number in range(1, 13):
            post(client, number, **boss)
            settled(service)
            say(service, client, good, 1)
        for number in range(13, 18):
            post(client, number, **boss)
        settled(service)
        assert not client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss).json()["exact"]
        desk = service.streams["default"].state.adapter.questions
        assert desk is not None and [item.age_at(100) for item in desk.pending] == [1] * 12
        new = say(service, client, good, 1)
        for number in (18, 19):
            post(client, number, **boss)
            settled(service)
            with service.ledger.read() as session:
                assert session.get(db.Learned, ("default", new)) is not None
        with service.ledger.read() as session:
            assert db.count_by(session, db.Reply.status) == {"accepted": 13, "revoked": 1}
            assert session.scalar(select(func.count()).select_from(db.Learned)) == 13
        assert set(desk.state_dict()["ages"].values()) == {1}
        comes_back(service)


def test_labels_that_an_earlier_release_learned_are_learned_again_too(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_events=6, late_limit=3, **EVERY) as (client, service):
        fill(client, service, bad=True)
        stream = service.streams["default"]
        state = stream.state.state_dict()
        del state["since"], state["adapter"]["desk"]["ages"]
        stream.between(lambda: stream.state.load_state_dict(state)).result(30)
        assert not stream.between(lambda: revoke(stream, by="bad")).result(30).exact
        desk = stream.state.adapter.questions
        assert desk is not None
        again = [item for item in desk.pending if item.age is not None]
        assert again and {item.age_at(100) for item in again} == {0}


def test_an_approximate_revocation_undoes_no_reset(tmp_path: Path) -> None:
    with running(tmp_path, checkpoint_events=6, **EVERY) as (client, service):
        boss, good, bad = (token(service, *who) for who in PEOPLE)
        for number in range(8):
            post(client, number, **boss)
            settled(service)
            say(service, client, good, 1)
        say(service, client, bad, 2)
        post(client, 8, **boss)
        assert client.post("/streams/default/reset", headers=boss).status_code == 200
        post(client, 9, **boss)
        settled(service)
        kept = say(service, client, good, 1)
        for number in range(10, 14):
            post(client, number, **boss)
        settled(service)
        assert not client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss).json()["exact"]
        fresh = service._make().state_dict()["adapter"]
        same({name: fresh[name] for name in learned_part(service)}, learned_part(service))
        desk = service.streams["default"].state.adapter.questions
        assert desk is not None and [item.id for item in desk.pending] == [kept]
        comes_back(service)


@pytest.mark.parametrize(("limit", "batches"), [(None, 1), (None, 2), (1, 2)])
def test_the_ledger_says_when_labels_were_learned_without_the_revoked_ones(
    tmp_path: Path, limit: int | None, batches: int
) -> None:
    options = {**EVERY, "options": {**EVERY["options"], "labels": 12}, "late_limit": limit}
    with running(tmp_path, keep_log=1, **options) as (client, service):
        boss, good, bad = (token(service, *who) for who in PEOPLE)
        post(client, 0, 12, **boss)
        settled(service)
        # Eight are learned with a batch: the ninth lie and the true labels wait behind them.
        lies = [say(service, client, bad, 2) for _ in range(9)]
        names = {say(service, client, good, 1) for _ in range(3)}
        for number in range(batches):
            post(client, 1 + number, 12, **boss)
        settled(service)
        first = service.streams["default"].state.position - batches + 1
        with service.ledger.read() as session:
            assert not names & set(session.scalars(select(db.Learned.query).where(db.Learned.seq == first)))
        done = client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss).json()
        assert done["exact"] and done["answers"] == 9
        with service.ledger.read() as session:
            assert {row.query: row.seq for row in session.scalars(select(db.Learned))} == dict.fromkeys(names, first)
            assert {row.id for row in session.scalars(select(db.Question)) if row.state == "learned"} == names
            status = {row.query: row.status for row in session.scalars(select(db.Reply).where(db.Reply.by == "good"))}
        assert status == dict.fromkeys(names, "accepted")
        assert set(lies) == {query.id for query in service.streams["default"].state.adapter.open if query.batch == 1}
        comes_back(service)


@pytest.mark.parametrize(("rate", "exact"), [(2.5e-4, True), (1e-3, False)])
def test_what_was_learned_by_other_options_is_not_called_exact(tmp_path: Path, rate: float, exact: bool) -> None:
    def options(lr: float) -> dict[str, Any]:
        return {"keep_log": 1, **EVERY, "options": {**EVERY["options"], "lr": lr}}

    with running(tmp_path, **options(2.5e-4)) as (client, service):
        answered = fill(client, service, bad=True)
        boss = service.boss  # type: ignore[attr-defined]
    with running(tmp_path, **options(rate)) as (client, service):
        done = client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss).json()
        assert done["answers"] == len(answered["bad"]) > 10 and done["exact"] is exact


def test_what_was_confirmed_before_a_revocation_goes_and_what_comes_after_it_stays(tmp_path: Path) -> None:
    with running(tmp_path, keep_log=1, **EVERY) as (client, service):
        post(client, 0)
        settled(service)
        stream, hold = service.streams["default"], threading.Event()
        before, after = (item["query"] for item in client.get("/queries?limit=2").json()["queries"])
        stream.learner.run(lambda: assert_set(hold))
        assert client.post("/answers", json={"answers": [{"query": before, "label": 0}]}).status_code == 200
        # The learner has heard of neither the answer nor the revocation yet.
        done = stream.between(lambda: revoke(stream, by="local"))
        assert client.post("/answers", json={"answers": [{"query": after, "label": 1}]}).status_code == 200
        hold.set()
        assert done.result(30).answers == 1
        post(client, 1)
        settled(service)
        with service.ledger.read() as session:
            assert [row.query for row in session.scalars(select(db.Learned))] == [after]
            assert session.get_one(db.Question, ("default", before)).state == "open"


def assert_set(hold: threading.Event) -> None:
    assert hold.wait(30)


def test_a_revocation_survives_a_crash(tmp_path: Path) -> None:
    options = {"keep_log": 1, **EVERY}
    with running(tmp_path, **options) as (client, service):
        fill(client, service, bad=True)
        client.post("/streams/default/revoke", json={"by": "bad"}, headers=service.boss)  # type: ignore[attr-defined]
        post(client, 11, **service.boss)  # type: ignore[attr-defined]
        settled(service)
        comes_back(service)


def test_a_revocation_that_the_ledger_cannot_take_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    with running(tmp_path, keep_log=1, **EVERY) as (client, service):
        answered = fill(client, service, bad=True)
        boss = service.boss  # type: ignore[attr-defined]
        before = service.streams["default"].state.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(db, "notice", full)
            assert client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss).status_code == 503
        same(before, service.streams["default"].state.state_dict())
        with service.ledger.read() as session:
            assert set(answered["bad"]) < {row.query for row in session.scalars(select(db.Learned))}
        done = client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss).json()
        assert done["exact"] and done["answers"] == len(answered["bad"])


def test_one_answer_can_be_revoked_and_given_anew(tmp_path: Path) -> None:
    with running(tmp_path, keep_log=1, **EVERY) as (client, service):
        answered = fill(client, service, bad=True)
        boss, name = service.boss, answered["bad"][0]  # type: ignore[attr-defined]
        url = "/streams/default/revoke"
        assert client.post(url, json={"queries": [name]}, headers=boss).json()["answers"] == 1
        assert client.post(url, json={"queries": [name]}, headers=boss).status_code == 404
        assert client.post(url, json={}, headers=boss).status_code == 422
        answer = {"answers": [{"query": name, "label": int(name.split("-")[1])}]}
        assert client.post("/answers", json=answer, headers=boss).status_code == 200
        post(client, 11, **boss)
        settled(service)
        with service.ledger.read() as session:
            assert session.get(db.Learned, ("default", name)) is not None
        # The log still tells the whole story, but for the answer that no longer counts.
        with service.ledger.read() as session:
            gone = frozenset((r.seq or 0, r.query) for r in session.scalars(select(db.Reply)) if r.status == "revoked")
            state = service._make()
            for event in db.events(session, "default", 0):
                state.apply(event, gone)
        same(
            {key: state.state_dict()["adapter"][key] for key in ("update", "anchor", "guard")},
            {key: learned_part(service)[key] for key in ("update", "anchor", "guard")},
        )
        assert twin(service).position == state.position


def test_a_large_checkpoint_on_its_way_brings_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "PART", 1000)
    with running(tmp_path, keep_log=1, checkpoint_events=10_000, **EVERY) as (client, service):
        fill(client, service, bad=True)
        stream, go = service.streams["default"], threading.Event()
        store, saved = stream.store, stream.saved

        def held(state: bytes) -> str:
            if threading.current_thread().name == "checkpoint":
                assert go.wait(30)
            return store(state)

        def waited() -> None:
            go.set()
            saved()

        monkeypatch.setattr(stream, "store", held)
        stream.between(stream.checkpoint).result(30)
        monkeypatch.setattr(stream, "saved", waited)
        assert stream.between(lambda: revoke(stream, by="bad")).result(30).exact
        stream.saved()
        settled(service)
        comes_back(service)
