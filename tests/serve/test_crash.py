"""Is anything lost when the process is killed again and again, under load, with answers coming in?

The processes are real: uvicorn on a loopback port, killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from serve.parts import pictures, small_model
from serve.victim import Starter, digest, options
from sqlalchemy import func, select

from wise_atta import rng
from wise_atta.serve import ledger as db
from wise_atta.serve.client import Client, Refused
from wise_atta.serve.config import build
from wise_atta.serve.state import Audit, State, unpack
from wise_atta.serve.uploads import UploadReader

# Two hundred are a matter of minutes: WISE_ATTA_KILLS=200. With `-s` each part says what it saw.
KILLS = int(os.environ.get("WISE_ATTA_KILLS", "20"))


@dataclass
class Seen:
    """What clients and people were told, which must never turn out to be otherwise."""

    requests: set[str] = field(default_factory=set)
    answers: dict[str, int] = field(default_factory=dict)


def send_pictures(url: str, stop: threading.Event, seen: Seen, worker: int) -> None:
    with Client(url) as client:
        number = 1000 * worker
        while not stop.is_set():
            number += 1
            with contextlib.suppress(httpx.TransportError, Refused):
                seen.requests.add(client.predict(pictures(number, 1 + number % 4)).request)


def answer_questions(url: str, stop: threading.Event, seen: Seen) -> None:
    with Client(url) as client:
        while not stop.is_set():
            with contextlib.suppress(httpx.TransportError, Refused):
                for query in client.queries(limit=3).queries:
                    label = sum(map(ord, query.query)) % 4
                    client.answer(query, label)
                    seen.answers[query.query] = label
            time.sleep(0.01)


@pytest.mark.heavy
@pytest.mark.timeout(max(240, 15 * KILLS))
@pytest.mark.parametrize(("keep_log", "kills"), [(1, KILLS - KILLS // 4), (0, KILLS // 4)], ids=["kept", "swept"])
def test_nothing_is_lost_however_often_it_is_killed(tmp_path: Path, keep_log: int, kills: int) -> None:
    starter = Starter(tmp_path, keep_log)
    config = options(tmp_path, keep_log)
    model = small_model()
    uploads = UploadReader(model.preparation, max_pictures=config.max_batch, max_pixels=config.limits.pixels)

    def at_source() -> State:
        return State(build(model, config), Audit(config.audit_rate, config.seed), uploads)

    twin = at_source()
    learned: list[str] = []
    seen = Seen()
    ledger: db.Ledger | None = None
    replayed = 0
    for kill in range(kills + 1):
        url, pid = starter.start()
        ledger = ledger or db.Ledger(config.database, exclusive=False)
        # No load yet: what is there now is what came back.
        came_back = httpx.get(f"{url}/digest", timeout=30).json()
        with ledger.read() as session:
            saved = db.last_checkpoint(session, "default")
            if not keep_log and saved is not None:
                # What the twin has not heard may be gone: it begins where the log does.
                twin = at_source()
                twin.load_state_dict(unpack(saved.state))
            for event in db.events(session, "default", twin.position):
                learned += twin.apply(event).learned
                replayed += 1
            assert came_back["position"] == twin.position
            assert came_back["digest"] == digest(twin.state_dict())
            assert came_back["spent"] <= came_back["allowed"]
            assert session.scalar(select(func.coalesce(func.sum(db.Charge.units), 0))) == came_back["spent"]
            check_answers(session, seen)
            if keep_log:
                check_requests(session, seen)
                assert {row.query for row in session.scalars(select(db.Learned))} == set(learned)
                assert len(set(learned)) == len(learned)
        if kill < kills:
            load(url, pid, seen, kill)
    # Once more in peace: every answer that was taken is learned.
    with Client(url) as client:
        client.predict(pictures(0))
        httpx.get(f"{url}/digest", timeout=30)
        client.queries()
    with ledger.read() as session:
        done = {row.query for row in session.scalars(select(db.Learned))}
    ledger.close()
    os.kill(pid, signal.SIGKILL)
    starter.close()
    teaching = {name for name in seen.answers if not name.startswith("a")}
    assert len(teaching) >= kills // 3 and teaching <= done
    assert len(seen.requests) >= 3 * kills
    print(
        f"\n{kills} kills, log {'kept' if keep_log else 'swept'}: {len(seen.requests)} requests and "
        f"{len(seen.answers)} answers confirmed, {len(done)} labels learned, {came_back['spent']} of "
        f"{came_back['allowed']} labels spent, {replayed} events replayed by the twin; 0 lost, 0 learned twice"
    )


def load(url: str, pid: int, seen: Seen, kill: int) -> None:
    """Send pictures and answers for a while, then kill the process in the middle of it."""
    stop = threading.Event()
    workers = [threading.Thread(target=send_pictures, args=(url, stop, seen, 1000 * kill + n)) for n in range(3)]
    workers.append(threading.Thread(target=answer_questions, args=(url, stop, seen)))
    requests, answers = len(seen.requests) + 5, len(seen.answers) + 1
    for worker in workers:
        worker.start()
    # Two of three are killed when something has happened, however slow the machine is; the third one at any time.
    deadline = time.monotonic() + 30
    while kill % 3 and not (len(seen.requests) >= requests and len(seen.answers) >= answers):
        assert time.monotonic() < deadline, "nothing is answered"
        time.sleep(0.01)
    time.sleep(rng.numpy(0, "kill", kill).uniform(0.0, 1.0))
    os.kill(pid, signal.SIGKILL)
    stop.set()
    for worker in workers:
        worker.join()


def check_requests(session: db.Session, seen: Seen) -> None:
    """Whatever was predicted is in the log."""
    logged = {
        request
        for body in session.scalars(select(db.LoggedEvent.body).where(db.LoggedEvent.kind == "batch"))
        for request, _ in body["requests"]
    }
    assert seen.requests <= logged


def check_answers(session: db.Session, seen: Seen) -> None:
    """Whatever was answered is in the ledger, once."""
    rows = session.execute(select(db.Reply.query, db.Reply.label).where(db.Reply.status == "accepted")).all()
    replies = {row[0]: row[1] for row in rows}
    assert len(replies) == len(rows)
    assert all(replies.get(name) == label for name, label in seen.answers.items())
