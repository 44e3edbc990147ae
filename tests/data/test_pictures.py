"""Do pixels come out as torchvision's loader gives them, and is a bad picture named?"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image
from torchvision import transforms

from wise_atta import errors
from wise_atta.data import open_dataset
from wise_atta.data.pictures import SUFFIXES, decode, fit


def encoded(picture: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, form)
    return file.getvalue()


def colours(width: int = 24, height: int = 20) -> Image.Image:
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([across * 10, down * 12, across * 5 + down * 6], axis=2).astype(np.uint8))


@settings(max_examples=60)
@given(
    width=st.integers(5, 70),
    height=st.integers(5, 70),
    resize=st.integers(8, 40),
    crop=st.integers(1, 8),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
)
def test_sizes_and_pixels_are_those_of_torchvision(
    width: int, height: int, resize: int, crop: int, interpolation: str
) -> None:
    picture = colours(width, height)
    mode = transforms.InterpolationMode(interpolation)
    reference = transforms.Compose([transforms.Resize(resize, mode), transforms.CenterCrop(crop)])
    ours = fit(picture, "a", resize=resize, crop=crop, interpolation=interpolation)
    assert np.array_equal(ours, np.asarray(reference(picture)))


def test_three_crops_are_the_corners_and_the_centre() -> None:
    pixels = np.asarray(colours(10, 8))
    assert np.array_equal(fit(pixels, "a", crop=4, where=0.0), pixels[:4, :4])
    assert np.array_equal(fit(pixels, "a", crop=4, where=0.5), pixels[2:6, 3:7])
    assert np.array_equal(fit(pixels, "a", crop=4, where=1.0), pixels[4:, 6:])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_other_kinds_of_pixels_become_rgb_as_pillow_converts_them(mode: str) -> None:
    picture = colours().convert(mode)
    got = decode(encoded(picture, "PNG"), "a")
    assert got.mode == "RGB"
    assert np.array_equal(np.asarray(got), np.asarray(picture.convert("RGB")))


def test_every_picture_that_pillow_knows_by_a_common_ending_is_read(tmp_path: Path) -> None:
    known = Image.registered_extensions()
    here = [suffix for suffix in SUFFIXES if known.get(suffix) in Image.SAVE and known[suffix] in Image.OPEN]
    assert {".gif", ".pgm", ".jfif", ".jpe", ".jpg"} <= {*here}
    for number, suffix in enumerate(here):
        (tmp_path / "mine" / "cat").mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / "cat" / f"{number}{suffix}").write_bytes(encoded(colours(), known[suffix]))
    place = next(open_dataset("tree:mine", tmp_path).all_places())
    assert len(place) == len(here)
    for index in range(len(place)):
        assert place.load(index, resize=None, crop=None, interpolation="bilinear").shape == (20, 24, 3)


def test_a_cmyk_jpeg_becomes_rgb() -> None:
    got = decode(encoded(colours().convert("CMYK"), "JPEG"), "a")
    assert got.mode == "RGB"
    assert np.abs(np.asarray(got).astype(int) - np.asarray(colours()).astype(int)).mean() < 8


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.array([[0, 257, 128 * 257, 65535]], dtype=np.uint16)
    got = np.asarray(decode(encoded(Image.fromarray(values), "PNG"), "a"))
    assert got[0, :, 0].tolist() == [0, 1, 128, 255]


def test_grey_values_beyond_sixteen_bits_are_refused() -> None:
    data = encoded(Image.fromarray(np.array([[70000]], dtype=np.int32)), "TIFF")
    with pytest.raises(errors.DataError, match=r"deep\.tif has grey values outside 16 bits"):
        decode(data, "deep.tif")


def test_floating_point_pixels_are_refused() -> None:
    data = encoded(Image.fromarray(np.array([[0.5]], dtype=np.float32)), "TIFF")
    with pytest.raises(errors.DataError, match=r"float\.tif has pixels of kind 'F'"):
        decode(data, "float.tif")


@pytest.mark.parametrize("left", [0, 10, 200, -30])
def test_a_truncated_jpeg_is_named(jpeg: Callable[..., bytes], left: int) -> None:
    whole = jpeg(0, (64, 64))
    with pytest.raises(errors.DataError, match=r"cat/broken\.jpg cannot be decoded"):
        decode(whole[:left], "cat/broken.jpg")


def test_a_picture_smaller_than_the_crop_is_named() -> None:
    with pytest.raises(errors.DataError, match=r"small\.png is 24×20, smaller than the crop of 32"):
        fit(colours(), "small.png", crop=32)
