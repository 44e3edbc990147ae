"""Does the service answer what it should over HTTP, and refuse what it must?"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import struct
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serve.parts import crash, pictures, settled
from serve.web import npy, png, post, running, token
from sqlalchemy import select
from starlette.types import Message

from wise_atta.serve import app, auth, ledger as db
from wise_atta.serve.config import Limits
from wise_atta.serve.uploads import to_png


def test_files_base64_and_arrays_give_the_same_answer(tmp_path: Path) -> None:
    with running(tmp_path, method="source", audit=0) as (client, _):
        file = png(3)
        ways = [
            client.post("/predict", files=[("pictures", ("a.png", file))]),
            client.post("/predict", json={"pictures": [base64.b64encode(file).decode()]}),
            client.post("/predict", content=npy(3, 1), headers={"content-type": "application/x-npy"}),
            client.post("/predict", content=file, headers={"content-type": "image/png"}),
        ]
        reply = [way.json()["predictions"] for way in ways]
        assert all(way.status_code == 200 for way in ways)
        assert reply[0] == reply[1] == reply[2] == reply[3]
        assert {guess["name"] for guess in reply[0][0]["top"]} == set("abcd")
        assert sum(guess["probability"] for guess in reply[0][0]["top"]) == pytest.approx(1)


def test_pictures_of_any_size_and_kind_fit_the_model(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _):
        files = [png(1, 40), png(2, 5), png(3, 16, "JPEG"), png(4, 9, "BMP"), png(5, 20, "WEBP")]
        colour = io.BytesIO()
        Image.new("RGBA", (12, 30), (200, 10, 10, 128)).save(colour, "PNG")
        reply = client.post("/predict", files=[("pictures", data) for data in [*files, colour.getvalue()]])
        assert reply.status_code == 200 and len(reply.json()["predictions"]) == 6


def held(turn: int, exif: bool) -> bytes:
    """A picture that was taken with the camera on its side, with or without a note of that."""
    note, buffer = Image.Exif(), io.BytesIO()
    note[274] = 6
    picture = Image.fromarray(pictures(1, 1, 8)[0, :, :, 0]).rotate(turn)
    picture.save(buffer, "PNG", **({"exif": note} if exif else {}))
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_picture_is_seen_as_it_was_taken(tmp_path: Path) -> None:
    upright, noted, bare = held(0, False), held(90, True), held(90, False)
    assert to_png("PNG", upright) == to_png("PNG", noted) != to_png("PNG", bare)
    with running(tmp_path, method="source", audit=0) as (client, _):
        reply = client.post("/predict", files=[("pictures", data) for data in (upright, noted, bare)])
        first, second, third = reply.json()["predictions"]
        assert first == second != third
        # A note that makes no sense is no reason to refuse the picture.
        broken = io.BytesIO()
        Image.fromarray(pictures(1, 1, 8)[0, :, :, 0]).save(broken, "WEBP", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
        assert client.post("/predict", files=[("pictures", broken.getvalue())]).status_code == 200


def test_a_wrong_kind_of_number_is_named(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _):
        body = array(np.zeros((1, 8, 8, 1), dtype=np.int64))
        reply = client.post("/predict", content=body, headers={"content-type": "application/x-npy"})
        assert reply.status_code == 422 and "int64" in reply.json()["detail"]


def bomb() -> bytes:
    """A small PNG that declares 40,000 × 40,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def array(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=True)
    return buffer.getvalue()


