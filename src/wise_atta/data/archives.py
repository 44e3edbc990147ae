"""Folders, zips and tars, each read in place: nothing is ever unpacked.

All three answer the same questions: what a folder contains, what a file holds, and where on disk its bytes begin. They
can be sent to worker processes and read from several at once.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import struct
import tarfile
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from wise_atta import errors

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstandard"}
# Reading the directory of a tar means a visit to every member: for the million members of an ImageNet-C archive that is
# minutes, so it is kept. Smaller ones are read anew.
KEEP_INDEX_FROM = 50_000


class Span(NamedTuple):
    """A run of bytes in a file on disk."""

    path: Path
    offset: int
    size: int


class Archive:
    """A folder, a zip or a tar. Names are relative, with `/` between folders, and sorted."""

    path: Path

    def children(self, folder: str = "") -> tuple[list[str], list[str]]:
        """The files and the folders directly in `folder`, by name."""
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        """The bytes of one file."""
        raise NotImplementedError

    def span(self, name: str) -> Span | None:
        """Where the bytes lie on disk; None where they are compressed."""
        raise NotImplementedError

    def where(self, name: str) -> str:
        """How to call a file in a message."""
        raise NotImplementedError

    def walk(self, folder: str = "") -> Iterator[str]:
        """Every file in `folder` and below."""
        files, folders = self.children(folder)
        for name in files:
            yield join(folder, name)
        for name in folders:
            yield from self.walk(join(folder, name))


def join(folder: str, name: str) -> str:
    """
    >>> join("", "a.jpg"), join("cat", "a.jpg")
    ('a.jpg', 'cat/a.jpg')
    """
    return f"{folder}/{name}" if folder else name


def open_archive(path: Path) -> Archive:
    """Open a folder, a zip or a plain tar, told apart by their first bytes, not by their names."""
    if path.is_dir():
        return Folder(path)
    if path.suffix == ".part":
        raise errors.DataError(f"{path} is half downloaded: `wise-atta data fetch` goes on where it stopped")
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise errors.DataError(f"{path} cannot be read: {error.strerror}") from error
    if head[:2] == b"PK":
        return Zip(path)
    if head[257:262] == b"ustar" or (path.suffix == ".tar" and head[:2] not in _COMPRESSED):
        return Tar(path)
    if head[:2] in _COMPRESSED:
        raise errors.DataError(
            f"{path} is compressed with {_COMPRESSED[head[:2]]}, so its pictures cannot be reached one by one: "
            "`wise-atta data fetch` stores it as a plain tar, or decompress it yourself"
        )
    raise errors.DataError(f"{path} is neither a folder nor a zip nor a tar (it begins with {head[:8]!r})")


class Folder(Archive):
    """A folder on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def children(self, folder: str = "") -> tuple[list[str], list[str]]:
        files: list[str] = []
        folders: list[str] = []
        with os.scandir(self.path / folder) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).append(entry.name)
        return sorted(files), sorted(folders)

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise errors.DataError(f"{self.where(name)} cannot be read: {error.strerror}") from error

    def span(self, name: str) -> Span | None:
        path = self.path / name
        try:
            return Span(path, 0, path.stat().st_size)
        except OSError as error:
            raise errors.DataError(f"{self.where(name)} cannot be read: {error.strerror}") from error

    def where(self, name: str) -> str:
        return str(self.path / name)


