"""Does the load benchmark say how a request was refused?"""

from __future__ import annotations

import http.client
import importlib.util
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("serve_load", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_load"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["serve_load"]


class _Moody(BaseHTTPRequestHandler):
    """Answers with the status that it is sent; hangs up on 0."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        status = int(self.rfile.read(int(self.headers["Content-Length"])))
        if not status:
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"why?")

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_refusal_is_told_by_its_status_and_a_lost_call_by_its_error(benchmark: ModuleType) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Moody) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        refusals = [benchmark.ask(connection, body) for body in (b"200", b"429", b"0", b"503", b"200")]
        connection.close()
        server.shutdown()
    assert refusals == [None, "429: why?", "RemoteDisconnected", "503: why?", None]
