"""What does somebody gain who means harm? Headers that lie, requests that never end, names and pages of others."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from serve.parts import settled
from serve.web import npy, png, post, running, token
from sqlalchemy import select
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from wise_atta import errors
from wise_atta.serve import auth, cli, ledger as db
from wise_atta.serve.config import Limits
from wise_atta.serve.middleware import Patient, RequestFilter
from wise_atta.serve.uploads import read_npy

OCTETS = {"content-type": "application/octet-stream"}


def header(text: str, body: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """A `.npy` with this header, true or not."""
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text.encode("latin1") + body


LIES = {
    "infinite side": header("{'descr': '|u1', 'fortran_order': False, 'shape': (1e999,)}"),
    "side that is no number": header("{'descr': '|u1', 'fortran_order': False, 'shape': ('8', 8, 8, 1)}", bytes(512)),
    "true side": header("{'descr': '|u1', 'fortran_order': False, 'shape': (True, 8, 8, 9)}", bytes(64)),
    "empty and endless": header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': (0, {10**40})}}"),
    "a hundred sides": header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {(1,) * 100}}}", b"a"),
    "product that overflows": header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {(2**33, 2**31)}}}"),
    "type with parts": header("{'descr': [('a', '|u1', (999999999,))], 'fortran_order': False, 'shape': (1,)}"),
    "pickled": header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"cos\nsystem\n(S'true'\ntR."),
    "call": header("__import__('os').system('true')"),
    "deep": header("(" * 3000),
    "not a dictionary": header("[1, 2]"),
    "no header": header("", version=(2, 0)),
    "header beyond the end": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1),
    "version": b"\x93NUMPY\x09\x00",
    "magic alone": b"\x93NUMPY",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running(tmp_path_factory.mktemp("attack")) as (client, service):
        yield client, service


@pytest.mark.parametrize("name", LIES)
def test_an_array_whose_header_lies_is_refused(service: Any, name: str) -> None:
    reply = service[0].post("/predict", content=LIES[name], headers=OCTETS)
    assert reply.status_code == 422, reply.text


@pytest.mark.parametrize("dtype", ["u1", "<f4", "<f8", ">f4", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_whatever_numpy_writes_is_read(dtype: str, order: Any) -> None:
    array = np.asarray(np.arange(24).reshape(2, 3, 4, 1), dtype=dtype, order=order)
    buffer = io.BytesIO()
    np.save(buffer, array)
    read = read_npy(buffer.getvalue(), 24)
    assert read.dtype == array.dtype and np.array_equal(read, array)


class Cycle:
    """Garbage whose end lets other threads go on, in the middle of whatever made it be collected."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        time.sleep(0)


def test_headers_are_read_in_many_threads_at_once() -> None:
    data, failed = npy(1), []

    def work() -> None:
        for _ in range(1000):
            Cycle()
            try:
                read_npy(data, None)
            except errors.BadInput as error:
                failed.append(error)

    before, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20, 2, 2)
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
        sys.setswitchinterval(interval)
    assert not failed


def test_text_that_unpacks_without_end_is_refused(service: Any) -> None:
    info = PngInfo()
    for number in range(3):
        info.add_text(f"k{number}", "a" * 30_000_000, zip=True)
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "PNG", pnginfo=info)
    assert len(buffer.getvalue()) < 200_000
    reply = service[0].post("/predict", content=buffer.getvalue(), headers=OCTETS)
    assert reply.status_code == 422, reply.text


def test_json_that_nests_or_repeats_without_end_is_refused(service: Any) -> None:
    json = {"content-type": "application/json"}
    assert service[0].post("/predict", content=b"[" * 100_000, headers=json).status_code in (400, 422)
    assert service[0].post("/answers", content=b"[" * 100_000, headers=json).status_code in (400, 422)
    many = b'{"pictures": [' + b'"",' * 5000 + b'""]}'
    reply = service[0].post("/predict", content=many, headers=json)
    assert reply.status_code == 422 and len(reply.content) < 10_000
    wrong = b'{"pictures": [' + b"1," * 4000 + b"1]}"
    assert len(service[0].post("/predict", content=wrong, headers=json).content) < 10_000


