"""Are questions handed out once, answers taken once, and strangers to the truth found out?"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from serve.parts import crash, same, settled, twin
from serve.web import post, running, token
from sqlalchemy import event, func, select
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from wise_atta.serve import ledger as db, trust
from wise_atta.serve.service import Service


def ask(client: TestClient, service: Service, batches: int = 6, start: int = 0, **headers: str) -> None:
    for number in range(start, start + batches):
        post(client, number, **headers)
    settled(service)


def answer(client: TestClient, query: dict[str, Any], label: object, headers: dict[str, str] | None = None) -> Any:
    body = {"answers": [{"stream": query["stream"], "query": query["query"], "label": label}]}
    return client.post("/answers", json=body, headers=headers)


def test_nobody_goes_through_all_answers_and_questions_for_a_few(tmp_path: Path) -> None:
    seen: set[str] = set()
    with running(tmp_path, audit=0, database=f"sqlite:///{tmp_path / 'ledger.db'}") as (client, service):
        ask(client, service)
        (query,) = client.get("/queries").json()["queries"]
        for engine in (service.ledger._writing, service.ledger._reading):
            event.listen(engine, "before_cursor_execute", lambda *arguments: seen.add(arguments[2]))
        assert answer(client, query, 1).status_code == 200
        client.get("/queries"), client.get("/streams/default/labels"), client.get("/review")
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
            for statement in [one for one in seen if one.startswith("SELECT")]:
                plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}", [0] * statement.count("?")).fetchall()
                assert not [step for *_, step in plan if step.startswith(("SCAN answers", "SCAN queries"))], statement
    assert sum("FROM answers" in one for one in seen) >= 5


def test_a_question_is_shown_answered_and_learned_once(tmp_path: Path) -> None:
    with running(tmp_path, audit=0) as (client, service):
        ask(client, service)
        questions = client.get("/queries").json()
        (query,) = questions["queries"]
        assert questions["open"] == questions["spent"] <= questions["allowed"]
        assert query["guesses"][0]["name"] in "abcd"
        assert client.get(query["picture"]).headers["content-type"] == "image/png"
        assert answer(client, query, 2).json() == {"taken": 1, "held": 0}
        ask(client, service, 1, start=6)
        with service.ledger.read() as session:
            row = session.get(db.Question, (query["stream"], query["query"]))
            assert row is not None and row.state == "learned"
            assert [r.query for r in session.scalars(select(db.Learned))] == [query["query"]]
            assert session.scalars(select(db.Showing.by)).all() == ["local"]
        counts = service.streams["default"].state.adapter.counts
        assert (counts.shown, counts.answered, counts.learned) == (1, 1, 1)
        same(service.streams["default"].state.state_dict(), twin(service).state_dict())


def test_two_people_never_hold_the_same_picture(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service):
        ask(client, service)
        boss = token(service, "boss", "admin")
        ann, bob = token(service, "ann", "annotator"), token(service, "bob", "annotator")
        first = client.get("/queries?limit=3", headers=ann).json()["queries"]
        again = client.get("/queries?limit=3", headers=ann).json()["queries"]
        other = client.get("/queries?limit=50", headers=bob).json()["queries"]
        ids = {query["query"] for query in first}
        assert len(ids) == 3 and {query["query"] for query in again} == ids
        assert other and ids.isdisjoint(query["query"] for query in other)
        refused = answer(client, first[0], 1, bob)
        assert refused.status_code == 409 and "somebody else" in refused.json()["detail"]
        assert client.get("/queries", headers=boss).json()["queries"] == []


def test_a_clock_that_is_put_back_locks_no_question_away(tmp_path: Path) -> None:
    with running(tmp_path, audit=0) as (client, service):
        ask(client, service)
        now = time.time()

        def take(by: str, at: float) -> list[str]:
            def write(session: Session) -> list[str]:
                return [row.id for row in trust.lease(session, ["default"], by, limit=50, seconds=60, now=at)[0]]

            return service.ledger.write(write).result(30)

        held = take("ann", now)
        assert held and take("bob", now + 59) == [] == take("bob", now) == take("bob", now - 0.5)
        assert take("bob", now - 3600) == held


def test_a_lease_ends_by_itself(tmp_path: Path) -> None:
    with running(tmp_path, lease_s=0) as (client, service):
        ask(client, service)
        ann, bob = token(service, "ann", "annotator"), token(service, "bob", "annotator")
        (mine,) = client.get("/queries", headers=ann).json()["queries"]
        (theirs,) = client.get("/queries", headers=bob).json()["queries"]
        assert mine["query"] == theirs["query"]
        with service.ledger.read() as session:
            assert session.scalars(select(db.Showing.by).order_by(db.Showing.id)).all() == ["ann", "bob"]


def test_a_question_that_is_given_back_goes_to_the_next_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service):
        ask(client, service)
        ann, bob = token(service, "ann", "annotator"), token(service, "bob", "annotator")
        (mine,) = client.get("/queries", headers=ann).json()["queries"]
        body = {"queries": [{"stream": mine["stream"], "query": mine["query"]}]}
        (other,) = client.get("/queries", headers=bob).json()["queries"]
        assert other["query"] != mine["query"]
        # Nobody gives back what is in other hands.
        assert client.post("/queries/release", json=body, headers=bob).status_code == 200
        assert answer(client, mine, 1, bob).status_code == 409
        assert client.post("/queries/release", json=body, headers=ann).status_code == 200
        held = client.get("/queries?limit=2", headers=bob).json()["queries"]
        assert [query["query"] for query in held] == [other["query"], mine["query"]]


def test_the_same_answer_again_changes_nothing_and_another_is_a_conflict(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service):
        ask(client, service)
        (query,) = client.get("/queries").json()["queries"]
        assert answer(client, query, True).status_code == 422
        assert answer(client, query, "1").status_code == 422
        assert answer(client, query, 1).status_code == 200
        assert answer(client, query, 1).status_code == 200
        assert answer(client, query, 2).status_code == 409
        assert answer(client, query, "cant_tell").status_code == 409
        with service.ledger.read() as session:
            assert session.scalar(select(func.count()).select_from(db.Reply)) == 1


def test_all_answers_of_a_call_count_or_none(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service):
        ask(client, service)
        first, second = client.get("/queries?limit=2").json()["queries"]
        for bad, status in (({"query": "999-0", "label": 1}, 404), ({"query": second["query"], "label": 4}, 422)):
            body = {"answers": [{"query": first["query"], "label": 1}, bad]}
            assert client.post("/answers", json=body).status_code == status
        with service.ledger.read() as session:
            assert session.scalar(select(func.count()).select_from(db.Reply)) == 0


def test_skip_leaves_it_to_others_and_cant_tell_closes_it(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service):
        ask(client, service)
        ann, bob = token(service, "ann", "annotator"), token(service, "bob", "annotator")
        (query,) = client.get("/queries", headers=ann).json()["queries"]
        assert answer(client, query, "skip", ann).status_code == 200
        (next_one,) = client.get("/queries", headers=ann).json()["queries"]
        assert next_one["query"] != query["query"]
        (theirs,) = client.get("/queries", headers=bob).json()["queries"]
        assert theirs["query"] == query["query"]
        assert answer(client, query, "cant_tell", bob).status_code == 200
        spent = service.streams["default"].state.spent
        ask(client, service, 0)
        with service.ledger.read() as session:
            row = session.get(db.Question, (query["stream"], query["query"]))
            assert row is not None and row.state == "cant_tell"
        assert service.streams["default"].state.spent == spent


def test_audited_answers_measure_and_do_not_teach(tmp_path: Path) -> None:
    with running(tmp_path, ratio=0.5, audit=1) as (client, service):
        ask(client, service, 10)
        assert client.get("/streams/default").json()["accuracy"] is None
        questions = client.get("/queries?limit=50").json()["queries"]
        assert len(questions) > 10 and all(query["audit"] for query in questions)
        for place, query in enumerate(questions):
            label = query["guesses"][0]["label"]
            assert answer(client, query, label if place % 4 else (label + 1) % 4).status_code == 200
        ask(client, service, 1, start=10)
        accuracy = client.get("/streams/default").json()["accuracy"]
        assert accuracy["total"] == len(questions)
        assert accuracy["right"] == len(questions) - len(range(0, len(questions), 4))
        assert accuracy["low"] < accuracy["share"] < accuracy["high"]
        with service.ledger.read() as session:
            assert session.scalar(select(func.count()).select_from(db.Learned)) == 0
        guard = service.streams["default"].state.adapter.guard
        assert guard is not None and len(guard.state_dict()["right"]) > 0


def test_answers_that_came_before_a_crash_are_learned_after_it(tmp_path: Path) -> None:
    with running(tmp_path, audit=0) as (client, service):
        ask(client, service)
        questions = client.get("/queries?limit=4").json()["queries"]
        for query in questions[:2]:
            answer(client, query, 1)
        settled(service)
        before = service.streams["default"].state.state_dict()
        crash(service)
        with running(tmp_path, audit=0) as (again, back):
            state = back.streams["default"].state
            same(state.state_dict(), before)
            assert len(state.adapter.open) == state.spent - 2
            post(again, 6)
            settled(back)
            with back.ledger.read() as session:
                learned = {row.query for row in session.scalars(select(db.Learned))}
            assert learned == {query["query"] for query in questions[:2]}
            # What was open is open, and still in the same hands.
            assert {q["query"] for q in again.get("/queries?limit=2").json()["queries"]} == {
                query["query"] for query in questions[2:]
            }


def test_whoever_differs_far_more_than_the_others_is_held_for_review(tmp_path: Path) -> None:
    with running(tmp_path, ratio=1, audit=0, options={"labels": 4}) as (client, service):
        good, bad = token(service, "good", "annotator"), token(service, "bad", "annotator")
        boss = token(service, "boss", "admin")
        held = 0
        for number in range(14):
            post(client, number, **boss)
            settled(service)
            for headers, wrong in ((good, 0), (bad, 1)):
                for query in client.get("/queries?limit=2", headers=headers).json()["queries"]:
                    label = (query["guesses"][0]["label"] + wrong) % 4
                    held += answer(client, query, label, headers).json()["held"]
        assert held > 0
        records = {item["by"]: item for item in client.get("/annotators", headers=boss).json()}
        assert records["bad"]["suspicious"] and not records["good"]["suspicious"]
        waiting = client.get("/review", headers=boss).json()
        assert len(waiting) == held and {item["by"] for item in waiting} == {"bad"}
        assert client.get("/review", headers=good).status_code == 403
        first, *rest = [item["answer"] for item in waiting]
        assert client.post("/review", json={"answers": [first], "accept": True}, headers=boss).status_code == 200
        assert client.post("/review", json={"answers": rest, "accept": False}, headers=boss).status_code == 200
        assert client.post("/review", json={"answers": [first], "accept": True}, headers=boss).status_code == 404
        post(client, 14, **boss)
        settled(service)
        with service.ledger.read() as session:
            learned = {row.query for row in session.scalars(select(db.Learned))}
            states = {item["query"]: session.get(db.Question, ("default", item["query"])) for item in waiting}
        assert waiting[0]["query"] in learned
        for item in waiting[1:]:
            row = states[item["query"]]
            assert row is not None and row.state == "open" and item["query"] not in learned
        same(service.streams["default"].state.state_dict(), twin(service).state_dict())


def test_while_an_answer_waits_for_a_review_nobody_elses_is_said_to_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "is_suspicious", lambda session, by, now: by == "bad")
    with running(tmp_path, audit=0) as (client, service):
        boss = token(service, "boss", "admin")
        good, bad = token(service, "good", "annotator"), token(service, "bad", "annotator")
        ask(client, service, **boss)
        (query,) = client.get("/queries", headers=bad).json()["queries"]
        assert answer(client, query, 3, bad).json() == {"taken": 0, "held": 1}
        assert answer(client, query, 3, bad).status_code == 200
        for label in (3, 1):
            refused = answer(client, query, label, good)
            assert refused.status_code == 409 and "review" in refused.json()["detail"]
        (waiting,) = client.get("/review", headers=boss).json()
        client.post("/review", json={"answers": [waiting["answer"]], "accept": False}, headers=boss)
        assert answer(client, query, 3, good).json() == {"taken": 1, "held": 0}


def test_reset_returns_the_model_and_leaves_the_account(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service):
        ask(client, service)
        stream = service.streams["default"]
        spent = stream.state.spent
        assert stream.drift > 0 and spent > 0
        assert client.post("/streams/default/reset").status_code == 200
        settled(service)
        assert stream.drift == 0 and stream.state.spent == spent
        assert [n["kind"] for n in client.get("/notices").json()] == ["reset", "start"]
        same(stream.state.state_dict(), twin(service).state_dict())