BAD: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 422),
    "text": (b"hello", 422),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 422),
    "cut png": (png(1)[:40], 422),
    "png magic": (b"\x89PNG\r\n\x1a\n", 422),
    "bomb": (bomb(), 413),
    "objects": (array(np.array([{}], dtype=object)), 422),
    "wrong shape": (array(np.zeros((2, 3, 8, 8), dtype=np.float32)), 422),
    "out of range": (array(np.full((1, 1, 8, 8), 2.0, dtype=np.float32)), 422),
    "not finite": (array(np.full((1, 1, 8, 8), np.nan, dtype=np.float32)), 422),
    "no pictures": (array(np.zeros((0, 8, 8, 1), dtype=np.uint8)), 422),
    "no height": (array(np.zeros((1, 0, 8, 1), dtype=np.uint8)), 422),
    "scalar": (array(np.zeros((), dtype=np.uint8)), 422),
    "huge header": (npy(1).replace(b"(4, 8, 8, 1)", b"(4, 8, 8, 9)"), 422),
    "many": (array(np.zeros((65, 8, 8, 1), dtype=np.uint8)), 413),
    "thin": (array(np.zeros((1, 2, 900, 1), dtype=np.uint8)), 422),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_picture_is_refused_and_leaves_no_trace(tmp_path: Path, name: str) -> None:
    data, status = BAD[name]
    with running(tmp_path) as (client, service):
        reply = client.post("/predict", content=data, headers={"content-type": "application/octet-stream"})
        assert reply.status_code == status, reply.text
        assert "Traceback" not in reply.text and str(tmp_path) not in reply.text
        with service.ledger.read() as session:
            assert session.scalars(select(db.LoggedEvent)).all() == []
        post(client, 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"[]", 422), (b'{"pictures": []}', 422), (b'{"pictures": ["?"]}', 422), (b'{"pictures": [1]}', 422)],
)
def test_json_that_is_not_as_it_should_be_is_refused(tmp_path: Path, body: bytes, status: int) -> None:
    with running(tmp_path) as (client, _):
        assert client.post("/predict", content=body, headers={"content-type": "application/json"}).status_code == status


def test_a_body_without_end_is_cut_off(tmp_path: Path) -> None:
    with running(tmp_path, limits=Limits(body=2000)) as (client, _):
        large = client.post("/predict", content=bytes(3000), headers={"content-type": "application/x-npy"})
        assert large.status_code == 413
        # Without a declared length it is counted while it comes.
        stream = client.post(
            "/predict", content=(bytes(500) for _ in range(10)), headers={"content-type": "application/x-npy"}
        )
        assert stream.status_code == 413
        assert client.post("/answers", content=bytes(2**20 + 1)).status_code == 413


def test_unknown_streams_kinds_and_fields_are_refused(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _):
        assert client.post("/predict?stream=other", content=npy(1), headers=NPY).status_code == 404
        assert client.post("/predict?stream=a/b", content=npy(1), headers=NPY).status_code == 422
        assert client.post("/predict", content=npy(1), headers={"content-type": "text/plain"}).status_code == 415
        assert client.post("/predict?top=0", content=npy(1), headers=NPY).status_code == 422
        assert client.get("/streams/other").status_code == 404
        assert client.post("/answers", json={"answers": [{"query": "1-1", "label": 1, "x": 1}]}).status_code == 422
        nan = client.post("/answers", content=b'{"answers": NaN}', headers={"content-type": "application/json"})
        assert nan.status_code == 422
        assert client.get("/nowhere").status_code == 404


NPY = {"content-type": "application/x-npy"}


def test_roles_open_their_own_doors_only(tmp_path: Path) -> None:
    with running(tmp_path, loopback=False) as (client, service):
        roles = {role: token(service, f"the {role}", role) for role in auth.ROLES}
        doors = {
            "client": ("POST", "/predict", {"content": npy(1)}),
            "annotator": ("GET", "/queries", {}),
            "admin": ("GET", "/annotators", {}),
        }
        for door, (method, path, options) in doors.items():
            for role, headers in roles.items():
                reply = client.request(method, path, headers={**NPY, **headers}, **options)
                assert (reply.status_code == 200) == (role in (door, "admin")), (door, role, reply.text)
            assert client.request(method, path, headers=NPY, **options).status_code == 401
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=roles["client"]).status_code == 200


def test_a_service_that_others_can_reach_is_never_open(tmp_path: Path) -> None:
    with running(tmp_path, loopback=False) as (client, _):
        assert client.get("/queries").status_code == 401


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer x", "Basic YTpi", "Bearer wa__", "Bearer wa_0_0", "bearer wa_\xe9_x"]
)
def test_a_wrong_token_lets_nobody_in(tmp_path: Path, header: str) -> None:
    with running(tmp_path, loopback=False) as (client, service):
        token(service, "a", "admin")
        assert client.get("/queries", headers={"Authorization": header.encode("latin1")}).status_code == 401


def test_a_revoked_token_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_FRESH", 0.0)
    with running(tmp_path) as (client, service):
        headers = token(service, "a", "admin")
        assert client.get("/queries", headers=headers).status_code == 200
        assert client.get("/queries").status_code == 401  # no longer open
        service.ledger.write(lambda session: auth.revoke(session, "a")).result()
        reply = client.get("/queries", headers=headers)
        assert reply.status_code == 401 and "not known, or was revoked" in reply.text


