"""Are bytes read in place, from folders, zips and tars alike, and is a bad archive named?"""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from wise_atta import errors
from wise_atta.data import archives

FILES = {"b/two.txt": b"2" * 700, "a/x/one.txt": b"1", "a/y.txt": b"", "top.txt": b"top", "b-c/three.txt": b"333"}


@pytest.fixture(params=["folder", "pack.zip", "pack.tar"])
def archive(request: pytest.FixtureRequest, tmp_path: Path, pack: Callable[..., Path]) -> archives.Archive:
    return archives.open_archive(pack(tmp_path / request.param, FILES))


def test_every_kind_of_archive_tells_the_same(archive: archives.Archive) -> None:
    assert archive.children() == (["top.txt"], ["a", "b", "b-c"])
    assert archive.children("a") == (["y.txt"], ["x"])
    assert {name: archive.read(name) for name in archive.walk()} == FILES


def test_an_archive_can_be_sent_to_another_process(archive: archives.Archive) -> None:
    again = pickle.loads(pickle.dumps(archive))
    assert {name: again.read(name) for name in again.walk()} == FILES


def test_a_span_is_where_the_bytes_lie(archive: archives.Archive) -> None:
    span = archive.span("b/two.txt")
    assert span is not None
    assert span.path.read_bytes()[span.offset : span.offset + span.size] == FILES["b/two.txt"]


def test_a_missing_file_is_named(archive: archives.Archive) -> None:
    with pytest.raises(errors.DataError, match="no-such"):
        archive.read("no-such.txt")


@pytest.mark.parametrize("name", ["cat/../../outside.jpg", "/etc/passwd", "..\\outside.jpg"])
@pytest.mark.parametrize("ending", ["zip", "tar"])
def test_a_name_that_leaves_the_archive_is_refused(
    tmp_path: Path, pack: Callable[..., Path], name: str, ending: str
) -> None:
    path = pack(tmp_path / f"evil.{ending}", {"cat/fine.jpg": b"x", name: b"y"})
    with pytest.raises(errors.DataError, match=r"evil\.(zip|tar) holds .* leaves the archive"):
        archives.open_archive(path)


def test_a_link_in_a_tar_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "linked.tar", "w") as tar:
        member = tarfile.TarInfo("cat/fine.jpg")
        member.type, member.linkname = tarfile.SYMTYPE, "../../etc/passwd"
        tar.addfile(member)
    with pytest.raises(errors.DataError, match=r"linked\.tar:cat/fine\.jpg is a link"):
        archives.open_archive(tmp_path / "linked.tar")


@pytest.mark.parametrize("ending", ["zip", "tar"])
@pytest.mark.parametrize("left", [0.999, 0.6, 0.1])
def test_a_half_downloaded_archive_is_named(
    tmp_path: Path, pack: Callable[..., Path], ending: str, left: float
) -> None:
    whole = pack(tmp_path / f"whole.{ending}", {f"cat/{n}.jpg": bytes([n]) * 3000 for n in range(20)}).read_bytes()
    path = tmp_path / f"half.{ending}"
    # Beyond the mark of its end a tar is filled up with zeros, which may go missing.
    size = len(whole) if ending == "zip" else whole.rindex(bytes([19]) * 3000) + 3000
    path.write_bytes(whole[: int(size * left)])
    with pytest.raises(errors.DataError, match=rf"half\.{ending} is not a whole {ending} file"):
        archives.open_archive(path)


def test_a_tar_that_was_cut_between_two_members_is_noticed(tmp_path: Path, pack: Callable[..., Path]) -> None:
    whole = pack(tmp_path / "whole.tar", {"a.jpg": b"a" * 512, "b.jpg": b"b" * 512}).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:1024])
    with pytest.raises(errors.DataError, match=r"cut\.tar is not a whole tar file \(no mark of the end after a\.jpg"):
        archives.open_archive(tmp_path / "cut.tar")


def test_a_compressed_tar_says_what_to_do(tmp_path: Path, pack: Callable[..., Path]) -> None:
    plain = pack(tmp_path / "plain.tar", FILES)
    (tmp_path / "packed.tar").write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(errors.DataError, match=r"packed\.tar is compressed with gzip.*wise-atta data fetch"):
        archives.open_archive(tmp_path / "packed.tar")


def test_what_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "set.zip.part").write_bytes(b"PK")
    with pytest.raises(errors.DataError, match=r"notes\.txt is neither"):
        archives.open_archive(tmp_path / "notes.txt")
    with pytest.raises(errors.DataError, match=r"set\.zip\.part is half downloaded"):
        archives.open_archive(tmp_path / "set.zip.part")
    with pytest.raises(errors.DataError, match=r"absent\.zip cannot be read"):
        archives.open_archive(tmp_path / "absent.zip")


def test_damage_inside_a_zip_is_found_when_the_file_is_read(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr("cat/a.jpg", b"abcdefgh")
    (tmp_path / "damaged.zip").write_bytes(file.getvalue().replace(b"abcdefgh", b"abcdefgX"))
    archive = archives.open_archive(tmp_path / "damaged.zip")
    with pytest.raises(errors.DataError, match=r"damaged\.zip:cat/a\.jpg is damaged"):
        archive.read("cat/a.jpg")


def test_one_name_twice_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("cat/a.jpg"))
    with pytest.raises(errors.DataError, match=r"twice\.tar holds 'cat/a\.jpg' twice"):
        archives.open_archive(tmp_path / "twice.tar")


def test_the_index_of_a_large_tar_is_kept(
    tmp_path: Path, pack: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(archives, "KEEP_INDEX_FROM", 5)
    path = pack(tmp_path / "large.tar", FILES)
    archives.open_archive(path)
    monkeypatch.setattr(tarfile, "open", None)
    again = archives.open_archive(path)
    assert {name: again.read(name) for name in again.walk()} == FILES
