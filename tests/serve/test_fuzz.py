"""Does anything that a stranger can send make the service stumble?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies
from serve.parts import pictures, settings as service_settings, small_model
from serve.web import npy, png, post
from starlette.testclient import TestClient

from wise_atta.serve.app import create_app
from wise_atta.serve.service import Service

SEEDS = [png(1), png(2, 9, "JPEG"), png(3, 9, "WEBP"), png(4, 9, "BMP"), npy(1, 2), npy(2, 1)]
PATHS = [
    ("POST", "/predict"),
    ("POST", "/answers"),
    ("POST", "/queries/release"),
    ("POST", "/review"),
    ("POST", "/streams/default/reset"),
    ("POST", "/streams/default/revoke"),
    ("GET", "/queries"),
    ("GET", "/notices"),
    ("GET", "/streams/default/history"),
    ("GET", "/streams/default/labels"),
    ("GET", "/queries/default/1-1/picture"),
]
# Many more, on a real process, are in test_malformed.py.
ROUNDS = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    service = Service(small_model(), service_settings(folder))
    app = create_app(service, loopback=True)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as test_client:
        before = post(test_client, 0)["predictions"]
        yield test_client
        # Still right afterwards, and still learning.
        assert service.healthy and test_client.get("/healthz").status_code == 200
        test_client.post("/streams/default/reset")
        assert len(post(test_client, 0)["predictions"]) == len(before) == len(pictures(0))


def well(reply: Any) -> None:
    assert reply.status_code < 500, reply.text
    assert "Traceback" not in reply.text and "site-packages" not in reply.text


@strategies.composite
def damaged(draw: strategies.DrawFn) -> bytes:
    """A picture with some of its bytes changed, its end cut off, or both."""
    data = bytearray(draw(strategies.sampled_from(SEEDS)))
    for place, new in draw(
        strategies.lists(
            strategies.tuples(strategies.integers(0, 400), strategies.binary(min_size=1, max_size=4)), max_size=9
        )
    ):
        data[place % len(data) : place % len(data) + len(new)] = new
    end = draw(strategies.none() | strategies.integers(0, len(data)))
    return bytes(data[:end])


@ROUNDS
@given(data=damaged(), sound=strategies.sampled_from(SEEDS))
def test_damaged_pictures_are_answered_or_refused(client: TestClient, data: bytes, sound: bytes) -> None:
    well(client.post("/predict", content=data, headers={"content-type": "application/octet-stream"}))
    well(client.post("/predict", files=[("pictures", data), ("pictures", sound)]))


JSON = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.floats()
    | strategies.integers()
    | strategies.text(max_size=9),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(
            strategies.sampled_from(
                ["answers", "query", "label", "stream", "pictures", "accept", "by", "queries", "policy"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@ROUNDS
@given(
    call=strategies.sampled_from(PATHS),
    body=JSON,
    query=strategies.dictionaries(
        strategies.sampled_from(["stream", "limit", "since", "top"]), strategies.text(max_size=8), max_size=2
    ),
)
def test_any_json_is_answered_or_refused(
    client: TestClient, call: tuple[str, str], body: Any, query: dict[str, str]
) -> None:
    method, path = call
    headers = {"content-type": "application/json"}
    well(client.request(method, path, params=query, content=json.dumps(body), headers=headers))


@ROUNDS
@given(
    kind=strategies.sampled_from(
        [
            "",
            "multipart/form-data",
            "multipart/form-data; boundary=a",
            "application/json",
            "image/png",
            "\x00",
            "text/x",
        ]
    ),
    body=strategies.binary(max_size=200)
    | strategies.just(b"--a\r\nContent-Disposition: form-data; name=x\r\n\r\n1\r\n--a--"),
)
def test_any_bytes_of_any_kind_are_answered_or_refused(client: TestClient, kind: str, body: bytes) -> None:
    well(client.post("/predict", content=body, headers={"content-type": kind}))