def test_secrets_are_neither_stored_nor_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running(tmp_path) as (client, service):
        headers = token(service, "a", "admin")
        # Its end, as the service reads it: the secret may hold an underscore itself, and little may follow that.
        secret = headers["Authorization"].split("_", 2)[2][-20:]
        client.get("/queries", headers=headers)
        client.get("/nowhere", headers=headers)
        assert secret not in caplog.text
    assert all(secret.encode() not in path.read_bytes() for path in tmp_path.iterdir())


def test_callers_who_hurry_have_to_wait(tmp_path: Path) -> None:
    with running(tmp_path, loopback=False, limits=Limits(rate=0.001, burst=3)) as (client, service):
        headers = token(service, "a", "admin")
        replies = [client.get("/queries", headers=headers) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
        assert int(replies[-1].headers["retry-after"]) > 1


def test_pages_of_other_sites_and_names_of_other_hosts_are_refused(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _):
        assert client.get("/queries", headers={"Origin": "http://localhost"}).status_code == 200
        refused = client.get("/queries", headers={"Origin": "http://evil.example"})
        # What a proxy makes of a page of our own if it puts its own name in place of the page's.
        assert refused.status_code == 403 and "proxy has to pass on the Host header" in refused.json()["detail"]
        assert client.get("/queries", headers={"Origin": "http://[bad"}).status_code == 403
        assert client.get("/queries", headers={"Origin": "null"}).status_code == 403
        assert client.get("/queries", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
        assert client.get("/queries", headers={"Host": "evil.example"}).status_code == 403
        reply = client.get("/queries")
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]


def test_a_full_queue_answers_429_with_a_time(tmp_path: Path) -> None:
    with running(tmp_path, max_batch=4, max_queue=4) as (client, service):
        hold, reached = threading.Event(), threading.Event()

        def wait(session: db.Session) -> None:
            reached.set()
            assert hold.wait(30)

        service.ledger.write(wait)
        assert reached.wait(30)
        first = threading.Thread(target=post, args=(client, 1))
        first.start()
        while service.streams["default"].batcher.under_way < 4:
            pass
        refused = client.post("/predict", content=npy(2), headers=NPY)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        hold.set()
        first.join(30)
        post(client, 2)


@pytest.mark.parametrize("kind", ["application/x-npy", "application/json", "multipart/form-data; boundary=x"])
def test_whoever_hangs_up_makes_no_error(tmp_path: Path, kind: str) -> None:
    with running(tmp_path) as (client, _):
        sent: list[Message] = []
        coming = iter([{"type": "http.request", "body": b"--x", "more_body": True}, {"type": "http.disconnect"}])

        async def receive() -> Message:
            return next(coming)

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", kind.encode())]
        call = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}
        asyncio.run(client.app({**call, "client": ("127.0.0.1", 9), "server": ("localhost", 80)}, receive, send))
        assert sent[0]["status"] == 400
        assert 'status="500"' not in client.get("/metrics").text


def test_two_pictures_are_decoded_at_a_time_for_whomever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now: list[int] = []
    most = 0

    def slow(kind: str, data: bytes) -> bytes:
        nonlocal most
        now.append(1)
        most = max(most, len(now))
        time.sleep(0.05)
        now.pop()
        return to_png(kind, data)

    with running(tmp_path, audit=0) as (client, service):
        for number in range(6):
            post(client, number)
        settled(service)
        (query,) = client.get("/queries").json()["queries"]
        monkeypatch.setattr(app, "to_png", slow)
        with ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda _: client.get(query["picture"]), range(6)))
        assert [reply.status_code for reply in replies] == [200] * 6 and most == 2


def test_a_service_that_stops_says_so(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service):
        service.close()
        assert client.get("/readyz").status_code == 503
        assert client.post("/predict", content=npy(2), headers=NPY).status_code == 503


def test_a_service_that_can_write_no_more_is_unwell(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service):
        assert client.get("/healthz").status_code == 200
        crash(service)
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 503


