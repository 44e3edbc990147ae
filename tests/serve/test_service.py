"""Does a stream predict at once, learn behind it, and come back as it was?"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serve.parts import comes_back, crash, database, pictures, same, send, settings, settled, small_model, twin
from sqlalchemy import create_engine, delete, func, inspect, select, text
from sqlalchemy.exc import OperationalError

from wise_atta import errors
from wise_atta.serve import learner, ledger as db, service as service_module
from wise_atta.serve.batcher import Full, Job
from wise_atta.serve.config import Limits
from wise_atta.serve.retention import backup, restore
from wise_atta.serve.service import Service
from wise_atta.serve.state import pack
from wise_atta.serve.uploads import write_npy


def test_a_reply_is_in_the_log_and_its_batch_is_learned(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path))
    stream = service.streams["default"]
    for number in range(5):
        reply = send(stream, number)
    settled(service)
    assert reply.probabilities.shape == (4, 4)
    assert torch.allclose(reply.probabilities.sum(dim=1), torch.ones(4, dtype=torch.float64))
    with service.ledger.read() as session:
        rows = session.scalars(select(db.LoggedEvent)).all()
        assert [row.kind for row in rows] == ["batch"] * 5
        assert [row.body["requests"] for row in rows] == [[[f"r{number}", 4]] for number in range(5)]
        assert not any(row.skipped for row in rows)
    assert stream.tally.learned == 5
    assert stream.state.adapter.number == 5
    service.close()


def test_the_ledger_and_the_account_agree_and_the_budget_holds(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path))
    stream = service.streams["default"]
    for number in range(30):
        send(stream, number)
        settled(service)
        seen = (number + 1) * 4
        assert stream.state.spent <= stream.state.allowed <= seen // 2
    with service.ledger.read() as session:
        assert session.scalar(select(func.sum(db.Charge.units))) == stream.state.spent > 20
        questions = db.count_by(session, db.Question.audit)
    assert questions[True] == stream.state.audit.account.spent > 5
    service.close()


def test_an_answer_does_not_depend_on_the_other_pictures_of_its_batch(tmp_path: Path) -> None:
    for statistics in ("source", "ema"):
        service = Service(small_model(), settings(tmp_path / statistics, statistics=statistics))
        stream = service.streams["default"]
        for number in range(3):
            send(stream, number)
        settled(service)
        together = torch.stack([s.pixels for s in service.uploads.files([write_npy(pictures(9, 16))])])
        alone, _ = stream.infer(together[:1])
        among, _ = stream.infer(together)
        torch.testing.assert_close(alone, among[:1])
        service.close()


def test_a_single_picture_is_answered_and_learned(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path, statistics="ema"))
    for number in range(4):
        send(service.streams["default"], number, count=1)
    settled(service)
    assert service.streams["default"].tally.learned == 4
    service.close()


def test_streams_do_not_touch_each_other(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path, streams=("a", "b")))
    for number in range(4):
        send(service.streams["a"], number)
    settled(service)
    assert service.streams["a"].state.adapter.number == 4
    assert service.streams["b"].state.adapter.number == 0
    assert service.streams["b"].state.spent == 0
    assert service.streams["b"].drift == 0 < service.streams["a"].drift
    service.close()


def test_predictions_do_not_wait_while_learners_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = threading.BoundedSemaphore(1)
    monkeypatch.setattr(learner, "_TURNS", turns)
    service = Service(small_model(), settings(tmp_path, streams=("left", "right")))
    streams = list(service.streams.values())
    with turns:
        for stream in streams:
            send(stream, 0)
        assert [stream.learner.waiting for stream in streams] == [1, 1]
        assert [stream.tally.learned for stream in streams] == [0, 0]
    settled(service)
    assert [stream.tally.learned for stream in streams] == [1, 1]
    service.close()


def test_a_lagging_learner_skips_updates_and_counts_them(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path, max_lag=2))
    stream = service.streams["default"]
    hold = threading.Event()
    stream.learner.run(lambda: assert_set(hold))
    for number in range(6):
        send(stream, number)
    hold.set()
    settled(service)
    assert stream.tally.skipped == 4
    assert stream.tally.learned == 2
    with service.ledger.read() as session:
        skipped = session.scalars(select(db.LoggedEvent.skipped).order_by(db.LoggedEvent.seq)).all()
    assert skipped == [False, False, True, True, True, True]
    same(stream.state.state_dict(), twin(service).state_dict())
    service.close()


def assert_set(hold: threading.Event) -> None:
    assert hold.wait(30)


def wait(here: threading.Event, free: threading.Event) -> None:
    here.set()
    assert_set(free)


def test_a_full_queue_refuses_and_says_when_to_come_back(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path, max_batch=4, max_queue=8))
    stream = service.streams["default"]
    hold = threading.Event()
    service.ledger.write(lambda session: assert_set(hold))
    jobs = [Job(f"r{n}", service.uploads.files([write_npy(pictures(n))])) for n in range(3)]
    for job in jobs[:2]:
        stream.predict(job)
    with pytest.raises(Full) as refused:
        stream.predict(jobs[2])
    assert refused.value.after >= 1
    hold.set()
    for job in jobs[:2]:
        assert len(job.future.result(30).probabilities) == 4
    stream.predict(jobs[2]).result(30)
    service.close()


def test_small_requests_share_a_batch(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path, max_batch=8, max_wait_ms=10_000))
    stream = service.streams["default"]
    jobs = [Job(f"r{n}", service.uploads.files([write_npy(pictures(n, 2))])) for n in range(4)]
    for job in jobs:
        stream.predict(job)
    for job in jobs:
        job.future.result(30)
    assert stream.tally.batches == 1
    service.close()


@pytest.mark.parametrize("statistics", ["source", "ema", "mixed"])
def test_after_a_crash_the_state_is_as_it_was(tmp_path: Path, statistics: str) -> None:
    options = {"checkpoint_events": 4, "statistics": statistics}
    service = Service(small_model(), settings(tmp_path, **options))
    stream = service.streams["default"]
    for number in range(10):
        send(stream, number)
    settled(service)
    before = stream.state.state_dict()
    crash(service)
    back = Service(small_model(), settings(tmp_path, **options))
    again = back.streams["default"]
    assert again.recovered == 2  # checkpoints after 4 and 8
    same(again.state.state_dict(), before)
    with back.ledger.read() as session:
        assert session.scalar(select(func.sum(db.Charge.units))) == again.state.spent
    # It goes on as if nothing had happened.
    send(again, 10)
    settled(back)
    back.close()


def test_what_the_learner_had_not_told_the_ledger_is_told_after_the_restart(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path))
    stream = service.streams["default"]
    hold = threading.Event()
    stream.learner.run(lambda: assert_set(hold))
    for number in range(8):
        send(stream, number)
    crash(service)  # nothing was learned yet
    hold.set()
    back = Service(small_model(), settings(tmp_path))
    assert back.streams["default"].recovered == 8
    assert back.streams["default"].state.adapter.number == 8
    with back.ledger.read() as session:
        asked = session.scalar(select(func.count()).select_from(db.Question))
    assert asked == back.streams["default"].state.spent > 0
    back.close()


@pytest.mark.parametrize("choice", [{"method": "simatta"}, {"options": {"labels": 2}}], ids=["simatta", "labels"])
def test_pictures_that_come_one_by_one_are_learned_however_many_labels_a_batch_may_have(
    tmp_path: Path, choice: dict[str, Any]
) -> None:
    service = Service(small_model(), settings(tmp_path, audit=0, **choice))
    for number in range(12):
        send(service.streams["default"], number, count=1)
    settled(service)
    tally, state = service.streams["default"].tally, service.streams["default"].state
    assert (tally.learned, tally.failed) == (12, 0) and state.spent > 0
    service.close()


def test_the_log_ends_at_a_checkpoint_unless_it_is_kept(tmp_path: Path) -> None:
    for keep, left in ((0.0, 0), (1.0, 6)):
        service = Service(small_model(), settings(tmp_path / str(keep), keep_log=keep))
        for number in range(6):
            send(service.streams["default"], number)
        service.close()
        ledger = db.Ledger(service.settings.database)
        with ledger.read() as session:
            assert session.scalar(select(func.count()).select_from(db.LoggedEvent)) == left
            assert session.scalar(select(func.count()).select_from(db.Checkpoint)) == 1
        ledger.close()


def test_the_log_is_deleted_little_by_little(tmp_path: Path) -> None:
    ledger = db.Ledger(database(tmp_path))
    for _ in range(20):
        ledger.write(lambda s: db.log(s, "a", "show", {"queries": []}))
    ledger.write(lambda s: db.add_checkpoint(s, "a", 18, b"state", keep=1, keep_log=0)).result()
    sweeps = [ledger.write(lambda s: db.sweep(s, "a", limit=8)).result() for _ in range(4)]
    assert sweeps == [True, True, False, False]
    with ledger.read() as session:
        assert [event.seq for event in db.events(session, "a", 0)] == [19, 20]
        assert db.reaches_back_to(session, "a") == 18
    ledger.close()


def test_kept_checkpoints_lie_closer_together_the_younger_they_are(tmp_path: Path) -> None:
    ledger = db.Ledger(database(tmp_path))
    for seq in range(1, 101):
        ledger.write(lambda s, seq=seq: db.add_checkpoint(s, "a", seq, b"state", keep=6, keep_log=0)).result()
    with ledger.read() as session:
        seqs = list(session.scalars(select(db.Checkpoint.seq).order_by(db.Checkpoint.seq)))
    ledger.close()
    assert len(seqs) == 6 and seqs[0] == 1 and seqs[-1] == 100
    gaps = np.diff(seqs)
    assert (gaps[:-1] >= gaps[1:]).all() and gaps[0] > gaps[-1]


def test_a_log_that_is_kept_has_few_checkpoints_and_can_be_gone_through_from_its_beginning(tmp_path: Path) -> None:
    ledger, hour, keep_log = db.Ledger(database(tmp_path)), 3600.0, 10.0

    def write(session: db.Session, at: float) -> tuple[list[tuple[int, float]], int]:
        seq = db.log(session, "a", "show", {"queries": []}).seq
        db.add_checkpoint(session, "a", seq, b"state", keep=5, keep_log=keep_log, now=at)
        checkpoints = session.execute(select(db.Checkpoint.seq, db.Checkpoint.at).order_by(db.Checkpoint.seq)).all()
        return [(row.seq, row.at) for row in checkpoints], db.reaches_back_to(session, "a")

    for number in range(600):
        rows, cut = ledger.write(partial(write, at=number * hour)).result()
        ages = [number * hour / 86400 - at / 86400 for _, at in rows]
        assert len(rows) <= 12 and ages[-1] == 0
        # The log begins at a checkpoint, which is hardly older than it should be.
        assert rows[0][0] == cut or cut == 0
        assert ages[0] <= keep_log * 1.2 + 0.1
        assert number < 240 or ages[0] >= keep_log
    ledger.close()


def stored(service: Service) -> tuple[int, int]:
    """How many parts of checkpoints there are, and how many of no checkpoint."""
    with service.ledger.read() as session:
        lone = db.Part.digest.not_in(select(db.Checkpoint.digest))
        count = select(func.count()).select_from(db.Part)
        return session.scalar(count) or 0, session.scalar(count.where(lone)) or 0


def test_replies_wait_for_no_more_than_a_part_of_a_large_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "PART", 1000)
    service = Service(small_model(), settings(tmp_path, checkpoints=2))
    stream = service.streams["default"]
    for number in range(6):
        send(stream, number)
        settled(service)
        before = service.ledger.groups
        stream.between(stream.checkpoint).result(30)
        stream.saved()
        with service.ledger.read() as session:
            largest = max(session.scalars(select(func.length(db.Part.data))), default=0)
            parts = session.scalar(select(func.count()).where(db.Part.digest == stream._storing)) or 0
            assert set(session.scalars(select(func.length(db.Checkpoint.state)))) <= {0}
        # Each is committed by itself, so that others get their turn.
        assert largest == 1000 and service.ledger.groups - before >= parts > 5
    while stream._sweep().result(30):
        pass
    assert stored(service)[1] == 0
    comes_back(service)


def test_a_kill_in_the_middle_of_a_large_checkpoint_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "PART", 1000)
    service = Service(small_model(), settings(tmp_path))
    stream = service.streams["default"]
    send(stream, 0)
    settled(service)
    stream.between(stream.checkpoint).result(30)
    stream.saved()
    for number in range(1, 4):
        send(stream, number)
    settled(service)
    stream.store(pack(stream.state.state_dict())[:-1500])
    before = stream.state.state_dict()
    assert stored(service)[1] > 5
    crash(service)
    back = Service(small_model(), service.settings)
    again = back.streams["default"]
    assert again.recovered == 3
    same(before, again.state.state_dict())
    send(again, 4)
    back.close()
    # What was left over is gone with the next checkpoint.
    last = Service(small_model(), service.settings)
    count, lone = stored(last)
    assert count > 5 and lone == 0 and last.streams["default"].recovered == 0
    last.close()


def test_a_large_checkpoint_that_lacks_a_part_is_told_from_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "PART", 1000)
    service = Service(small_model(), settings(tmp_path))
    send(service.streams["default"], 0)
    service.close()
    ledger = db.Ledger(service.settings.database)
    ledger.write(lambda session: session.execute(delete(db.Part).where(db.Part.number == 3))).result()
    ledger.close()
    with pytest.raises(errors.StateMismatch, match="damaged"):
        Service(small_model(), service.settings)


def test_a_second_service_on_the_same_database_is_refused(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path))
    with pytest.raises(db.Busy, match="in use by another service"):
        Service(small_model(), settings(tmp_path))
    service.close()


def test_a_link_to_a_database_is_that_database(tmp_path: Path) -> None:
    url, link = f"sqlite:///{tmp_path / 'ledger.db'}", tmp_path / "elsewhere" / "link.db"
    service = Service(small_model(), settings(tmp_path, database=url))
    link.parent.mkdir()
    link.symlink_to(tmp_path / "ledger.db")
    with pytest.raises(db.Busy, match="in use by another service"):
        db.Ledger(f"sqlite:///{link}")
    backup(url, tmp_path / "copy.db")
    with pytest.raises(db.Busy, match="in use by another service"):
        restore(tmp_path / "copy.db", f"sqlite:///{link}")
    send(service.streams["default"], 0)
    service.close()
    restore(tmp_path / "copy.db", f"sqlite:///{link}")
    assert link.is_symlink()
    back = Service(small_model(), settings(tmp_path, database=url))
    assert back.streams["default"].state.position == 0
    back.close()


def test_a_stream_saved_under_another_budget_is_refused(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path))
    send(service.streams["default"], 0)
    service.close()
    with pytest.raises(errors.StateMismatch, match=r"stream 'default' .* other options.*ratio"):
        Service(small_model(), settings(tmp_path, ratio=0.25))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"options": {"preset": "paper"}}, "does not keep the budget"),
        ({"options": {"preset": "paper/imagenet-c"}}, "does not keep the budget"),
        ({"options": {"policy": "always"}}, "always"),
        ({"streams": ("a", "a")}, "none twice"),
        ({"streams": ("a/b",)}, "letters"),
        ({"audit": 1.5}, "share"),
        ({"max_batch": 0}, "at least 1"),
        ({"lease_s": math.nan}, "lease_s=nan must be at least 0"),
        ({"checkpoint_s": 1e300}, "1000000000 at most"),
        ({"classes": ("x",)}, "one name a class"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_at_the_start(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(errors.WiseAttaError, match=why):
        Service(small_model(), settings(tmp_path, **changes))


@pytest.mark.parametrize(
    "change", [{"rate": math.nan}, {"rate": -1}, {"body": 0}, {"pixels": -1}, {"patience": math.inf}]
)
def test_limits_that_would_keep_everybody_out_or_let_everything_in_are_refused(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(errors.BadConfig, match=f"{name}=.* must be at least"):
        Limits(**change)


def test_a_ledger_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    url = database(tmp_path)
    db.Ledger(url).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(errors.BadConfig, match="a newer version has written"):
        db.Ledger(url)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    engine.dispose()


def test_a_ledger_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    url, new = database(tmp_path), {"answers_by_status", "answers_by_time", "answers_judged"}
    db.Ledger(url).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        for name in new:
            connection.execute(text(f"DROP INDEX {name}"))
        connection.execute(text("DROP TABLE checkpoint_parts"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    db.Ledger(url).close()
    assert new <= {index["name"] for index in inspect(engine).get_indexes("answers")}
    assert inspect(engine).has_table("checkpoint_parts")
    engine.dispose()


def test_the_tables_after_all_migrations_are_those_of_the_models(tmp_path: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    ledger = db.Ledger(database(tmp_path))
    with ledger._reading.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), db.Base.metadata) == []
    ledger.close()


def test_a_write_that_fails_takes_back_its_own_changes_alone(tmp_path: Path) -> None:
    ledger = db.Ledger(database(tmp_path))

    def bad(session: db.Session) -> None:
        db.notice(session, None, "bad")
        raise errors.Conflict("no")

    hold = threading.Event()
    ledger.write(lambda session: assert_set(hold))
    writes = [ledger.write(lambda s: db.notice(s, None, "good")), ledger.write(bad)]
    hold.set()
    writes[0].result(30)
    with pytest.raises(errors.Conflict):
        writes[1].result(30)
    with ledger.read() as session:
        assert session.scalars(select(db.Notice.kind)).all() == ["good"]
    ledger.close()


def test_settings_are_values() -> None:
    assert dataclasses.replace(settings(Path("x")), ratio="1/3").rate.denominator == 3


@pytest.mark.parametrize("groups", ["one", "several"])
@pytest.mark.parametrize("what", ["outcomes", "another"])
def test_what_the_ledger_could_not_take_is_told_again_before_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, groups: str
) -> None:
    def full(*_: object) -> None:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    first = Service(small_model(), settings(tmp_path))
    stream, hold, learned, free = first.streams["default"], threading.Event(), threading.Event(), threading.Event()
    stream.learner.run(lambda: assert_set(hold))
    for number in range(5):
        send(stream, number)
    with monkeypatch.context() as patch:
        if groups == "one":
            busy = threading.Event()
            first.ledger.write(lambda session: wait(busy, free))
            assert_set(busy)
        if what == "another":
            first.ledger.write(full)
        else:
            patch.setattr(service_module, "record", full)
        stream.learner.run(learned.set)
        hold.set()
        assert_set(learned)
        last = first.ledger.write(lambda session: None)
        free.set()
        # Whatever is committed in one group with what fails, fails too.
        with contextlib.suppress(OperationalError):
            last.result(30)
    spent = stream.state.spent
    assert spent > 1
    first.close()
    back = Service(small_model(), settings(tmp_path))
    assert back.streams["default"].recovered == 0
    with back.ledger.read() as session:
        assert session.scalar(select(func.count()).select_from(db.Question)) == spent
        assert session.scalar(select(func.sum(db.Charge.units))) == spent
    back.close()