@pytest.mark.parametrize(
    "path",
    [
        "/pages/../app.py",
        "/pages/%2e%2e/app.py",
        "/pages/..%2f..%2fcli.py",
        "/pages//etc/passwd",
        "/queries/..%2f..%2fetc/passwd/picture",
        "/streams/..%2f..",
        "/streams/default%00/history",
    ],
)
def test_paths_lead_nowhere_else(service: Any, path: str) -> None:
    assert service[0].get(path).status_code in (404, 422)


def test_what_is_sent_comes_back_in_no_header(service: Any) -> None:
    reply = service[0].get("/streams/a%0d%0aSet-Cookie:%20a=b")
    assert reply.status_code == 422 and "set-cookie" not in reply.headers


def test_guessing_keeps_nobody_out_but_the_guesser(tmp_path: Path) -> None:
    with running(tmp_path, loopback=False, limits=Limits(failures=2)) as (client, service):
        known = token(service, "a", "admin")
        guesses = [client.get("/queries", headers={"Authorization": "Bearer wa_1_1"}) for _ in range(4)]
        assert [reply.status_code for reply in guesses] == [401, 401, 429, 429]
        # From the same address, as behind a proxy.
        assert client.get("/queries", headers=known).status_code == 200


def test_a_link_elsewhere_may_lead_to_pages_but_to_no_call(tmp_path: Path) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    with running(tmp_path) as (client, _):
        assert client.get("/queries", headers=link).status_code == 403
        assert client.get("/label", headers=link).status_code != 403


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
def test_without_tokens_nothing_is_taken_from_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(auth, "_FRESH", 0.0)
    with running(tmp_path) as (client, service):
        assert client.get("/queries", headers={name: "1.2.3.4"}).status_code == 403
        known = token(service, "a", "admin")
        assert client.get("/queries", headers={**known, name: "1.2.3.4"}).status_code == 200


def test_the_database_is_its_owners_alone(tmp_path: Path) -> None:
    mask = os.umask(0o000)
    try:
        ledger = db.Ledger(f"sqlite:///{tmp_path / 'new' / 'a.db'}")
        ledger.write(lambda session: db.notice(session, None, "start")).result(30)
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").glob("a.db*")}
        ledger.close()
    finally:
        os.umask(mask)
    assert modes["a.db"] == modes["a.db-wal"] == 0o600


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nonsense", "no URL"),
        ("mystery://user:secret@host/a", "no URL"),
        ("mysql://user:secret@host/a", "extra|lives in|is not there"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/a", "cannot be opened"),
        ("sqlite:////proc/nowhere/a.db", "cannot be opened"),
    ],
)
def test_a_database_that_cannot_be_opened_is_named_without_its_password(url: str, why: str) -> None:
    with pytest.raises(errors.WiseAttaError, match=why) as caught:
        db.Ledger(url)
    assert "secret" not in str(caught.value)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    sent: list[Message] = []

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass

    async def drip() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"a", "more_body": True}

    async def collect(message: Message) -> None:
        sent.append(message)

    request_filter = RequestFilter(reads, max_body=10**9, patience=0.1, is_open=lambda: False)
    scope = {"type": "http", "path": "/predict", "headers": [], "method": "POST"}
    with pytest.raises(Exception, match="did not come within"):
        asyncio.run(request_filter(scope, drip, collect))


