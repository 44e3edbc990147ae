"""Does a picture's corruption depend on what it should, and on nothing else?"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from torch import Tensor

from wise_atta import errors, rng
from wise_atta.data import corruptions
from wise_atta.data.corruptions import (
    CORRUPTIONS,
    EXTRA,
    apply,
    corrupt,
    frost_source,
    frost_textures,
    sheet,
    table_for,
)
from wise_atta.data.corruptions.tables import SIZES, TABLES, Amount, Spatter

ALL = (*CORRUPTIONS, *EXTRA)
FIXED = {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
}
# The published parameters themselves do not grow steadily here: glass trades blur for reach, elastic trades its affine
# part for a finer field, snow its density for the size of flakes, frost the picture for the texture, spatter water for
# mud, and saturate turns from paler to stronger.
UNSTEADY = {"glass_blur", "elastic_transform", "snow", "frost", "spatter", "saturate"}


def photos(count: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Coloured pictures with shapes of all sizes, from half the picture to single pixels."""
    chance = rng.numpy(seed, "photos")
    picture = torch.full((count, 3, height, width), 128.0, dtype=torch.float64)
    for cells in (2, 4, 8, 16, 32, 64, 128):
        if cells <= min(height, width):
            noise = torch.from_numpy(chance.normal(size=(count, 3, cells, cells)))
            picture += 25 * torch.nn.functional.interpolate(noise, size=(height, width), mode="bilinear")
    return picture.clamp(0, 255).to(torch.uint8)


def test_there_are_fifteen_and_four_in_the_published_order() -> None:
    assert CORRUPTIONS[:3] == ("gaussian_noise", "shot_noise", "impulse_noise")
    assert CORRUPTIONS[-3:] == ("elastic_transform", "pixelate", "jpeg_compression")
    assert (len(CORRUPTIONS), len(EXTRA), len(set(ALL))) == (15, 4, 19)
    assert all(set(TABLES[size]) == set(ALL) for size in SIZES)
    assert all(len(rows) == 5 for size in SIZES for rows in TABLES[size].values())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (224, 224), (40, 75), (121, 96), (16, 16)])
def test_a_picture_keeps_its_shape_and_changes(name: str, height: int, width: int) -> None:
    images = photos(1, height, width)
    before = images.clone()
    result = corrupt(images, name, 5)
    assert result.shape == images.shape
    assert result.dtype == torch.uint8
    assert not torch.equal(result, images)
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("severity", [2, 5])
def test_the_batch_a_picture_is_in_does_not_matter(name: str, severity: int) -> None:
    images = photos(4, 70, 52)
    whole = corrupt(images, name, severity, ids="abcd")
    assert torch.equal(corrupt(images[2:3], name, severity, ids=["c"]), whole[2:3])
    turned = corrupt(images.flip(0), name, severity, ids="dcba")
    assert torch.equal(turned.flip(0), whole)


