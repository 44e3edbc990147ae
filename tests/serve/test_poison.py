"""Can one person with a token wreck the model? Found out, held, and what was learned before is taken back."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from serve.parts import pictures, same, settled, small_model
from serve.test_revoke import EVERY, learned_part
from serve.web import post, running, token
from sqlalchemy import select
from starlette.testclient import TestClient

from wise_atta.serve import ledger as db
from wise_atta.serve.service import Service

ROUNDS = 14
# A question is kept for whoever says nothing until the test is over.
OPTIONS: dict[str, Any] = {**EVERY, "lease_s": 10_000, "options": {**EVERY["options"], "lr": 0.01}}


def truth(values: np.ndarray) -> list[int]:
    """What people with eyes see in pictures [n, 8, 8]: here, what the source model does."""
    inputs = torch.from_numpy(np.array(values)).float()[:, None] / 255
    with torch.no_grad():
        labels: list[int] = small_model().module((inputs - 0.5) / 0.25).argmax(dim=1).tolist()
    return labels


def live(client: TestClient, service: Service, *, liar: bool) -> dict[str, dict[str, str]]:
    """Pictures come, one person labels them rightly, another one wrongly or not at all. Gives their headers."""
    roles = {"boss": "admin", "honest": "annotator", "liar": "annotator"}
    people = {name: token(service, name, role) for name, role in roles.items()}
    for number in range(ROUNDS):
        post(client, number, **people["boss"])
        settled(service)
        for name in ("honest", "liar"):
            silent = name == "liar" and not liar
            headers = people[name]
            questions = client.get(f"/queries?limit={50 if silent else 2}", headers=headers).json()["queries"]
            if silent:
                continue
            answers = []
            for query in questions:
                shown = Image.open(io.BytesIO(client.get(query["picture"], headers=headers).content))
                (label,) = truth(np.asarray(shown.convert("L"))[None])
                answers.append({"query": query["query"], "label": (label + (name == "liar")) % 4})
            reply = client.post("/answers", json={"answers": answers}, headers=headers)
            assert len(questions) == 2 and reply.status_code == 200, reply.text
    post(client, ROUNDS, **people["boss"])
    settled(service)
    return people


def right(service: Service) -> float:
    """Share of pictures that are served right; asked of the model alone, so that nothing is learned from them."""
    shown = np.concatenate([pictures(1000 + number, 64) for number in range(4)])[:, :, :, 0]
    inputs = torch.from_numpy(shown).float()[:, None] / 255
    logits, _ = service.streams["default"].infer(inputs)
    return float((logits.argmax(dim=1) == torch.tensor(truth(shown))).float().mean())


def take_back(client: TestClient, service: Service, boss: dict[str, str]) -> dict[str, Any]:
    """What an admin does about it: reject what is held, revoke what was learned, and let one more batch come."""
    records = {item["by"]: item for item in client.get("/annotators", headers=boss).json()}
    assert records["liar"]["suspicious"] and not records["honest"]["suspicious"]
    held = client.get("/review", headers=boss).json()
    assert len(held) >= 5 and {item["by"] for item in held} == {"liar"}
    assert any(item["kind"] == "held" for item in client.get("/notices", headers=boss).json())
    rejected = {"answers": [item["answer"] for item in held], "accept": False}
    assert client.post("/review", json=rejected, headers=boss).status_code == 200
    done = client.post("/streams/default/revoke", json={"by": "liar"}, headers=boss).json()
    assert done["answers"] == 2 * ROUNDS - len(held)
    settled(service)
    revoked: dict[str, Any] = done
    return revoked


def learned_by(service: Service) -> set[str]:
    """Whose labels are learned."""
    with service.ledger.read() as session:
        names = set(session.scalars(select(db.Learned.query)))
        replies = session.scalars(select(db.Reply).where(db.Reply.status == "accepted")).all()
        return {reply.by for reply in replies if reply.query in names}


def test_a_liar_is_found_out_and_the_model_becomes_what_it_would_have_been(tmp_path: Path) -> None:
    with running(tmp_path / "twin", keep_log=1, **OPTIONS) as (client, service):
        live(client, service, liar=False)
        clean, spent, best = learned_part(service), service.streams["default"].state.spent, right(service)
    with running(tmp_path / "live", keep_log=1, checkpoint_events=7, **OPTIONS) as (client, service):
        boss = live(client, service, liar=True)["boss"]
        assert right(service) < best - 0.1
        assert learned_by(service) == {"honest", "liar"}
        assert take_back(client, service, boss)["exact"]
        same(clean, learned_part(service))
        assert right(service) == best and service.streams["default"].state.spent == spent
        assert learned_by(service) == {"honest"}


def test_without_the_log_the_model_comes_close_to_what_it_would_have_been(tmp_path: Path) -> None:
    with running(tmp_path / "twin", **OPTIONS) as (client, service):
        people = live(client, service, liar=False)
        post(client, ROUNDS + 1, **people["boss"])
        settled(service)
        clean, best = service.streams["default"].serving.version.flat.clone(), right(service)
    with running(tmp_path / "live", checkpoint_events=7, **OPTIONS) as (client, service):
        boss = live(client, service, liar=True)["boss"]
        stream = service.streams["default"]
        poisoned, harmed = float((stream.serving.version.flat - clean).norm()), right(service)
        assert not take_back(client, service, boss)["exact"]
        # The other labels since the checkpoint are learned again with the next batch.
        post(client, ROUNDS + 1, **boss)
        settled(service)
        assert learned_by(service) == {"honest"}
        assert float((stream.serving.version.flat - clean).norm()) < poisoned / 2
        assert harmed < right(service) and abs(right(service) - best) < 0.1