class _Packed(Archive):
    """What zip and tar share: a sorted list of names, and one open file that several processes may read."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self.path = path
        # A folder ends in "/". In sorted order all that lies in a folder follows it.
        self._names = sorted(names)
        for before, name in zip(self._names, self._names[1:], strict=False):
            if before == name:
                raise errors.DataError(f"{path} holds {name!r} twice: which one is meant cannot be told")
        self._file: int | None = None

    def __reduce__(self) -> tuple[Callable[[Path], Archive], tuple[Path]]:
        return open_archive, (self.path,)

    def children(self, folder: str = "") -> tuple[list[str], list[str]]:
        prefix = folder + "/" if folder else ""
        files, folders = [], []
        at = bisect.bisect_left(self._names, prefix)
        while at < len(self._names) and self._names[at].startswith(prefix):
            head, slash, _ = self._names[at][len(prefix) :].partition("/")
            if slash:
                folders.append(head)
                at = bisect.bisect_left(self._names, prefix + head + "0", lo=at)  # "0" is the character after "/"
            else:
                if head:
                    files.append(head)
                at += 1
        return files, sorted(folders)  # "b-c/" comes before "b/", but b before b-c

    def where(self, name: str) -> str:
        return f"{self.path}:{name}"

    def _bytes(self, offset: int, size: int, name: str) -> bytes:
        # pread has no position that processes could move under each other.
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        data = os.pread(self._file, size, offset)
        if len(data) != size:
            raise errors.DataError(f"{self.where(name)} ends before its last byte: the archive is truncated")
        return data


class Zip(_Packed):
    """A zip file, its members stored or deflated."""

    def __init__(self, path: Path) -> None:
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise errors.DataError(
                f"{path} is not a whole zip file ({error}): half downloaded? Fetch or copy it again"
            ) from error
        self._members = {safe(path, member.filename): member for member in members}
        super().__init__(path, [member.filename for member in members])

    def read(self, name: str) -> bytes:
        member = self._member(name)
        data = self._bytes(self._start(member), member.compress_size, name)
        try:
            if member.compress_type == zipfile.ZIP_DEFLATED:
                data = zlib.decompress(data, wbits=-15)
        except zlib.error as error:
            raise errors.DataError(f"{self.where(name)} is damaged: {error}") from error
        if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
            raise errors.DataError(f"{self.where(name)} is damaged: its checksum is not the one in the zip file's list")
        return data

    def span(self, name: str) -> Span | None:
        member = self._member(name)
        if member.compress_type != zipfile.ZIP_STORED:
            return None
        return Span(self.path, self._start(member), member.file_size)

    def _member(self, name: str) -> zipfile.ZipInfo:
        member = self._members.get(name)
        if member is None:
            raise errors.DataError(f"{self.where(name)} does not exist")
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise errors.DataError(f"{self.where(name)} is encrypted or compressed in a way that is not read here")
        return member

    def _start(self, member: zipfile.ZipInfo) -> int:
        header = self._bytes(member.header_offset, 30, member.filename)
        if header[:4] != b"PK\x03\x04":
            raise errors.DataError(f"{self.where(member.filename)} is damaged: no file begins where the zip file says")
        name, extra = struct.unpack("<HH", header[26:30])
        return member.header_offset + 30 + int(name) + int(extra)


class Tar(_Packed):
    """A tar file without compression."""

    def __init__(self, path: Path) -> None:
        names, offsets, sizes = _tar_index(path)
        super().__init__(path, names)
        # Two arrays beside the sorted names: a dictionary of a million members would take three times the memory.
        order = sorted(range(len(names)), key=names.__getitem__)
        self._offsets, self._sizes = np.array(offsets, dtype=np.int64)[order], np.array(sizes, dtype=np.int64)[order]

    def read(self, name: str) -> bytes:
        _, offset, size = self.span(name)
        return self._bytes(offset, size, name)

    def span(self, name: str) -> Span:
        at = bisect.bisect_left(self._names, name)
        if at == len(self._names) or self._names[at] != name:
            raise errors.DataError(f"{self.where(name)} does not exist")
        return Span(self.path, int(self._offsets[at]), int(self._sizes[at]))


def safe(path: Path, name: str) -> str:
    """The member's name, refused if it points out of the archive.

    >>> safe(Path("a.zip"), "cat/../../etc/passwd")
    Traceback (most recent call last):
    ...
    wise_atta.errors.DataError: a.zip holds 'cat/../../etc/passwd', a name that leaves the archive: ...
    """
    if ".." in PurePosixPath(name).parts or name.startswith("/") or "\\" in name or "\0" in name:
        raise errors.DataError(
            f"{path} holds {name!r}, a name that leaves the archive: get the archive from a source that you trust"
        )
    return name


def _tar_index(path: Path) -> tuple[list[str], list[int], list[int]]:
    kept = _index_file(path)
    if kept.exists():
        with np.load(kept, allow_pickle=False) as index:
            return str(index["names"]).split("\0"), index["offsets"].tolist(), index["sizes"].tolist()
    names: list[str] = []
    offsets: list[int] = []
    sizes: list[int] = []
    length = path.stat().st_size
    broken = f"{path} is not a whole tar file (%s): half downloaded? Fetch or copy it again"
    try:
        with tarfile.open(path, "r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # a million of them would fill the memory
                name = safe(path, member.name.removeprefix("./"))
                if name == ".":
                    continue
                if member.isdir():
                    names.append(name + "/")
                elif member.isreg() and not member.issparse():
                    names.append(name)
                else:
                    raise errors.DataError(f"{path}:{name} is a link or a device: only files and folders are read")
                offsets.append(member.offset_data)
                sizes.append(member.size)
                if member.offset_data + member.size > length:
                    raise errors.DataError(broken % f"it ends inside {name}")
            end = archive.offset
    except (tarfile.TarError, EOFError) as error:
        raise errors.DataError(broken % error) from error
    # A whole tar ends in zeros. Without them it was cut between two members, which the reader takes for an end.
    with path.open("rb") as file:
        file.seek(end)
        if file.read(512) != bytes(512):
            raise errors.DataError(broken % f"no mark of the end after {names[-1] if names else 'its beginning'}")
    if len(names) >= KEEP_INDEX_FROM:
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}.npz")
        np.savez(part, names=np.array("\0".join(names)), offsets=np.array(offsets), sizes=np.array(sizes))
        part.replace(kept)
    return names, offsets, sizes


def _index_file(path: Path) -> Path:
    facts = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}".encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "wise-atta" / f"tar-{key[:32]}.npz"
