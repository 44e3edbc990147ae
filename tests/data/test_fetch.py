"""Does a download end whole or not at all, whatever the server does?"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import re
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from wise_atta import errors, rng
from wise_atta.data import catalog, fetch, open_dataset
from wise_atta.data.archives import open_archive
from wise_atta.data.catalog import Download

BODY = rng.numpy(0, "body").bytes(5_000_000)


class Server(ThreadingHTTPServer):
    """A file server on this machine that can misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = BODY
        self.tag: str | None = '"one"'
        self.drops: list[int] = []  # bytes to send before the connection is cut, one entry a request
        self.ranges = True
        self.lengths = True
        self.status = 200
        self.shift = 0  # bytes by which a partial answer begins too late
        self.asked: list[str | None] = []

    def url(self, name: str = "set.tar") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}?download=1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append(wanted)
        if server.status != 200:
            self.send_error(server.status)
            return
        start = 0
        if wanted and server.ranges and self.headers.get("If-Range") == server.tag:
            start = int(re.findall(r"bytes=(\d+)-", wanted)[0]) + server.shift
            if start >= len(server.body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(server.body) - 1}/{len(server.body)}")
        else:
            self.send_response(200)
        if server.lengths:
            self.send_header("Content-Length", str(len(server.body) - start))
        if server.tag:
            self.send_header("ETag", server.tag)
        self.end_headers()
        rest = server.body[start:]
        self.wfile.write(rest[: server.drops.pop(0)] if server.drops else rest)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def item(server: Server, body: bytes = BODY, **changes: Any) -> Download:
    md5 = hashlib.md5(body, usedforsecurity=False).hexdigest()
    return replace(Download(server.url(), len(body), f"md5:{md5}", "the test"), **changes)


def get(download: Download, root: Path, **options: Any) -> Path:
    return fetch.fetch_file(download, root, wait=0.0, **options)


def parts(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if ".part" in path.name)


def test_a_file_comes_whole_with_progress_and_a_record(server: Server, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int | None]] = []
    path = get(item(server), tmp_path, progress=lambda *step: steps.append(step))
    assert path == tmp_path / "set.tar" and path.read_bytes() == BODY
    assert steps[0] == ("set.tar", 0, len(BODY)) and steps[-1] == ("set.tar", len(BODY), len(BODY))
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
    record = fetch.read_record(tmp_path)["set.tar"]
    assert record["sha256"] == hashlib.sha256(BODY).hexdigest() and record["source"] == "the test"
    assert parts(tmp_path) == []


def test_a_dropped_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.drops = [1_500_000, 1_000_000, 300_000]
    assert get(item(server), tmp_path).read_bytes() == BODY
    assert server.asked == [None, "bytes=1500000-", "bytes=2500000-", "bytes=2800000-"]


def test_a_later_call_goes_on_where_an_earlier_one_gave_up(server: Server, tmp_path: Path) -> None:
    server.drops = [2_000_000, 0, 0]
    with pytest.raises(errors.DataError, match=r"broke off 2 times in a row.*2,000,000 bytes are in .*set\.tar\.part"):
        get(item(server), tmp_path, tries=2)
    assert not (tmp_path / "set.tar").exists()
    server.asked.clear()
    assert get(item(server), tmp_path).read_bytes() == BODY
    assert server.asked == ["bytes=2000000-"]


def test_a_file_that_changed_meanwhile_is_started_anew(server: Server, tmp_path: Path) -> None:
    server.drops = [2_000_000, 0]
    with pytest.raises(errors.DataError):
        get(item(server), tmp_path, tries=1)
    server.body, server.tag = BODY[::-1], '"two"'
    assert get(item(server, BODY[::-1]), tmp_path).read_bytes() == BODY[::-1]


@pytest.mark.parametrize("tag", ['"one"', None])
def test_a_server_that_cannot_resume_is_asked_for_everything(server: Server, tmp_path: Path, tag: str | None) -> None:
    server.ranges, server.tag, server.drops = False, tag, [2_000_000]
    assert get(item(server), tmp_path).read_bytes() == BODY


def test_a_server_that_resumes_at_the_wrong_place_is_not_believed(server: Server, tmp_path: Path) -> None:
    server.shift, server.drops = 7, [2_000_000]
    assert get(item(server), tmp_path).read_bytes() == BODY


def test_what_is_longer_than_the_servers_file_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.part").write_bytes(BODY + b"more")
    (tmp_path / "set.tar.part.json").write_text(json.dumps({"version": server.tag}))
    assert get(item(server), tmp_path).read_bytes() == BODY


