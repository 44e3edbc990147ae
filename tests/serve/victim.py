"""Which process is killed in the crash test? A real server on a loopback port.

Run as a program it has everything imported and forks a server for every port that it reads, so that a restart takes a
fraction of a second. It answers with the server's process id.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import uvicorn
from serve.parts import settings, small_model
from sqlalchemy import create_engine

from wise_atta.serve.app import create_app
from wise_atta.serve.client import Client
from wise_atta.serve.config import Settings, build
from wise_atta.serve.ledger import migrate
from wise_atta.serve.service import Service


def options(folder: Path, keep_log: int) -> Settings:
    return settings(folder, ratio=0.4, audit=0.2, keep_log=keep_log, checkpoint_events=25, max_wait_ms=1.0, max_lag=8)


def digest(value: Any) -> str:
    """A hash over every bit of a state."""
    sha256 = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            sha256.update(f"{item.dtype}{list(item.shape)}".encode() + item.contiguous().numpy().tobytes())
        elif isinstance(item, dict):
            for key, inner in item.items():
                sha256.update(repr(key).encode())
                add(inner)
        elif isinstance(item, list | tuple):
            sha256.update(f"{len(item)}".encode())
            for inner in item:
                add(inner)
        else:
            sha256.update(repr(item).encode())

    add(value)
    return sha256.hexdigest()


def serve(folder: str, keep_log: int, port: int) -> None:
    """The process that is killed."""
    service = Service(small_model(), options(Path(folder), keep_log))
    app = create_app(service, loopback=True)

    @app.get("/digest")
    def state_digest() -> dict[str, object]:
        stream = service.streams["default"]
        return stream.between(
            lambda: {
                "digest": digest(stream.state.state_dict()),
                "position": stream.state.position,
                "spent": stream.state.spent,
                "allowed": stream.state.allowed,
            }
        ).result()

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical", access_log=False)


class Starter:
    """Starts servers, one after the other.

    Parameters
    ----------
    folder
        Where their database is.
    keep_log
        Whether they keep the log.
    """

    def __init__(self, folder: Path, keep_log: int) -> None:
        places = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serve.victim", str(folder), str(keep_log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        )

    def start(self) -> tuple[str, int]:
        """Start one and wait for it: its address and its process id."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        assert self.process.stdin is not None and self.process.stdout is not None
        print(port, file=self.process.stdin, flush=True)
        pid = int(self.process.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        with Client(url) as client:
            while not client.ready():
                assert time.monotonic() < deadline, "the service does not come back"
                time.sleep(0.02)
        return url, pid

    def close(self) -> None:
        """To be called when the last one is gone."""
        self.process.communicate()


def main(folder: str, keep_log: int) -> None:
    # Much is imported at its first use only: use it once, before there are threads that a fork would lose.
    torch.set_num_threads(1)
    adapter = build(small_model(), options(Path(folder), keep_log))
    adapter.learn(adapter.predict(torch.rand(4, 1, 8, 8)))
    migrate(create_engine("sqlite://"))
    child = 0
    for line in sys.stdin:
        if child:
            os.waitpid(child, 0)
        child = os.fork()
        if not child:
            serve(folder, keep_log, int(line))
            os._exit(1)
        print(child, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
