"""What is lost when a write, a commit or a disk fails, and who else pays for it? Nothing, and nobody."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import resource
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serve.parts import comes_back, crash, database, pictures, same, send, settings, settled, small_model
from serve.test_revoke import EVERY, assert_set, fill
from serve.test_trust import answer
from serve.web import png, post, running
from sqlalchemy import event, func, insert, select, text
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from torch import Tensor, nn

from wise_atta import errors
from wise_atta.serve import learner, ledger as db, service as service_module, state, trust
from wise_atta.serve.batcher import Job, Stopping
from wise_atta.serve.retention import backup, prune, restore
from wise_atta.serve.service import LiveStream, Service
from wise_atta.serve.state import Event, Outcome
from wise_atta.serve.uploads import write_npy


class Odd(nn.Module):
    """A model that divides by the contrast of a picture, forgets that a batch may have one row, or wants all memory."""

    greedy = threading.Event()  # of the class, since a service copies its model

    def __init__(self, net: nn.Module, *, contrast: bool = False, squeeze: bool = False) -> None:
        super().__init__()
        self.net, self.contrast, self.squeeze = net, contrast, squeeze

    def forward(self, x: Tensor) -> Tensor:
        if self.greedy.is_set() and threading.current_thread().name.startswith("learner"):
            torch.empty(2**60)
        logits: Tensor = self.net(x / x.std(dim=(1, 2, 3), keepdim=True) if self.contrast else x)
        return logits.squeeze() if self.squeeze else logits


def odd_service(folder: Path, **kind: bool) -> Service:
    model = small_model()
    return Service(dataclasses.replace(model, module=Odd(model.module, **kind).eval()), settings(folder, audit=0))


def full(*_: object, **__: object) -> None:
    raise OperationalError("INSERT", {}, Exception("database or disk is full"))


def in_file(folder: Path) -> str:
    """For what SQLite alone can show."""
    return f"sqlite:///{folder / 'ledger.db'}"


@contextmanager
def one_group(ledger: db.Ledger) -> Iterator[None]:
    """What is written inside is committed in one group."""
    here, free = threading.Event(), threading.Event()

    def wait(session: db.Session) -> None:
        here.set()
        assert free.wait(30)

    ledger.write(wait)
    assert here.wait(30)
    yield
    free.set()


def charged(service: Service) -> int:
    with service.ledger.read() as session:
        return session.scalar(select(func.sum(db.Charge.units))) or 0


def asked(service: Service) -> int:
    with service.ledger.read() as session:
        return session.scalar(select(func.count()).select_from(db.Question)) or 0


# -- one write among others ------------------------------------------------------------------------------------------


def test_what_the_database_refuses_fails_alone(tmp_path: Path) -> None:
    ledger = db.Ledger(database(tmp_path))

    def twice(session: db.Session) -> None:
        for _ in range(2):
            session.execute(insert(db.Reach).values(stream="a", cut=1))

    with one_group(ledger):
        good = ledger.write(lambda s: db.notice(s, None, "good"))
        bad = ledger.write(twice)
        last = ledger.write(lambda s: db.notice(s, None, "last"))
    with pytest.raises(IntegrityError):
        bad.result(30)
    good.result(30), last.result(30)
    with ledger.read() as session:
        assert session.scalars(select(db.Notice.kind).order_by(db.Notice.id)).all() == ["good", "last"]
        assert session.scalars(select(db.Reach)).all() == []
    ledger.close()


def test_a_write_that_fails_when_it_is_sent_off_fails_alone_and_has_no_effect(tmp_path: Path) -> None:
    ledger = db.Ledger(in_file(tmp_path))
    effects: list[object] = []
    with one_group(ledger):
        good = ledger.write(lambda s: db.notice(s, None, "good"))
        bad = ledger.write(lambda s: db.notice(s, "\ud800", "bad"), effects.append)
    with pytest.raises(UnicodeEncodeError):
        bad.result(30)
    good.result(30)
    ledger.write(lambda s: None).result(30)
    assert effects == []
    ledger.close()


def test_a_ledger_that_stops_leaves_nobody_waiting(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise KeyError("lost")

    with running(tmp_path) as (client, service):
        ledger = service.ledger
        with one_group(ledger):
            writes = [ledger.write(lambda s: None, fail), ledger.write(lambda s: None)]
        for write in (*writes, ledger.write(lambda s: None)):
            with pytest.raises(db.Lost, match="restart"):
                write.result(30)
        assert client.get("/healthz").status_code == 503
        assert client.post("/streams/default/reset").status_code == 503
    Service(small_model(), settings(tmp_path)).close()


def test_a_review_for_a_stream_that_is_not_served_waits_in_its_log(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path, streams=("old",), audit=0))
    for number in range(4):
        send(service.streams["old"], number)
    settled(service)

    def hold(session: db.Session) -> str:
        question = session.scalars(select(db.Question)).first()
        assert question is not None
        question.state = "held"
        session.add(db.Reply(stream="old", query=question.id, by="ann", at=0.0, label=1, status="held"))
        return question.id

    name = service.ledger.write(hold).result(30)
    service.close()
    with running(tmp_path, audit=0) as (client, service):
        (item,) = client.get("/review").json()
        assert client.post("/review", json={"answers": [item["answer"]], "accept": True}).status_code == 200
        post(client, 0)
    back = Service(small_model(), settings(tmp_path, streams=("old",), audit=0))
    send(back.streams["old"], 4)
    settled(back)
    with back.ledger.read() as session:
        assert [row.query for row in session.scalars(select(db.Learned))] == [name]
    back.close()


def test_a_picture_that_the_model_has_no_number_for_is_refused_alone(tmp_path: Path) -> None:
    service = odd_service(tmp_path, contrast=True)
    stream = service.streams["default"]
    black = service.uploads.files([write_npy(np.zeros((1, 8, 8, 1), np.uint8))])
    with one_group(service.ledger):
        stream.batcher.max_wait = 30.0
        jobs = [Job(f"r{n}", service.uploads.files([write_npy(pictures(n))])) for n in range(2)]
        bad = Job("black", [*jobs[0].samples, *black])
        for job in (jobs[0], bad, jobs[1]):
            stream.predict(job)
        stream.batcher.close()
    with pytest.raises(errors.BadInput, match=r"pictures \[4\]"):
        bad.future.result(30)
    for job in jobs:
        assert job.future.result(30).probabilities.isfinite().all()
    settled(service)
    with service.ledger.read() as session:
        (row,) = session.scalars(select(db.LoggedEvent))
        assert row.body["requests"] == [["r0", 4], ["r1", 4]]
    assert stream.tally.failed == 0
    service.close()


# -- memory and ledger ---------------------------------------------------------------------------------------------


def test_questions_of_a_batch_that_cannot_be_learned_are_asked_and_charged(tmp_path: Path) -> None:
    service = odd_service(tmp_path, squeeze=True)
    stream = service.streams["default"]
    for number in range(4):
        send(stream, number)
    settled(service)
    with service.ledger.read() as session:
        name = session.scalars(select(db.Question.id)).first()
    assert name is not None
    # A late label is learned in a batch of its own, which this model cannot take.
    write, submitted = trust.answer, [trust.Submission("default", name, 1)]
    (event_,) = service.ledger.write(lambda s: write(s, "ann", submitted, 4)).result(30)
    stream.learner.feed(event_)
    for number in range(4, 8):
        send(stream, number)
    settled(service)
    assert stream.tally.failed > 1
    with service.ledger.read() as session:
        (notice,) = session.scalars(select(db.Notice).where(db.Notice.kind == "failed"))
        assert notice.stream == "default" and notice.body["why"]
    assert charged(service) == asked(service) == stream.state.spent > 3
    service.close()
    odd_service(tmp_path, squeeze=True).close()


def starve(stream: LiveStream, number: int) -> None:
    """Send a batch that leaves the learner without memory, and wait until it has stopped."""
    Odd.greedy.set()
    try:
        send(stream, number)
        with pytest.raises(Stopping):
            stream.between(lambda: None).result(30)
    finally:
        Odd.greedy.clear()


def test_a_learner_without_memory_stops_and_a_restart_learns_the_batch(tmp_path: Path) -> None:
    service = odd_service(tmp_path)
    stream = service.streams["default"]
    for number in range(4):
        send(stream, number)
    settled(service)
    starve(stream, 4)
    assert isinstance(stream.learner.failed, MemoryError) and not service.healthy
    service.close()
    back = odd_service(tmp_path)
    assert back.streams["default"].state.adapter.number == 5
    assert charged(back) == asked(back) == back.streams["default"].state.spent > 2
    back.close()


def test_where_nobody_learns_any_more_nothing_is_predicted_and_nothing_piles_up(tmp_path: Path) -> None:
    service = odd_service(tmp_path)
    stream = service.streams["default"]
    starve(stream, 0)
    with pytest.raises(Stopping, match="restart"):
        send(stream, 1)
    # As of a person's answer, which goes into the log all the same.
    stream.learner.feed(service.ledger.write(lambda s: db.log(s, "default", "reset", {"policy": False})).result(30))
    assert stream.learner._queue.empty()
    with service.ledger.read() as session:
        assert [event.kind for event in db.events(session, "default", 0)] == ["batch", "reset"]
    service.close()
    back = odd_service(tmp_path)
    assert back.streams["default"].recovered == 2
    send(back.streams["default"], 1)
    back.close()


def test_a_label_that_was_revoked_approximately_is_not_returned_when_its_question_expires(tmp_path: Path) -> None:
    options = {"checkpoint_events": 3, **EVERY, "options": {**EVERY["options"], "expires_after": 6}}
    with running(tmp_path, **options) as (client, service):
        for number in range(3):
            post(client, number)
        settled(service)
        for query in client.get("/queries?limit=3").json()["queries"]:
            answer(client, query, 0)
        for number in range(3, 6):
            post(client, number)
        settled(service)
        assert client.post("/streams/default/revoke", json={"by": "local"}).json()["exact"] is False
        for number in range(6, 12):
            post(client, number)
        settled(service)
        assert charged(service) == service.streams["default"].state.spent
    Service(small_model(), settings(tmp_path, **options)).close()


def test_a_question_that_would_have_expired_without_its_revoked_answer_is_not_asked_again(tmp_path: Path) -> None:
    options = {"keep_log": 1, **EVERY, "options": {**EVERY["options"], "expires_after": 3}}
    with running(tmp_path, **options) as (client, service):
        post(client, 0)
        settled(service)
        first, second = client.get("/queries?limit=2").json()["queries"]
        answer(client, first, 0)
        for number in range(1, 6):
            post(client, number)
        settled(service)
        assert client.post("/streams/default/revoke", json={"by": "local"}).json()["exact"]
        with service.ledger.read() as session:
            states = [session.get_one(db.Question, ("default", q["query"])).state for q in (first, second)]
        assert states == ["expired", "expired"]
        assert charged(service) == service.streams["default"].state.spent


def test_an_expired_question_does_not_come_back_when_its_held_answer_is_rejected(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path))
    for number in range(4):
        send(service.streams["default"], number)
    settled(service)

    def reject(session: db.Session) -> str:
        question = session.scalars(select(db.Question)).first()
        assert question is not None
        question.state = "expired"
        held = db.Reply(stream="default", query=question.id, by="ann", at=0.0, label=1, status="held")
        session.add(held)
        session.flush()
        trust.review(session, [held.id], accept=False)
        session.refresh(question)
        return question.state

    assert service.ledger.write(reject).result(30) == "expired"
    service.close()


def test_a_trip_of_the_guard_is_noted_once_however_often_it_is_told(tmp_path: Path) -> None:
    ledger = db.Ledger(database(tmp_path))
    told = [Outcome(7, tripped="collapse"), Outcome(8, tripped="collapse")]
    for _ in range(2):
        ledger.write(lambda s: service_module.record(s, "default", told)).result(30)
    with ledger.read() as session:
        assert [row.body["seq"] for row in session.scalars(select(db.Notice).order_by(db.Notice.id))] == [7, 8]
    ledger.close()


def test_a_log_that_is_cut_during_a_revocation_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, keep_log=1, checkpoint_events=7, **EVERY) as (client, service):
        fill(client, service, bad=True)
        stream = service.streams["default"]
        number, events, recipes = stream.state.adapter.number, asked_events(service), db.recipes

        def meanwhile(session: db.Session, *rest: Any) -> set[str]:
            service.ledger.write(lambda s: prune(s, time.time() + 1)).result(30)
            return recipes(session, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(db, "recipes", meanwhile)
            boss = service.boss  # type: ignore[attr-defined]
            done = client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss).json()
        assert asked_events(service) < events == done["replayed"]
        assert done["exact"] and stream.state.adapter.number == number


def asked_events(service: Service) -> int:
    with service.ledger.read() as session:
        return session.scalar(select(func.count()).select_from(db.LoggedEvent)) or 0


def test_no_more_questions_wait_than_a_checkpoint_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # However small a picture is, its question has a name and numbers of its own.
    monkeypatch.setattr(state, "_ROOM", 10 * (8 * 8 * 4 + 1024))
    with running(tmp_path, **EVERY) as (client, service):
        stream = service.streams["default"]
        for number in range(6):
            post(client, number)
        settled(service)
        assert len(stream.state.adapter.open) == charged(service) == 12
        assert stream.state.adapter.number == 6
        for query in client.get("/queries?limit=4").json()["queries"]:
            answer(client, query, 0)
        for number in range(6, 12):
            post(client, number)
        settled(service)
        assert charged(service) == stream.state.spent == 16 <= stream.state.allowed
        comes_back(service)


@pytest.mark.parametrize("then", [None, "no weight beside the pixels", "no limit"])
def test_a_replay_is_held_to_the_limit_that_held_when_its_log_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str | None
) -> None:
    limit = (10 * (8 * 8 * 4 + 1024), 0 if then else 1024) if then != "no limit" else (1e9, 0)
    service = Service(small_model(), settings(tmp_path, **EVERY))
    stream = service.streams["default"]
    with monkeypatch.context() as patch:
        patch.setattr(service_module, "rooms", lambda: [limit])
        for number in range(30):
            send(stream, number)
        settled(service)
    assert len(stream.state.adapter.open) == {None: 12, "no limit": 120}.get(then, 52)

    def forget(session: db.Session) -> None:
        # Earlier versions did not write down what held.
        for row in session.scalars(select(db.LoggedEvent)):
            row.body = {key: value for key, value in row.body.items() if key != "room"}

    if then is not None:
        service.ledger.write(forget).result()
    monkeypatch.setattr(state, "_ROOM", 10 * (8 * 8 * 4 + 1024) if then else 1)
    comes_back(service)


def test_a_start_that_is_refused_leaves_the_ledger_to_those_who_can_replay_it(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path))
    for number in range(8):
        send(service.streams["default"], number)
    settled(service)
    before = service.streams["default"].state.state_dict()
    crash(service)
    for _ in range(2):
        with pytest.raises(errors.StateMismatch, match="did not come out as before"):
            Service(small_model(), settings(tmp_path, seed=1))
    back = Service(small_model(), service.settings)
    same(before, back.streams["default"].state.state_dict())
    back.close()


def test_a_checkpoint_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, checkpoint_events=7, **EVERY) as (client, service):
        fill(client, service, bad=True)
        before = service.streams["default"].state.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(db, "_ROW", {"sqlite": 100, "postgresql": 100})
            boss = service.boss  # type: ignore[attr-defined]
            done = client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss)
        assert done.status_code == 422 and "fewer labels" in done.json()["detail"]
        same(before, service.streams["default"].state.state_dict())
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("why", ["it is too large", "a part fails", "its place in the log fails"])
def test_large_checkpoints_that_cannot_be_written_take_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(db, "PART", 1000)
    monkeypatch.setattr(learner, "_AGAIN_S", 1000.0)
    service = Service(small_model(), settings(tmp_path))
    stream, add_part, tried = service.streams["default"], db._add_part, []

    def some(session: db.Session, **part: Any) -> None:
        tried.append(part["number"])
        if why == "a part fails" and part["number"] == 5:
            full()
        add_part(session, **part)

    monkeypatch.setattr(db, "_add_part", some)
    with monkeypatch.context() as patch:
        if why == "it is too large":
            patch.setattr(db, "_ROW", {"sqlite": 100, "postgresql": 100})
        elif why == "its place in the log fails":
            patch.setattr(db, "add_checkpoint", full)
        for number in range(3):
            send(stream, number)
            settled(service)
            stream.between(stream.checkpoint).result(30)
            stream.saved()
            for _ in range(100):
                # Each lets what was begun go one step on; what is committed together with what fails, fails too.
                with contextlib.suppress(OperationalError):
                    service.ledger.write(lambda session: None).result(30)
    with service.ledger.read() as session:
        assert session.scalar(select(func.count()).select_from(db.Part)) == 0
    assert bool(tried) is (why != "it is too large")
    comes_back(service)


def test_what_kills_left_of_large_checkpoints_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "PART", 1000)
    for _ in range(2):
        service = Service(small_model(), settings(tmp_path))
        for _ in range(100):
            service.ledger.write(lambda session: None).result(30)
        with service.ledger.read() as session:
            assert session.scalar(select(func.count()).select_from(db.Part)) == 0
        service.streams["default"].store(b"x" * 9500)
        crash(service)


def test_the_labels_of_somebody_who_gave_many_can_be_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, database=in_file(tmp_path), checkpoint_events=7, **EVERY) as (client, service):
        answered = fill(client, service, bad=True)

        @event.listens_for(service.ledger._writing, "begin")
        def few(connection: Any) -> None:
            connection.connection.dbapi_connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 19)

        monkeypatch.setattr(db, "_NAMES", 10)
        boss = service.boss  # type: ignore[attr-defined]
        done = client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss)
        assert done.status_code == 200 and done.json()["answers"] == len(answered["bad"]) > 19


# -- a full disk -----------------------------------------------------------------------------------------------------


@contextmanager
def few_pages(service: Service) -> Iterator[None]:
    """The database may not grow: statements fail."""
    limit = 0

    @event.listens_for(service.ledger._writing, "begin")
    def hold(connection: Any) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count={limit or 2**30}")

    with service.ledger.read() as session:
        limit = session.execute(text("PRAGMA page_count")).scalar_one()
    yield
    limit = 0


@contextmanager
def small_files(service: Service) -> Iterator[None]:
    """No file may grow further: commits fail."""
    wal = Path(f"{service.ledger._writing.url.database}-wal")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size + 40_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("scarce", [few_pages, small_files])
def test_a_disk_that_is_full_for_a_while_costs_the_requests_of_that_time_alone(
    tmp_path: Path, scarce: Callable[[Service], Any]
) -> None:
    options = settings(tmp_path, database=in_file(tmp_path), checkpoint_events=3)
    service = Service(small_model(), options)
    stream = service.streams["default"]
    for number in range(4):
        send(stream, number)
    settled(service)
    refused = 0
    with scarce(service):
        for number in range(4, 20):
            refused += is_refused(stream, number)
    assert refused > 5
    for number in range(20, 24):
        assert not is_refused(stream, number)
    settled(service)
    assert stream.state.adapter.number == 24 - refused and stream.learner.waiting == 0
    assert charged(service) == asked(service) == stream.state.spent > 2
    comes_back(service)


def is_refused(stream: LiveStream, number: int) -> bool:
    try:
        send(stream, number)
    except SQLAlchemyError:
        return True
    return False


def test_questions_that_a_full_disk_kept_back_come_without_another_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "_AGAIN_S", 0.05)
    service = Service(small_model(), settings(tmp_path, checkpoint_s=0.05))
    stream, hold, saved = service.streams["default"], threading.Event(), threading.Event()

    def save() -> None:
        stream.checkpoint()
        saved.set()

    stream.learner.save = save
    stream.learner.run(lambda: assert_set(hold))
    for number in range(5):
        send(stream, number)
    with monkeypatch.context() as patch:
        patch.setattr(service_module, "record", full)
        hold.set()
        assert_set(saved)
        # Whatever is committed in one group with what fails, fails too.
        with contextlib.suppress(OperationalError):
            service.ledger.write(lambda session: None).result(30)
        assert asked(service) == 0
    deadline = time.monotonic() + 30
    while asked(service) == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    settled(service)
    assert asked(service) == stream.state.spent > 0
    service.close()


def test_a_disk_that_is_full_at_the_end_keeps_no_stream_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = settings(tmp_path, streams=("a", "b"))
    service = Service(small_model(), options)
    for stream in service.streams.values():
        send(stream, 1)
    with monkeypatch.context() as patch:
        patch.setattr(db, "sweep", full)
        patch.setattr(db, "add_checkpoint", full)
        service.close()
    before = {name: stream.state.state_dict() for name, stream in service.streams.items()}
    back = Service(small_model(), options)
    for name, stream in back.streams.items():
        same(before[name], stream.state.state_dict())
    back.close()


def test_a_service_that_cannot_even_note_its_start_lets_go_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(db, "notice", full)
        with pytest.raises(OperationalError):
            Service(small_model(), settings(tmp_path))
    Service(small_model(), settings(tmp_path)).close()


def test_a_large_upload_without_room_for_it_is_refused_for_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as (client, _):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        reply = client.post("/predict", files={"pictures": ("a.bmp", png(1, kind="BMP") + bytes(2**21))})
        assert reply.status_code == 503 and "retry-after" in reply.headers


def test_a_copy_that_does_not_fit_leaves_the_ledger_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    service = Service(small_model(), settings(tmp_path, database=in_file(tmp_path)))
    send(service.streams["default"], 0)
    service.close()
    backup(service.settings.database, tmp_path / "copy.db")
    before = (tmp_path / "ledger.db").read_bytes()
    monkeypatch.setattr(shutil, "copyfile", no_room)
    with pytest.raises(OSError, match="No space"):
        restore(tmp_path / "copy.db", service.settings.database)
    assert (tmp_path / "ledger.db").read_bytes() == before


def test_a_restore_that_was_interrupted_is_not_taken_for_a_new_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(self: Path, target: str | Path) -> Path:
        if self.name.endswith(".part"):
            raise KeyboardInterrupt
        return move(self, target)

    service = Service(small_model(), settings(tmp_path, database=in_file(tmp_path)))
    send(service.streams["default"], 0)
    service.close()
    backup(service.settings.database, tmp_path / "copy.db")
    move = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            restore(tmp_path / "copy.db", service.settings.database)
    with pytest.raises(errors.BadConfig, match="restore was interrupted"):
        Service(small_model(), service.settings)
    assert not (tmp_path / "ledger.db").exists()
    restore(tmp_path / "copy.db", service.settings.database)
    back = Service(small_model(), service.settings)
    assert back.streams["default"].state.adapter.number == 1
    back.close()


def test_a_revocation_behind_an_event_that_stops_the_learner_is_refused(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path))
    stream, hold = service.streams["default"], threading.Event()
    send(stream, 0)
    settled(service)
    stream.learner.run(lambda: assert_set(hold))
    # An event that was applied before: no state takes it twice.
    stream.learner.feed(Event(stream.state.position, "default", "reset", {"policy": False}))
    before = stream.between(lambda: None)
    hold.set()
    for done in (before, stream.between(lambda: None)):
        with pytest.raises(Stopping, match="restart"):
            done.result(10)
    assert not service.healthy
    service.close()
