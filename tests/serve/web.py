"""How do the tests call the service? In-process, through the real application."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from serve.parts import pictures, settings, small_model
from starlette.testclient import TestClient

from wise_atta.serve import auth
from wise_atta.serve.app import create_app
from wise_atta.serve.service import Service


@contextmanager
def running(folder: Path, *, loopback: bool = True, **changes: Any) -> Iterator[tuple[TestClient, Service]]:
    """A service and a client of it, on the loopback address without tokens unless told otherwise."""
    service = Service(small_model(), settings(folder, **changes))
    with TestClient(create_app(service, loopback=loopback), base_url="http://localhost") as client:
        yield client, service


def npy(number: int, count: int = 4) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, pictures(number, count))
    return buffer.getvalue()


def png(number: int, side: int = 8, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pictures(number, 1, side)[0, :, :, 0]).save(buffer, kind)
    return buffer.getvalue()


def post(client: TestClient, number: int, count: int = 4, **headers: str) -> Any:
    """Have pictures predicted."""
    reply = client.post(
        "/predict", content=npy(number, count), headers={"content-type": "application/x-npy", **headers}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def token(service: Service, name: str, role: str) -> dict[str, str]:
    """A new token, as a header."""
    made = service.ledger.write(lambda session: auth.create(session, name, role)).result(30)
    return {"Authorization": f"Bearer {made}"}