def test_wrong_bytes_never_reach_the_files_name(server: Server, tmp_path: Path) -> None:
    server.body = BODY[:-1] + bytes([BODY[-1] ^ 1])
    with pytest.raises(errors.DataError, match=r"set\.tar\.part has md5:\w+, and md5:\w+ is published at the test"):
        get(item(server), tmp_path)
    assert list(tmp_path.iterdir()) == []
    server.body = BODY
    assert get(item(server), tmp_path).read_bytes() == BODY


def test_another_length_than_published_is_refused_at_once(server: Server, tmp_path: Path) -> None:
    server.body = BODY[:1000]
    with pytest.raises(errors.DataError, match=r"has 1,000 bytes, not 5,000,000"):
        get(item(server), tmp_path)
    assert not (tmp_path / "set.tar").exists()


def test_without_a_published_checksum_the_first_is_recorded_and_kept_to(server: Server, tmp_path: Path) -> None:
    loose = item(server, size=None, checksum=None, source=None)
    server.lengths = False
    path = get(loose, tmp_path)
    assert fetch.read_record(tmp_path)["set.tar"]["published"] is None
    get(loose, tmp_path)
    assert len(server.asked) == 1
    path.write_bytes(BODY[:-1] + b"?")
    with pytest.raises(
        errors.DataError, match=r"set\.tar has sha256:\w+, and sha256:\w+ is recorded in checksums\.json"
    ):
        get(loose, tmp_path)


def test_a_file_that_was_put_there_by_hand_is_checked(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar").write_bytes(BODY)
    get(item(server), tmp_path)
    assert server.asked == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "set.tar").write_bytes(b"something else")
    with pytest.raises(errors.DataError, match=r"other/set\.tar has md5"):
        fetch.fetch_file(item(server), tmp_path, "other")


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (503, 3)])
def test_a_server_that_refuses_is_told_apart_from_one_that_is_busy(
    server: Server, tmp_path: Path, status: int, tries: int
) -> None:
    server.status = status
    with pytest.raises(errors.DataError, match=str(status)):
        get(item(server), tmp_path, tries=3)
    assert len(server.asked) == tries


def test_a_gzipped_tar_is_stored_plain_and_stays_recognised(
    server: Server, tmp_path: Path, pack: Callable[..., Path]
) -> None:
    plain = pack(tmp_path / "made" / "plain.tar", {"fog/5/cat/a.jpg": b"picture" * 99}).read_bytes()
    server.body = gzip.compress(plain, mtime=0)
    for _ in range(2):
        path = get(item(server, server.body), tmp_path)
        assert open_archive(path).read("fog/5/cat/a.jpg") == b"picture" * 99
    record = fetch.read_record(tmp_path)["set.tar"]
    assert record["sha256"] == hashlib.sha256(plain).hexdigest()
    assert record["downloaded_sha256"] == hashlib.sha256(server.body).hexdigest()
    assert len(server.asked) == 1 and parts(tmp_path) == []


def test_too_little_room_is_said_before_a_byte_is_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(errors.DataError, match=r"set\.tar\.part needs 5,000,000 bytes more, and .* has 1,000"):
        get(item(server), tmp_path)
    assert not (tmp_path / "set.tar.part").exists()


def test_a_disk_that_fills_up_is_an_error_that_names_the_file(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = fetch._copy

    def full(response: Any, sink: Any, *rest: Any) -> int:
        class Sink:
            def write(self, data: bytes) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        return copy(response, Sink(), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch, "_copy", full)
    with pytest.raises(errors.DataError, match=r"set\.tar cannot be written: No space left on device"):
        get(item(server), tmp_path)


def test_a_data_set_is_fetched_by_name_and_can_be_read(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pack: Callable[..., Path],
    class_files: Callable[..., dict[str, bytes]],
) -> None:
    server.body = pack(tmp_path / "made" / "imagenet-a.tar", class_files("imagenet-a/")).read_bytes()
    server.drops = [5000]
    download = item(server, server.body, url=server.url("imagenet-a.tar"))
    monkeypatch.setitem(catalog.ENTRIES, "imagenet-a", replace(catalog.lookup("imagenet-a"), downloads=(download,)))
    root = tmp_path / "data"
    root.mkdir()
    assert fetch.fetch("imagenet-a", root, wait=0.0) == [root / "imagenet-a.tar"]
    assert len(open_dataset("imagenet-a", root).place("imagenet-a")) == 6


def test_what_no_program_can_download_says_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(errors.BadConfig, match=r"pacs cannot be downloaded.*domaingeneralization"):
        fetch.fetch("pacs", tmp_path)


def test_every_checksum_in_the_catalogue_has_a_source() -> None:
    downloads = [item for entry in catalog.ENTRIES.values() for item in entry.downloads]
    assert len(downloads) >= 8
    for download in downloads:
        assert (download.checksum is None) == (download.source is None)
        assert download.url.startswith("https://")
