"""Is a view what a well-known library makes of the same numbers, and the same draw for the whole batch?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, functional as torchvision

from wise_atta import errors
from wise_atta.how import Augment, LikelihoodRatio, TeacherStudent

OFF: dict[str, Any] = {
    "brightness": None,
    "contrast": None,
    "saturation": None,
    "hue": None,
    "gamma": None,
    "degrees": 0.0,
    "shift": 0.0,
    "zoom": (1.0, 1.0),
    "blur": None,
    "flip": 0.0,
    "noise": 0.0,
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int = 3, channels: int = 3, height: int = 24, width: int = 24) -> Tensor:
    return torch.rand(n, channels, height, width, generator=generator(1), dtype=torch.float64)


def view(x: Tensor, seed: int = 0, **parts: Any) -> Tensor:
    return Augment(**(OFF | parts))(x, generator(seed))


def test_with_every_part_left_out_a_view_is_the_picture() -> None:
    torch.testing.assert_close(view(pictures()), pictures(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("part", "value", "reference"),
    [
        ("brightness", 1.3, torchvision.adjust_brightness),
        ("contrast", 0.7, torchvision.adjust_contrast),
        ("saturation", 1.4, torchvision.adjust_saturation),
        ("hue", 0.06, torchvision.adjust_hue),
        ("hue", -0.4, torchvision.adjust_hue),
        ("gamma", 0.7, torchvision.adjust_gamma),
    ],
)
def test_colours_change_as_in_torchvision(part: str, value: float, reference: Any) -> None:
    expected = reference(pictures(), value)
    torch.testing.assert_close(view(pictures(), **{part: (value, value)}), expected, rtol=0, atol=2e-4)


def test_grey_and_black_pictures_keep_their_hue() -> None:
    x = torch.cat([torch.zeros(1, 3, 4, 4), torch.full((1, 3, 4, 4), 0.3), torch.ones(1, 3, 4, 4)])
    torch.testing.assert_close(view(x, hue=(0.25, 0.25)), x)


@pytest.mark.parametrize("padding", ["edge", "reflect"])
@pytest.mark.parametrize("seed", range(4))
def test_turn_shift_zoom_and_blur_are_those_of_pad_affine_blur_crop(padding: str, seed: int) -> None:
    x, size = pictures(), 24
    made = view(x, seed, padding=padding, degrees=15.0, shift=1 / 16, zoom=(0.9, 1.1), blur=(0.5, 0.5))
    # The same numbers, drawn in the same order: the jitter's order first.
    draws = generator(seed)
    torch.randperm(5, generator=draws)
    turn, right, down, zoom = torch.rand(4, generator=draws, dtype=torch.float64).tolist()
    shifts = [size * 2 / 16 * (2 * share - 1) for share in (right, down)]
    padded = torchvision.pad(x, size // 2, padding_mode=padding)
    moved = torchvision.affine(
        padded, 15 * (2 * turn - 1), shifts, 0.9 + 0.2 * zoom, [0.0, 0.0], interpolation=InterpolationMode.BILINEAR
    )
    expected = torchvision.center_crop(torchvision.gaussian_blur(moved, [5, 5], [0.5, 0.5]), [size, size])
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-6)


def test_a_flip_is_for_the_whole_batch() -> None:
    assert torch.equal(view(pictures(), flip=1.0), view(pictures()).flip(-1))
    flipped = [not torch.equal(view(pictures(), seed, flip=0.5), view(pictures())) for seed in range(40)]
    assert 10 < sum(flipped) < 30


def test_noise_has_the_given_strength() -> None:
    x = torch.full((2, 3, 64, 64), 0.5)
    change = view(x, noise=0.01) - x
    assert change.std().item() == pytest.approx(0.01, rel=0.05)


def test_every_picture_of_a_batch_gets_the_same_view() -> None:
    x = pictures(n=1)
    for seed in range(5):
        made = Augment()(x.expand(4, -1, -1, -1), generator(seed))
        torch.testing.assert_close(made, made[:1].expand_as(made))


def test_the_generator_decides_and_nothing_else() -> None:
    before = torch.get_rng_state()
    one, same, other = (Augment()(pictures(), generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 20, 32), (5, 9, 7), (3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pictures_of_any_shape_stay_in_range_shape_and_dtype(
    channels: int, height: int, width: int, dtype: torch.dtype
) -> None:
    x = (3 * pictures(2, channels, height, width) - 1).to(dtype)
    for seed in range(10):
        made = Augment()(x, generator(seed))
        assert made.shape == x.shape and made.dtype == dtype
        assert made.isfinite().all() and made.min() >= 0 and made.max() <= 1


@pytest.mark.parametrize(
    "inputs", [torch.zeros(4, 7), torch.zeros(4, 3, 8, 8, dtype=torch.uint8), {"x": torch.zeros(4)}]
)
def test_what_is_no_picture_is_refused(inputs: Any) -> None:
    with pytest.raises(errors.BadInput, match="pictures"):
        Augment()(inputs, generator())


def test_the_ranges_are_those_published_for_cotta_and_roid() -> None:
    colours = {"brightness": (0.6, 1.4), "contrast": (0.7, 1.3), "saturation": (0.5, 1.5), "hue": (-0.06, 0.06)}
    moves = {"gamma": (0.7, 1.3), "degrees": 15, "shift": 1 / 16, "zoom": (0.9, 1.1), "flip": 0.5}
    cotta = Augment(**colours, **moves, padding="edge", blur=(0.001, 0.5), noise=0.005)
    assert TeacherStudent().augment == cotta
    assert LikelihoodRatio().augment == replace(cotta, padding="reflect", blur=None, noise=0)