@pytest.mark.parametrize("first", [b"", b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["at once", "later"])
@pytest.mark.parametrize("sent", [b"", b"GET /a HT"], ids=["nothing", "half"])
def test_whoever_never_ends_a_request_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, first: bytes, sent: bytes) -> None:
    monkeypatch.setattr(Patient, "patience", 0.2)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    options: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_level": "error", "timeout_keep_alive": 1}
    config = uvicorn.Config(app, host="127.0.0.1", port=0, http=Patient, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as caller:
        heard = b""
        caller.sendall(first)
        while first and not heard.endswith(b"ok"):
            heard += caller.recv(1000)
        caller.sendall(sent)
        assert caller.recv(1000) == b""
    server.should_exit = True
    thread.join(30)


class Line(asyncio.Transport):
    """A connection whose other side takes what the test says; a loop whose time passes when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.socket: socket.socket | None = None
        self.protocol = Patient(uvicorn.Config(None, log_config=None), ServerState(), {}, _loop=self)  # type: ignore[arg-type]
        self.left, self.high, self.ended = 0, 2**16, ""
        self.timers: dict[asyncio.Handle, None] = {}
        self.protocol.connection_made(self)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = 2**16 if high is None else high

    def get_write_buffer_size(self) -> int:
        return self.left

    def write(self, data: Any) -> None:
        self.reply(len(data))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket if name == "socket" else default

    def get_debug(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = self.ended or "closing"

    def abort(self) -> None:
        self.ended = "aborted"
        self.protocol.connection_lost(None)

    def call_later(self, delay: float, work: Callable[..., None], *arguments: Any) -> asyncio.Handle:
        handle = asyncio.Handle(work, arguments, self)  # type: ignore[arg-type]
        self.timers[handle] = None
        return handle

    def reply(self, size: int) -> None:
        self.left += size
        if self.left > self.high:
            self.protocol.pause_writing()

    def take(self, size: int) -> None:
        self.left -= size
        if self.left == 0:
            self.protocol.resume_writing()

    def wait(self) -> None:
        """As long as every timer does."""
        due, self.timers = self.timers, {}
        for handle in due:
            if not handle.cancelled():
                handle._run()


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("size", [100, 10**6])
def test_whoever_never_takes_a_reply_is_hung_up_on(size: int, closing: bool) -> None:
    line = Line()
    line.reply(size)
    if closing:
        line.close()
    line.wait()
    assert line.ended == "aborted"


def test_whoever_takes_a_reply_slowly_gets_all_of_it() -> None:
    line = Line()
    # Busy with a request, so that nothing else is waited for.
    line.protocol._relax()
    line.reply(1000)
    for _ in range(9):
        line.take(100)
        line.wait()
    assert not line.ended
    line.take(100)
    line.wait()
    assert not line.ended and not line.timers


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system may not say what it still holds")
def test_whoever_takes_what_the_system_holds_of_a_reply_is_not_hung_up_on() -> None:
    line, (here, there) = Line(), socket.socketpair()
    line.protocol._relax()
    with here, there:
        line.socket = here
        for _ in range(4):
            here.sendall(bytes(1000))
        # The system asks for more not before much of that is taken.
        line.reply(1000)
        for _ in range(4):
            assert len(there.recv(1000)) == 1000
            line.wait()
        assert not line.ended
        line.wait()
        assert line.ended == "aborted"


@pytest.mark.parametrize("hushed", [False, True])
def test_whoever_sends_nonsense_fills_no_log(caplog: pytest.LogCaptureFixture, hushed: bool) -> None:
    log = logging.getLogger("uvicorn.error")
    caplog.set_level("WARNING", "uvicorn.error")
    # Whatever started here before may have taken its lines elsewhere, or hushed it for good.
    log.addHandler(caplog.handler)
    log.removeFilter(cli._is_ours)
    if hushed:
        cli._hush()
    try:
        Line().protocol.data_received(b"no request\r\n\r\n")
    finally:
        log.removeHandler(caplog.handler)
        log.removeFilter(cli._is_ours)
    assert bool(caplog.records) is not hushed


def test_one_large_call_cannot_teach_many_lies(tmp_path: Path) -> None:
    with running(tmp_path, ratio=1, audit=0, options={"labels": 4, "policy": "uniform"}) as (client, service):
        boss, good, bad = (token(service, name, role) for name, role in PEOPLE)
        for number in range(20):
            post(client, number, **boss)
        settled(service)
        for headers, wrong in ((good, 0), (bad, 1)):
            questions = client.get("/queries?limit=30", headers=headers).json()["queries"]
            answers = [{"query": q["query"], "label": (q["guesses"][0]["label"] + wrong) % 4} for q in questions]
            taken = client.post("/answers", json={"answers": answers}, headers=headers).json()
            assert len(answers) == 30 and taken == {"taken": 0 if wrong else 30, "held": 30 if wrong else 0}


PEOPLE = (("boss", "admin"), ("good", "annotator"), ("bad", "annotator"))


def test_damage_is_refused_before_it_is_logged(service: Any) -> None:
    client, running_service = service
    with running_service.ledger.read() as session:
        before = len(session.scalars(select(db.LoggedEvent.seq)).all())
    files = [("pictures", png(1)), ("pictures", np.random.default_rng(0).bytes(50)), ("pictures", npy(1))]
    assert client.post("/predict", files=files).status_code == 422
    with running_service.ledger.read() as session:
        assert len(session.scalars(select(db.LoggedEvent.seq)).all()) == before
