"""Services whose ledgers 0.1 wrote: how they were set up, what was done with them, and what they say."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from golden import v01
from serve import parts, web
from starlette.testclient import TestClient

from wise_atta.data.models import SourceModel
from wise_atta.serve.app import create_app
from wise_atta.serve.config import Settings
from wise_atta.serve.service import Service

# The log and its pictures are kept however long ago they were written.
KEPT: dict[str, Any] = {"keep_log": 100_000, "max_wait_ms": 0.0, "max_lag": 10_000}
SETTINGS: dict[str, dict[str, Any]] = {
    "paced": {**KEPT, "ratio": 0.5, "audit": 0.2, "checkpoint_events": 9, "options": {"slack": 1, "lr": 0.01}},
    # Every sample is asked about, in an order of chance: the log is replayed alike however numbers round.
    "replayed": {
        **KEPT,
        "ratio": 1,
        "audit": 0,
        "checkpoint_events": 1000,
        "options": {"labels": 4, "policy": "uniform", "selector": "random"},
    },
}


def model() -> SourceModel:
    """The model that was served, with the weights that it had."""
    made = parts.small_model()
    made.module.load_state_dict(v01.load(v01.FOLDER / "served.pt"))
    return made


@contextmanager
def opened(name: str, ledger: Path) -> Iterator[tuple[TestClient, Service]]:
    """A service on this ledger, and a client on the loopback address."""
    threads = torch.get_num_threads()
    service = Service(model(), Settings(database=f"sqlite:///{ledger}", **SETTINGS[name]))
    with TestClient(create_app(service, loopback=True), base_url="http://localhost") as client:
        yield client, service
    torch.set_num_threads(threads)


def label(question: str) -> int:
    return int(question.split("-")[1]) % 4


def said(ledger: Path) -> dict[str, Any]:
    """The questions by their state, the labels charged, and how many answers count."""
    with closing(sqlite3.connect(ledger)) as connection:
        states: dict[str, list[str]] = {}
        for name, state in connection.execute("select id, state from queries order by id"):
            states.setdefault(state, []).append(name)
        (charged,) = connection.execute("select sum(units) from budget").fetchone()
        answers = connection.execute("select status, count(*) from answers group by status order by status").fetchall()
        return {"questions": states, "charged": charged, "answers": dict(answers)}


def answer(client: TestClient, headers: dict[str, str], count: int) -> list[str]:
    """Answer so many of the questions that wait."""
    asked = [item["query"] for item in client.get(f"/queries?limit={count}", headers=headers).json()["queries"]]
    if asked:
        body = {"answers": [{"query": name, "label": label(name)} for name in asked]}
        assert client.post("/answers", json=body, headers=headers).status_code == 200
    return asked


def used(name: str, client: TestClient, service: Service) -> None:
    """A dozen batches; two people answer some of the questions, and what one of them said is revoked."""
    boss = web.token(service, "boss", "admin")
    people = [web.token(service, who, "annotator") for who in ("good", "bad")]
    for number in range(12):
        web.post(client, number, **boss)
        parts.settled(service)
        answer(client, people[number % 2], 1 + number % 3)
        parts.settled(service)
        if number == 8:
            done = client.post("/streams/default/revoke", json={"by": "bad"}, headers=boss)
            assert done.status_code == 200, done.text
    client.get("/queries?limit=2", headers=people[0])  # shown, and not answered
    parts.settled(service)


def continued(client: TestClient, service: Service) -> dict[str, Any]:
    """What a service says next: to new pictures, before and after an answer was learned."""
    boss = web.token(service, "judge", "admin")
    first = web.post(client, 77, **boss)
    parts.settled(service)
    taught = answer(client, boss, 2)
    parts.settled(service)
    last = web.post(client, 78, **boss)
    parts.settled(service)
    return {"first": first["predictions"], "taught": taught, "last": last["predictions"]}
