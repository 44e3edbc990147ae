"""Does a check count, hash and decode, and name every missing or broken file?"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from wise_atta import errors
from wise_atta.data import catalog, fetch
from wise_atta.data.check import check


@pytest.fixture
def tree(tmp_path: Path, pack: Callable[..., Path], jpeg: Callable[..., bytes]) -> Path:
    pack(tmp_path / "mine", {f"{kind}/{n}.jpg": jpeg(n) for kind in ("cat", "dog") for n in range(3)})
    return tmp_path


def test_a_whole_set_has_counts_a_hash_and_no_problems(tree: Path) -> None:
    steps: list[tuple[int, int]] = []
    findings = check("tree:mine", tree, progress=lambda *step: steps.append(step))
    assert (findings.pictures, findings.classes, findings.problems) == (6, 2, [])
    assert findings.sha256 == check("tree:mine", tree, decode=False).sha256
    assert steps == [(done, 6) for done in range(1, 7)]


def test_all_that_is_wrong_is_named_at_once(tree: Path, jpeg: Callable[..., bytes]) -> None:
    (tree / "mine" / "cat" / "1.jpg").write_bytes(jpeg(1)[:-50])
    (tree / "mine" / "dog" / "2.jpg").write_bytes(b"not a picture")
    (tree / "mine" / "emu").mkdir()
    problems = "\n".join(check("tree:mine", tree).problems)
    assert "cat/1.jpg cannot be decoded" in problems
    assert "dog/2.jpg cannot be decoded" in problems
    assert "emu holds no picture" in problems
    assert len(problems.splitlines()) == 3


def test_without_decoding_a_broken_picture_goes_unnoticed_but_is_hashed(tree: Path, jpeg: Callable[..., bytes]) -> None:
    before = check("tree:mine", tree, decode=False).sha256
    (tree / "mine" / "cat" / "1.jpg").write_bytes(jpeg(1)[:-50])
    after = check("tree:mine", tree, decode=False)
    assert after.problems == [] and after.sha256 != before


def test_a_manifest_names_what_changed(tree: Path, jpeg: Callable[..., bytes]) -> None:
    manifest = tree / "mine.json"
    assert check("tree:mine", tree, manifest=manifest).problems == []
    assert check("tree:mine", tree, manifest=manifest).problems == []
    (tree / "mine" / "cat" / "0.jpg").write_bytes(jpeg(9))
    (tree / "mine" / "cat" / "1.jpg").unlink()
    (tree / "mine" / "dog" / "3.jpg").write_bytes(jpeg(3))
    problems = check("tree:mine", tree, manifest=manifest).problems
    assert [problem.partition(" since")[0] for problem in problems] == [
        "tree:mine: mine/cat/0.jpg is changed",
        "tree:mine: mine/cat/1.jpg is missing",
        "tree:mine: mine/dog/3.jpg is new",
    ]


def test_a_manifest_is_not_written_of_a_broken_set_nor_read_from_another_file(tree: Path) -> None:
    (tree / "mine" / "cat" / "0.jpg").write_bytes(b"")
    check("tree:mine", tree, manifest=tree / "mine.json")
    assert not (tree / "mine.json").exists()
    (tree / "notes.json").write_text("[1, 2]")
    with pytest.raises(errors.DataError, match=r"notes\.json is not a manifest"):
        check("tree:mine", tree, manifest=tree / "notes.json")


def test_a_picture_that_one_corruption_lacks_is_named(
    tmp_path: Path, pack: Callable[..., Path], class_files: Callable[..., dict[str, bytes]]
) -> None:
    files = class_files("fog/1/") | class_files("fog/2/") | class_files("snow/1/") | class_files("snow/2/")
    del files["snow/2/n01498041/ILSVRC2012_val_00000003.JPEG"]
    pack(tmp_path / "grid", files)
    (problem,) = check("grid:grid", tmp_path).problems
    assert "snow/2/n01498041/ILSVRC2012_val_00000003.JPEG is missing" in problem


def test_numbers_are_compared_with_the_published_ones(imagenet_folder: Path) -> None:
    findings = check("imagenet-k", imagenet_folder)
    assert findings.problems == [
        "imagenet-k, imagenet-k: 6 pictures, 50,889 were published",
        "imagenet-k: 3 classes, 1000 were published",
    ]


def test_an_archive_that_is_not_the_published_one_is_named(imagenet_folder: Path) -> None:
    findings = check("imagenet-r", imagenet_folder)
    assert findings.ignored == ["imagenet-r/README.txt"]
    problems = findings.problems
    assert any("imagenet-r.tar has sha256" in problem and "published at" in problem for problem in problems)


def test_an_archive_that_changed_since_it_was_fetched_is_named(
    tmp_path: Path, pack: Callable[..., Path], class_files: Callable[..., dict[str, bytes]]
) -> None:
    path = pack(tmp_path / "imagenet-a.tar", class_files("imagenet-a/"))
    record = {"imagenet-a.tar": {"sha256": fetch.file_hash(path)}}
    (tmp_path / fetch.RECORD).write_text(json.dumps(record))
    assert not any("imagenet-a.tar has" in problem for problem in check("imagenet-a", tmp_path).problems)
    with tarfile.open(path, "a") as tar:
        tar.addfile(tarfile.TarInfo("imagenet-a/README.txt"))
    assert any("is recorded in checksums.json" in problem for problem in check("imagenet-a", tmp_path).problems)


def test_a_set_that_cannot_be_opened_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "CIFAR-10-C").mkdir()
    assert check("cifar10-c", tmp_path).problems == [f"{tmp_path / 'CIFAR-10-C'} has no labels.npy"]


def test_real_sets_are_whole(wise_atta_data: Path) -> None:
    findings = check("imagenet-sample", wise_atta_data)
    assert (findings.pictures, findings.classes, findings.problems) == (500, 500, [])


def test_every_known_set_has_counts() -> None:
    assert all(entry.counts() for entry in catalog.ENTRIES.values())
