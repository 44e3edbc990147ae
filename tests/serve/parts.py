"""What do the tests of the service share? A small model, pictures, a database, and a way to compare states."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sqlalchemy import create_engine, text
from torch import nn

from wise_atta import rng
from wise_atta.data.models import SourceModel
from wise_atta.serve import ledger as db
from wise_atta.serve.batcher import Job, Reply as Served
from wise_atta.serve.config import Settings
from wise_atta.serve.service import LiveStream, Service
from wise_atta.serve.state import State
from wise_atta.serve.uploads import write_npy


def small_model() -> SourceModel:
    """Grey pictures of 8×8, four classes, one convolution with BatchNorm."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4)
        )
        with torch.no_grad():
            for tensor in (net[0].weight, net[5].weight):
                tensor.normal_()
    return SourceModel(
        module=net.eval(),
        name="small",
        architecture="small",
        classes=("a", "b", "c", "d"),
        mean=(0.5,),
        std=(0.25,),
        crop=8,
    )


def pictures(number: int, count: int = 4, side: int = 8) -> NDArray[np.uint8]:
    """Grey pictures; the same number gives the same ones."""
    return rng.numpy(0, "pictures", number).integers(0, 256, (count, side, side, 1), dtype=np.uint8)


def database(folder: Path) -> str:
    """A database of its own for every folder: a SQLite file in it, or, on the server that is named, a new database."""
    server = os.environ.get("WISE_ATTA_TEST_SERVER")
    if server is None:
        return f"sqlite:///{folder / 'ledger.db'}"
    name = f"test_{hashlib.sha256(str(folder).encode()).hexdigest()[:20]}"
    engine = create_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        if not connection.execute(text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": name}).scalar():
            connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{server}/{name}"


def settings(folder: Path, **changes: Any) -> Settings:
    url = changes.pop("database", None) or database(folder)
    return Settings(**{"database": url, "ratio": 0.5, "audit": 0.2, "max_wait_ms": 0.0, "max_lag": 10_000} | changes)


def send(stream: LiveStream, number: int, count: int = 4) -> Served:
    """Have pictures predicted, and wait for the reply."""
    samples = stream.state.uploads.files([write_npy(pictures(number, count))])
    return stream.predict(Job(f"r{number}", samples)).result(30)


def settled(service: Service) -> None:
    """Wait until everything in the log is learned and in the ledger."""
    for stream in service.streams.values():
        done = threading.Event()
        stream.learner.run(done.set)
        assert done.wait(30), stream.learner.failed
    service.ledger.write(lambda session: None).result(30)


def twin(service: Service, name: str = "default", after: Mapping[str, Any] | None = None) -> State:
    """A second state, fed the event log from the beginning (or from a checkpoint)."""
    state = service._make()
    if after is not None:
        state.load_state_dict(after)
    with service.ledger.read() as session:
        for event in db.events(session, name, state.position):
            state.apply(event)
    return state


def same(a: Any, b: Any, where: str = "state") -> None:
    """Assert that two states are equal, bit by bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, Mapping):
        assert list(a) == list(b), where
        for key in a:
            same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, Sequence) and not isinstance(a, str):
        assert len(a) == len(b), where
        for index, pair in enumerate(zip(a, b, strict=True)):
            same(*pair, f"{where}[{index}]")
    else:
        assert a == b or (a != a and b != b), f"{where}: {a!r} and {b!r}"


def comes_back(service: Service) -> None:
    """Assert that after a kill another service with the same settings is in the same state."""
    before = service.streams["default"].state.state_dict()
    crash(service)
    back = Service(small_model(), service.settings)
    same(before, back.streams["default"].state.state_dict())
    back.close()


def crash(service: Service) -> None:
    """As after a kill: nothing more reaches the database, and its lock is free."""
    service.ledger.write(lambda session: None).result(30)
    service.ledger._work.put(None)
    service.ledger._thread.join(30)
    assert service.ledger._lock is not None
    service.ledger._lock.close()
    service.ledger._lock = None
    # A thread that still computes when the interpreter ends can abort it.
    for stream in service.streams.values():
        stream.learner._queue.put(None)
