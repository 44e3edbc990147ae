"""Does all of it hold on a PostgreSQL server too?

Starts a server of its own from the installed programs and runs the other tests of the ledger against it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from needs import missing
from serve.parts import same, settled
from serve.web import npy, post, running
from sqlalchemy import create_engine, text

HERE = Path(__file__).parent
TESTS = [
    f"test_{name}.py"
    for name in ("service", "failing", "trust", "revoke", "poison", "keeping", "late", "web", "fuzz", "attack")
]


def programs() -> Path | None:
    """The folder of PostgreSQL's programs, the newest if there are several."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return installed[-1].parent if installed else Path(on_path).parent if on_path else None


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of a server that is there for one test."""
    place = programs()
    if place is None:
        missing("needs the programs of PostgreSQL: install postgresql")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The server refuses to run as root.
        user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        if user:
            shutil.chown(folder, "postgres")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        data, log = folder / "data", folder / "log"

        def run(*command: str | Path) -> None:
            subprocess.run([*user, *command], check=True, stdout=subprocess.DEVNULL, cwd=folder)

        run(place / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        run(place / "pg_ctl", "-D", data, "-o", options, "-l", log, "-w", "start")
        try:
            yield f"postgresql+psycopg://postgres@127.0.0.1:{port}"
        finally:
            run(place / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")


@pytest.mark.heavy
@pytest.mark.timeout(320, func_only=True)  # the files of a hundred databases take their time to go
def test_the_same_tests_pass_on_postgresql(server: str) -> None:
    run_tests(server, TESTS, 300)


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_nothing_is_lost_on_postgresql_when_it_is_killed(server: str) -> None:
    run_tests(server, ["test_crash.py"], 220, "-m", "heavy", WISE_ATTA_KILLS="8")


def run_tests(server: str, files: Sequence[str], seconds: float, *options: str, **variables: str) -> None:
    """Run tests that pass on SQLite in a process of their own, with every database on the server."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *options,
            *(str(HERE / name) for name in files),
        ],
        env={**os.environ, "WISE_ATTA_TEST_SERVER": server, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.heavy
def test_a_service_that_loses_its_connection_writes_no_more_and_the_next_one_goes_on(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WISE_ATTA_TEST_SERVER", server)
    with running(tmp_path) as (client, service):
        for number in range(4):
            post(client, number)
        settled(service)
        before = service.streams["default"].state.state_dict()
        admin = create_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            connection.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'test_%'")
            )
        admin.dispose()
        # The first one finds out, the second one is told.
        for _ in range(2):
            refused = client.post("/predict", content=npy(4), headers={"content-type": "application/x-npy"})
            assert refused.status_code == 503, refused.text
        assert client.get("/healthz").status_code == 503
        with running(tmp_path) as (other, back):
            same(before, back.streams["default"].state.state_dict())
            post(other, 4)
            # The old one does not come back to life beside it.
            assert client.post("/streams/default/reset").status_code == 503
