"""Does the command start a service that stops in good order and comes back?"""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from wise_atta import rng
from wise_atta.serve import cli
from wise_atta.serve.client import Client

SERVE = "from wise_atta.serve.cli import serve; import typer; typer.run(serve)"


@pytest.mark.heavy
def test_a_service_started_from_the_terminal_goes_on_where_it_stopped(tmp_path: Path) -> None:
    names = tmp_path / "classes.txt"
    names.write_text("\n".join(f"digit {number}" for number in range(10)), encoding="utf-8")
    spent = 0
    for start in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-c", SERVE, "--model", "wise_atta/digits_cnn@random", "--classes", str(names)]
        command += ["--ratio", "0.2", "--port", str(port), "--database", f"sqlite:///{tmp_path / 'ledger.db'}"]
        process = subprocess.Popen(command)
        try:
            with Client(f"http://127.0.0.1:{port}") as client:
                deadline = time.monotonic() + 60
                while not client.ready():
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.1)
                assert client.stream().spent == spent
                kinds = {notice["kind"] for notice in httpx.get(f"http://127.0.0.1:{port}/notices").json()}
                assert kinds == {"start"}  # nothing had to be recovered
                for number in range(10):
                    shape = (4, 32, 32, 1)
                    pictures = rng.numpy(0, "digits", 10 * start + number).integers(0, 256, shape, dtype=np.uint8)
                    reply = client.predict(pictures)
                assert reply.predictions[0].name.startswith("digit ")
                while client.stream().learned < 10:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                (query,) = client.queries().queries
                assert client.answer(query, 3).taken == 1
                spent = client.stream().spent
                assert 0 < spent <= client.stream().allowed
            process.send_signal(signal.SIGTERM)
            # uvicorn stops in good order and then ends as the signal says.
            assert process.wait(30) in (0, -signal.SIGTERM)
        finally:
            process.kill()


def test_the_command_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    from typer import Typer
    from typer.testing import CliRunner

    from wise_atta.serve.cli import serve

    app = Typer()
    app.command()(serve)
    base = ["--model", "wise_atta/digits_cnn@random", "--database", f"sqlite:///{tmp_path / 'a.db'}"]
    for more, why in (
        (["--option", "preset=paper"], "budget"),
        (["--host", "0.0.0.0"], "token"),
        (["--option", "lr"], "NAME=VALUE"),
        (["--classes", str(tmp_path / "none.txt")], "cannot be read"),
    ):
        done = CliRunner().invoke(app, [*base, *more])
        assert done.exit_code == 2 and why in done.output


def test_what_strangers_send_leaves_no_warnings_behind() -> None:
    # A picture whose header claims so much that Pillow warns; each size would be another warning.
    buffer = BytesIO()
    Image.new("L", (1, 1)).save(buffer, "BMP")
    picture = buffer.getvalue()[:18] + struct.pack("<ii", 10_000, 10_000) + buffer.getvalue()[26:]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Image.open(BytesIO(picture))
        assert len(seen) == 1
        cli._hush()
        Image.open(BytesIO(picture))
        assert len(seen) == 1