@pytest.mark.parametrize("name", ALL)
def test_groups_and_threads_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(5, 48, 64)
    whole = corrupt(images, name, 4, ids=range(5))
    monkeypatch.setitem(corruptions._GROUP_PIXELS, "cpu", 2 * 48 * 64)
    torch.set_num_threads(2)
    try:
        assert torch.equal(corrupt(images, name, 4, ids=range(5)), whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", ALL)
def test_only_random_corruptions_look_at_seed_and_id(name: str) -> None:
    images = photos(1, 64, 64)
    first = corrupt(images, name, 3, seed=1, ids=["a"])
    assert torch.equal(first, corrupt(images, name, 3, seed=1, ids=["a"]))
    for other in (corrupt(images, name, 3, seed=2, ids=["a"]), corrupt(images, name, 3, seed=1, ids=["b"])):
        assert torch.equal(first, other) == (name in FIXED)


def test_without_ids_the_pixels_are_the_id() -> None:
    images = photos(3, 32, 32)
    images[2] = images[0]
    noisy = corrupt(images, "gaussian_noise")
    assert torch.equal(noisy[0], noisy[2])
    assert torch.equal(noisy[1:2], corrupt(images[1:2], "gaussian_noise"))
    assert not torch.equal(noisy, corrupt(images, "gaussian_noise", seed=1))


def test_an_id_is_the_same_as_a_number_or_a_string() -> None:
    images = photos(1, 32, 32)
    results = [corrupt(images, "shot_noise", ids=[key]) for key in (7, "7", np.int64(7))]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", [n for n in ALL if n not in UNSTEADY])
@pytest.mark.parametrize("size", SIZES)
def test_more_severity_is_further_from_the_picture(name: str, size: int) -> None:
    # Detail at all scales, so that every blur has something to remove; the same chance for all severities.
    images = photos(4 if size == 224 else 16, size, size, seed=3)
    rows = TABLES[size][name]
    results = [apply(images, name, row, ids=range(len(images))) for row in rows]
    far = [(result.float() - images.float()).abs().mean().item() for result in results]
    # Two severities of motion blur at 32 px differ in the length of the line alone, beyond what its weights reach.
    assert all(b > a * 0.995 for a, b in itertools.pairwise(far)), far
    assert far[4] > 1.05 * far[0]


@given(
    st.integers(16, 60),
    st.integers(16, 60),
    st.sampled_from(ALL),
    st.integers(1, 5),
    st.sampled_from(SIZES),
    st.integers(0, 255),
)
def test_any_size_with_any_table_and_flat_pictures(
    height: int, width: int, name: str, severity: int, size: int, grey: int
) -> None:
    images = torch.full((2, 3, height, width), grey, dtype=torch.uint8)
    result = corrupt(images, name, severity, size=size, ids=[1, 2])
    assert result.shape == images.shape
    if name in {"defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur", "pixelate", "contrast"}:
        # A disk softened at the edge of its window weighs a little more or less than one.
        assert (result.int() - grey).abs().max() <= (3 if name == "defocus_blur" else 0)
    if name == "elastic_transform":
        assert torch.equal(result, images)


def test_tables_follow_the_size_of_the_picture_unless_told() -> None:
    images = photos(1, 64, 64)
    assert table_for(64, 64) == 64
    assert torch.equal(corrupt(images, "contrast", 1), apply(images, "contrast", Amount(0.4)))
    assert torch.equal(corrupt(images, "contrast", 1, size=32), apply(images, "contrast", Amount(0.75)))


def test_strided_and_empty_batches() -> None:
    images = photos(2, 32, 40)
    for name in ALL:
        plain = corrupt(images, name, ids=[0, 1])
        channels_last = images.contiguous(memory_format=torch.channels_last)
        assert torch.equal(corrupt(channels_last, name, ids=[0, 1]), plain)
        assert corrupt(images[:0], name).shape == (0, 3, 32, 40)
    with torch.inference_mode():
        assert torch.equal(corrupt(images, name, ids=[0, 1]), plain)


def test_water_without_any_drop_leaves_the_picture() -> None:
    images = photos(1, 32, 32)
    dry = Spatter(mean=0.1, deviation=0.01, sigma=1, threshold=0.7, strength=0.6, mud=0)
    assert torch.equal(apply(images, "spatter", dry), images)


def test_drawn_frost_is_named_and_looks_like_the_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(2, 64, 64)
    monkeypatch.setattr(frost_textures, "_folder", lambda: None)
    frost_textures._textures.cache_clear()
    frost_textures.canvas.cache_clear()
    try:
        assert frost_source() == "procedural"
        textures = frost_textures._textures()
        result = corrupt(images, "frost", ids=[0, 1])
    finally:
        frost_textures._textures.cache_clear()
        frost_textures.canvas.cache_clear()
    for texture, (height, width, colour, deviation) in zip(textures, frost_textures._LOOKS, strict=True):
        assert texture.shape == (height, width, 3)
        assert np.abs(texture.mean((0, 1)) - colour).max() < 4
        assert abs(texture.std((0, 1)).mean() - deviation) < 4
    assert not torch.equal(result, images)


def test_a_sheet_shows_them_all(tmp_path: Path) -> None:
    picture, out = tmp_path / "picture.png", tmp_path / "new" / "sheet.png"
    Image.fromarray(photos(1, 90, 120)[0].permute(1, 2, 0).numpy()).save(picture)
    assert sheet.main([str(out), "--picture", str(picture)]) == 0
    with Image.open(out) as made:
        assert made.size[1] >= 10 * 128
        assert np.array(made).std() > 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_gives_the_same_bytes(size: int) -> None:
    images = photos(4, size, size + 8)
    for name, severity in itertools.product(ALL, range(1, 6)):
        here = corrupt(images, name, severity, ids=range(4))
        there = corrupt(images.cuda(), name, severity, ids=range(4))
        assert there.is_cuda
        assert torch.equal(there.cpu(), here), (name, severity)


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (torch.zeros(2, 3, 32, 32), "float32"),
        (np.zeros((2, 3, 32, 32), dtype=np.uint8), "ndarray"),
        (torch.zeros(3, 32, 32, dtype=torch.uint8), r"\[3, 32, 32\]"),
        (torch.zeros(2, 32, 32, 3, dtype=torch.uint8), r"\[2, 32, 32, 3\]"),
        (torch.zeros(2, 3, 8, 32, dtype=torch.uint8), "too small"),
    ],
)
def test_pictures_of_the_wrong_kind_are_refused(images: Tensor, says: str) -> None:
    with pytest.raises(errors.BadInput, match=says):
        corrupt(images, "fog")


@pytest.mark.parametrize("severity", [0, 6, -1, 2.5, "3", None])
def test_a_severity_beyond_five_is_refused(severity: int) -> None:
    with pytest.raises(errors.BadConfig, match="severity"):
        corrupt(photos(1, 32, 32), "fog", severity)


def test_other_wrong_arguments_are_refused() -> None:
    images = photos(2, 32, 32)
    with pytest.raises(errors.UnknownName, match="Did you mean 'zoom_blur'"):
        corrupt(images, "zoomblur")
    with pytest.raises(errors.BadInput, match="1 ids for 2 images"):
        corrupt(images, "fog", ids=["a"])
    with pytest.raises(errors.BadConfig, match="100 px"):
        corrupt(images, "fog", size=100)
