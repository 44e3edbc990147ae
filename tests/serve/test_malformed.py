"""Does a real process outlive thousands of malformed requests, without leaking and without changing its mind?

Half of them are made from the service's own OpenAPI document, half are damaged pictures. Memory, files and open
transactions are looked at from outside.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from serve.parts import small_model
from serve.test_fuzz import SEEDS, damaged
from serve.victim import Starter, digest, options
from serve.web import npy

from wise_atta.serve import ledger as db
from wise_atta.serve.config import build
from wise_atta.serve.state import Audit, State, unpack
from wise_atta.serve.uploads import UploadReader

# The whole of it is a matter of minutes: WISE_ATTA_FUZZ=10000. With `-s` it says what it saw.
REQUESTS = int(os.environ.get("WISE_ATTA_FUZZ", "400"))


def rounds(count: int) -> settings:
    return settings(
        max_examples=max(count, 1),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@dataclass
class Process:
    """What can be seen of a process from outside."""

    pid: int
    url: str
    replies: Counter[int] = field(default_factory=Counter)

    def well(self, reply: Any) -> None:
        self.replies[reply.status_code] += 1
        assert reply.status_code < 500, reply.text
        assert "Traceback" not in reply.text and "site-packages" not in reply.text

    @property
    def memory(self) -> float:
        """Resident, in MiB."""
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    @property
    def files(self) -> int:
        """Open files that are no connection of ours."""
        links = []
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                links.append(str(entry.readlink()))
            except FileNotFoundError:
                continue
        return sum(not link.startswith("socket:") for link in links)

    @property
    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    starter = Starter(tmp_path, 0)
    url, pid = starter.start()
    yield Process(pid, url)
    os.kill(pid, signal.SIGTERM)
    starter.close()


def from_document(process: Process, count: int) -> None:
    """Requests that break what the OpenAPI document says about each call, and some that keep to it."""
    schema = schemathesis.openapi.from_url(f"{process.url}/openapi.json")
    calls = [call for operation in schema.get_all_operations() if takes_anything(call := operation.ok())]
    for call in calls:
        send_like(process, call, GenerationMode.NEGATIVE, round(0.8 * count / len(calls)))
        send_like(process, call, GenerationMode.POSITIVE, round(0.2 * count / len(calls)))


def send_like(process: Process, call: Any, mode: GenerationMode, count: int) -> None:
    @rounds(count)
    @given(case=call.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            # A stream that is there, so that the request gets further than its name.
            for given_ones in (case.path_parameters or {}, case.query or {}):
                given_ones.update({name: "default" for name in ("name", "stream") if name in given_ones})
        reply = case.call()
        process.well(reply)
        # The document cannot say what a picture is, so that it holds more for valid than is.
        case.validate_response(reply, excluded_checks=[positive_data_acceptance])

    send()


def takes_anything(call: Any) -> bool:
    return bool(call.body or call.query or call.path_parameters)


def from_pictures(process: Process, client: httpx.Client, count: int) -> None:
    """Damaged pictures, alone, beside a sound one, or under another kind's name."""

    @rounds(count)
    @given(data=damaged(), way=strategies.sampled_from(["body", "form", "lie"]))
    def send(data: bytes, way: str) -> None:
        if way == "form":
            process.well(client.post("/predict", files=[("pictures", data), ("pictures", SEEDS[0])]))
        else:
            kind = "application/octet-stream" if way == "body" else "image/jpeg"
            process.well(client.post("/predict", content=data, headers={"content-type": kind}))

    send()


@pytest.mark.heavy
@pytest.mark.timeout(max(120, REQUESTS // 2))
def test_malformed_requests_leave_no_trace(process: Process, tmp_path: Path) -> None:
    with httpx.Client(base_url=process.url, timeout=30) as client:
        before = at_source(client)
        # The first fifth is not counted: what is allocated at first use is no leak.
        memory = []
        for share in (0.1, 0.2, 0.2):
            from_document(process, round(share * REQUESTS))
            from_pictures(process, client, round(share * REQUESTS))
            memory.append(process.memory)
            if len(memory) == 1:
                files, threads = process.files, process.threads
        assert client.get("/healthz").status_code == 200
        assert at_source(client) == before
        came_back = client.get("/digest").json()
    assert came_back["digest"] == digest(twin(tmp_path).state_dict())
    assert came_back["spent"] <= came_back["allowed"]
    sent, refused = process.replies.total(), sum(n for code, n in process.replies.items() if code >= 400)
    print(
        f"\n{sent} requests, {refused} refused; replies {dict(sorted(process.replies.items()))}; "
        f"memory {' to '.join(f'{size:.0f}' for size in memory)} MiB, files {files} to {process.files}, "
        f"threads {threads} to {process.threads}, open transactions 0"
    )
    assert refused > 0.6 * sent and set(process.replies) <= {200, 400, 404, 405, 409, 410, 413, 415, 422, 429}
    # Pools of threads may not have been full.
    assert process.files <= files and process.threads <= threads + 8
    assert memory[-1] < 1.2 * memory[0]
    assert not reader_or_writer_left(tmp_path)


def at_source(client: httpx.Client) -> list[Any]:
    """What the source model says about some pictures."""
    assert client.post("/streams/default/reset").status_code == 200
    client.get("/digest")  # answered between two events, so that the reset is done
    reply = client.post("/predict", content=npy(0), headers={"content-type": "application/x-npy"})
    client.get("/digest")
    predictions: list[Any] = reply.json()["predictions"]
    return predictions


def twin(folder: Path) -> State:
    """The state as its checkpoint and its log tell it."""
    config, model = options(folder, 0), small_model()
    uploads = UploadReader(model.preparation, max_pictures=config.max_batch, max_pixels=config.limits.pixels)
    state = State(build(model, config), Audit(config.audit_rate, config.seed), uploads)
    ledger = db.Ledger(config.database, exclusive=False)
    with ledger.read() as session:
        saved = db.last_checkpoint(session, "default")
        if saved is not None:
            state.load_state_dict(unpack(saved.state))
        for event in db.events(session, "default", state.position):
            state.apply(event)
    ledger.close()
    return state


def reader_or_writer_left(folder: Path) -> bool:
    """Whether a transaction is open: SQLite's log cannot be emptied as long as one is."""
    with closing(sqlite3.connect(folder / "ledger.db", timeout=5)) as connection:
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return bool(busy)
