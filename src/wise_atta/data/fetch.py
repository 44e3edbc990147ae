"""Downloads of official archives: in resumable steps, checked, and only then put in their place.

A file under its own name is complete and has the published checksum, or, where none is published, the one that was
recorded when it first came (`checksums.json` in the data folder). Until then its name ends in `.part`.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import http.client
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from wise_atta import errors
from wise_atta.data.catalog import Download, data_root, lookup

# Called with the file's name, how many bytes there are and how many there will be, if that is known.
Progress = Callable[[str, int, int | None], None]
RECORD = "checksums.json"
_CHUNK = 1 << 20


def fetch(
    name: str, root: str | Path | None = None, *, progress: Progress | None = None, tries: int = 6, wait: float = 1.0
) -> list[Path]:
    """Download what a data set's authors publish, or check what is already here.

    Parameters
    ----------
    name
        A data set of the catalogue.
    root
        The folder with the data; WISE_ATTA_DATA if not given.
    progress
        Told about every step.
    tries, wait
        How often a connection may break without a byte having come, and the seconds before the next try, doubled each
        time.
    """
    entry, folder = lookup(name), data_root(root)
    if not entry.downloads:
        raise errors.BadConfig(f"{entry.name} cannot be downloaded by a program: it comes from {entry.home}")
    return [
        fetch_file(item, folder, entry.folder, progress=progress, tries=tries, wait=wait) for item in entry.downloads
    ]


def fetch_file(
    item: Download,
    root: Path,
    folder: str = "",
    *,
    progress: Progress | None = None,
    tries: int = 6,
    wait: float = 1.0,
) -> Path:
    """Download one archive into `root/folder`, or check it if it is there. A gzipped tar is stored as a plain one."""
    target = root / folder / item.file
    with _space_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        known = read_record(root).get(target.relative_to(root).as_posix())
        if target.exists():
            verify(target, item, known)
        else:
            part = target.with_name(target.name + ".part")
            _download(item, part, progress or (lambda name, done, total: None), tries, wait)
            try:
                verify(part, item, None)
            except errors.DataError:
                part.unlink()
                raise
            part.replace(target)
        if known is None:
            _store_plain(target, root, item)
    return target


def verify(path: Path, item: Download, known: Mapping[str, Any] | None) -> None:
    """Compare a file with the checksum that was recorded for it, or else with the published one."""
    expected = f"sha256:{known['sha256']}" if known else item.checksum
    source = f"recorded in {RECORD}" if known else f"published at {item.source}"
    if expected is None:
        return
    algorithm = expected.partition(":")[0]
    actual = f"{algorithm}:{file_hash(path, algorithm)}"
    if actual != expected:
        raise errors.DataError(
            f"{path} has {actual}, and {expected} is {source}: wrong or damaged bytes. Remove it and fetch it again"
        )


def file_hash(path: Path, algorithm: str = "sha256") -> str:
    """The hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def read_record(root: Path) -> dict[str, Any]:
    """What was recorded about the files of a data folder."""
    path = root / RECORD
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except ValueError as error:
        raise errors.DataError(f"{path} is not JSON ({error}): repair or remove it") from error


def _store_plain(target: Path, root: Path, item: Download) -> None:
    downloaded = file_hash(target)
    with target.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    if compressed:
        plain = target.with_name(target.name + ".plain.part")
        try:
            with gzip.open(target) as source, plain.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
        except (OSError, EOFError) as error:
            plain.unlink(missing_ok=True)
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            raise errors.DataError(f"{target} cannot be decompressed: {error}") from error
        plain.replace(target)
    entry = {
        "url": item.url,
        "size": target.stat().st_size,
        "sha256": file_hash(target) if compressed else downloaded,
        "downloaded_sha256": downloaded,
        "published": item.checksum,
        "source": item.source,
    }
    record = {**read_record(root), target.relative_to(root).as_posix(): entry}
    part = root / (RECORD + ".part")
    part.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    part.replace(root / RECORD)


# ---- the download itself ---------------------------------------------------------------------------------------------


class _Again(Exception):
    """The connection broke, or the server wants another request."""


def _download(item: Download, part: Path, progress: Progress, tries: int, wait: float) -> None:
    """Fill `part`. What has come stays, with the server's mark of its version beside it, for the next call."""
    mark = part.with_name(part.name + ".json")
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _request(item, part, mark, progress)
            break
        except (_Again, urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            code = getattr(error, "code", None)
            if code is not None and 400 <= code < 500 and code not in (408, 429):
                raise errors.DataError(f"{item.url} answers {error}: see its home page for a new address") from error
            got = part.stat().st_size if part.exists() else 0
            failures = 0 if got > before else failures + 1
            if failures >= tries:
                raise errors.DataError(
                    f"{item.url} broke off {failures} times in a row ({error}); {got:,} bytes are in {part}: "
                    "fetch again to go on from there"
                ) from error
            if got <= before:
                time.sleep(wait * 2 ** (failures - 1))
    mark.unlink(missing_ok=True)


def _request(item: Download, part: Path, mark: Path, progress: Progress) -> None:
    version = json.loads(mark.read_text()).get("version") if mark.exists() else None
    # Without a mark of its version the beginning may belong to another file than the rest.
    have = part.stat().st_size if part.exists() and version else 0
    request = urllib.request.Request(item.url, headers={"User-Agent": "wise-atta", "Accept-Encoding": "identity"})
    if have and version:
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", version)
    with contextlib.closing(_open(request, part, mark)) as response:
        if response.status == 206:
            start, total = _content_range(response.headers.get("Content-Range", ""))
            if start != have:
                part.unlink()
                raise _Again(f"bytes from {start} came instead of {have}")
        else:
            have = 0
            length = response.headers.get("Content-Length")
            total = int(length) if length else None
        if item.size is not None and total is not None and total != item.size:
            raise errors.DataError(f"{item.url} has {total:,} bytes, not {item.size:,}: not the published file")
        strong = response.headers.get("ETag") or response.headers.get("Last-Modified")
        mark.write_text(json.dumps({"version": strong}))
        _check_space(part, (total or item.size or 0) - have)
        with part.open("ab" if have else "wb") as sink:
            done = _copy(response, sink, part.name.removesuffix(".part"), have, total, progress)
    if total is not None and done != total:
        raise _Again(f"{done:,} of {total:,} bytes came")


def _open(request: urllib.request.Request, part: Path, mark: Path) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # there is more here than there: start anew
            part.unlink(missing_ok=True)
            mark.unlink(missing_ok=True)
            raise _Again("the server's file is shorter than what came before") from error
        raise


def _copy(response: Any, sink: BinaryIO, name: str, done: int, total: int | None, progress: Progress) -> int:
    progress(name, done, total)
    while chunk := response.read(_CHUNK):
        sink.write(chunk)
        done += len(chunk)
        progress(name, done, total)
    return done


def _content_range(text: str) -> tuple[int, int | None]:
    """
    >>> _content_range("bytes 5-9/10"), _content_range("bytes 5-9/*")
    ((5, 10), (5, None))
    """
    try:
        span, _, total = text.removeprefix("bytes ").partition("/")
        return int(span.partition("-")[0]), None if total == "*" else int(total)
    except ValueError:
        raise _Again(f"an answer with Content-Range {text!r}") from None


def _check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise errors.DataError(f"{path} needs {needed:,} bytes more, and {path.parent} has {free:,}: make room")


@contextmanager
def _space_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        message = f"{path} cannot be written: {error.strerror}. Make room, or choose another folder"
        raise errors.DataError(message) from error
