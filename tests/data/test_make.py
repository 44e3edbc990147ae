"""Is a corrupted set on disk the same as the corruptions on the fly?"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wise_atta import errors
from wise_atta.data import StreamSpec, make, open_stream


@pytest.fixture
def root(tmp_path: Path, pack: Callable[..., Path], jpeg: Callable[..., bytes]) -> Path:
    pack(tmp_path / "mine.zip", {f"{kind}/{n}.jpg": jpeg(n, (32, 32)) for kind in ("cat", "dog") for n in range(3)})
    return tmp_path


def pixels(spec: StreamSpec, root: Path) -> tuple[torch.Tensor, list[int]]:
    stream, truth = open_stream(spec, root)
    batches = list(stream)
    inputs = torch.cat([batch.inputs for batch in batches if isinstance(batch.inputs, torch.Tensor)])
    return inputs, [truth[name] for batch in batches for name in batch.ids or ()]


@pytest.mark.parametrize(("form", "layout"), [("npy", "npy"), ("png", "grid")])
def test_what_is_written_is_what_would_have_been_computed(root: Path, form: str, layout: str) -> None:
    card = make.make("tree:mine.zip", root / "out", root, corruptions=["fog", "shot_noise"], form=form, seed=3)
    assert card["pictures"] == 2 * 5 * 6
    assert json.loads((root / "out" / "made.json").read_text()) == card
    for corruption, severity in (("fog", 1), ("shot_noise", 5)):
        options: dict[str, Any] = {"domains": (corruption,), "severity": severity, "order": "sequential"}
        stored, labels = pixels(StreamSpec(data=f"{layout}:out", **options), root)
        computed, truth = pixels(StreamSpec(data="tree:mine.zip+c", seed=3, **options), root)
        assert torch.equal(stored, computed)
        assert labels == truth


def test_jpeg_files_are_close_and_in_the_layout_of_imagenet_c(root: Path) -> None:
    make.make("tree:mine.zip", root / "out", root, corruptions=["fog"], severities=[2], form="jpeg")
    assert sorted(path.name for path in (root / "out" / "fog" / "2" / "dog").iterdir()) == [
        "0.jpeg",
        "1.jpeg",
        "2.jpeg",
    ]
    options: dict[str, Any] = {"domains": ("fog",), "severity": 2, "order": "sequential"}
    stored, _ = pixels(StreamSpec(data="grid:out", **options), root)
    computed, _ = pixels(StreamSpec(data="tree:mine.zip+c", **options), root)
    assert 0 < float((stored - computed).abs().mean()) < 0.02


def test_arrays_have_the_shape_of_cifar_c(root: Path) -> None:
    make.make("tree:mine.zip", root / "out", root, corruptions=["fog"], limit=4)
    array, labels = np.load(root / "out" / "fog.npy"), np.load(root / "out" / "labels.npy")
    assert array.shape == (20, 32, 32, 3) and array.dtype == np.uint8
    assert labels.shape == (20,) and len(np.unique(labels)) == 2


def test_options_that_exclude_each_other_are_refused_before_anything_is_written(root: Path) -> None:
    with pytest.raises(errors.BadConfig, match="severities 1 to 5"):
        make.make("tree:mine.zip", root / "out", root, severities=[5])
    with pytest.raises(errors.UnknownName, match="format"):
        make.make("tree:mine.zip", root / "out", root, form="gif")
    with pytest.raises(errors.UnknownName, match="Did you mean 'fog'"):
        make.make("tree:mine.zip", root / "out", root, corruptions=["frog"])
    assert not (root / "out").exists()
    (root / "out").mkdir()
    with pytest.raises(errors.BadConfig, match="out exists"):
        make.make("tree:mine.zip", root / "out", root)


def test_pictures_that_would_share_a_file_are_named(root: Path, pack: Callable[..., Path]) -> None:
    pack(root / "twins.zip", {f"{kind}/0.{form}": b"" for kind in ("cat", "dog") for form in ("jpg", "png")})
    with pytest.raises(errors.DataError, match=r"cat/0\.jpg and .*cat/0\.png would both be written as cat/0"):
        make.make("tree:twins.zip", root / "out", root, corruptions=["fog"], form="png")
    assert not (root / "out").exists()


def test_a_full_disk_is_named_and_leaves_nothing_behind(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *rest: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(make, "_write_rows", full)
    with pytest.raises(errors.DataError, match=r"fog\.npy cannot be written: No space left on device"):
        make.make("tree:mine.zip", root / "out", root, corruptions=["fog"])
    assert sorted(path.name for path in root.iterdir()) == ["mine.zip"]


def test_a_broken_picture_leaves_nothing_behind(root: Path, pack: Callable[..., Path]) -> None:
    pack(root / "bad.zip", {"cat/0.jpg": b"no picture"})
    with pytest.raises(errors.DataError, match=r"cat/0\.jpg cannot be decoded"):
        make.make("tree:bad.zip", root / "out", root, corruptions=["fog"])
    assert sorted(path.name for path in root.iterdir()) == ["bad.zip", "mine.zip"]