def test_metrics_tell_what_happened(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service):
        for number in range(5):
            post(client, number)
        settled(service)
        text = client.get("/metrics").text
        assert 'wise_atta_pictures_total{stream="default"} 20.0' in text
        assert 'wise_atta_learned_total{stream="default"} 5.0' in text
        assert f'wise_atta_spent{{stream="default"}} {float(service.streams["default"].state.spent)}' in text
        assert 'wise_atta_http_seconds_count{route="/predict",status="200"} 5.0' in text
        assert sys.platform != "linux" or "process_resident_memory_bytes" in text
        history = client.get("/streams/default/history").json()
        assert sum(point["pictures"] for point in history) == 20 and sum(point["learned"] for point in history) == 5
        assert history[-1]["spent"] == service.streams["default"].state.spent
        assert client.get(f"/streams/default/history?since={history[-1]['at']}").json() == history[-1:]
        assert client.get("/streams/default/history?step=300").json()[-1]["seconds"] == 300
        assert client.get("/streams/default/history?step=7").status_code == 422
        status = client.get("/streams").json()[0]
        assert status["pictures"] == 20 and status["learned"] == 5 and sum(status["predicted"].values()) == 20
        assert status["latency"]["requests"] == 5 and 0 < status["latency"]["p50_s"] <= status["latency"]["p99_s"]


def test_the_document_describes_every_call_with_examples(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _):
        document = client.get("/openapi.json").json()
        for path in ("/predict", "/queries", "/answers", "/streams/{name}/reset", "/healthz", "/readyz", "/metrics"):
            assert path in document["paths"]
        assert "examples" in str(document["components"]["schemas"]["AnswerIn"])
        kinds = document["paths"]["/predict"]["post"]["requestBody"]["content"]
        assert set(kinds) == {"multipart/form-data", "application/json", "application/x-npy"}
        assert "examples" in str(kinds["application/json"])


def test_a_picture_is_encoded_anew(tmp_path: Path) -> None:
    with running(tmp_path, ratio=1, audit=0) as (client, service):
        trailer = png(7) + b"<script>alert(1)</script>"
        for number in range(4):
            client.post("/predict", files=[("pictures", trailer if number == 0 else png(number))] * 2)
        settled(service)
        (query,) = client.get("/queries").json()["queries"]
        shown = client.get(query["picture"])
        assert b"script" not in shown.content
        pixels = np.asarray(Image.open(io.BytesIO(shown.content)).convert("L"))
        assert pixels.tolist() in [pictures(number, 1)[0, :, :, 0].tolist() for number in (7, 1, 2, 3)]
        assert client.get("/queries/default/99-9/picture").status_code == 404


def test_the_client_knows_the_way(tmp_path: Path) -> None:
    from wise_atta.serve.client import Client, Refused

    with running(tmp_path, audit=0) as (http, service):
        made = token(service, "a", "admin")["Authorization"].removeprefix("Bearer ")
        with Client("http://localhost", made, http=http) as client:
            for number in range(4):
                reply = client.predict(pictures(number))
            assert len(reply.predictions) == 4 and client.predict([png(1)]).predictions[0].name in "abcd"
            (tmp_path / "a.png").write_bytes(png(1))
            assert len(client.predict(tmp_path / "a.png").predictions) == len(client.predict(png(1)).predictions) == 1
            settled(service)
            (query,) = client.queries().queries
            assert client.picture(query).startswith(b"\x89PNG")
            assert client.answer(query, 1).taken == 1
            assert client.classes() == list("abcd")
            assert client.stream().spent == service.streams["default"].state.spent
            client.reset()
            assert client.ready()
            with pytest.raises(Refused, match="another answer") as refused:
                client.answer(query, 2)
            assert refused.value.status == 409


def test_labels_tell_their_age_and_audits_whether_the_model_was_right(tmp_path: Path) -> None:
    with running(tmp_path, ratio=1, audit=0.5) as (client, service):
        for number in range(4):
            post(client, number)
        settled(service)
        asked = client.get("/queries?limit=4").json()
        assert all(query["lease_until"] > asked["now"] for query in asked["queries"])
        answered = {}
        for query in asked["queries"]:
            answered[query["query"]] = query["audit"], query["guesses"][0]["label"] == 2
            answer = {"query": query["query"], "label": 2}
            assert client.post("/answers", json={"answers": [answer]}).status_code == 200
        labels = client.get("/streams/default/labels").json()
        expected = [(audit, right if audit else None) for audit, right in answered.values()]
        assert [(row["audit"], row["right"]) for row in labels] == expected
        assert {audit for audit, _ in expected} == {True, False} and all(row["age_s"] >= 0 for row in labels)
        assert client.get(f"/streams/default/labels?since={labels[1]['at']}").json() == labels[2:]
        assert client.get("/streams/default/labels?limit=1").json() == labels[-1:]
        status = client.get("/streams/default").json()
        assert (status["ratio"], status["audit"], status["method"]) == (1.0, 0.5, "wise")
