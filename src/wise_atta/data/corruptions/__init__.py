"""The corruptions of ImageNet-C, made on the fly.

`corrupt` turns a batch of 8-bit pictures into corrupted 8-bit pictures, on the CPU or a GPU. A picture's result depends
on the picture, the corruption, the severity and the seed (and its id, where one is given), never on its batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wise_atta.data.corruptions import blur, digital, noise, weather
from wise_atta.data.corruptions.chance import Chance, draw
from wise_atta.data.corruptions.frost_textures import frost_source
from wise_atta.data.corruptions.spatter import spatter
from wise_atta.data.corruptions.tables import CORRUPTIONS, EXTRA, SIZES, TABLES, Parameters, table_for
from wise_atta.errors import BadConfig, BadInput, unknown

__all__ = ["CORRUPTIONS", "EXTRA", "SIZES", "apply", "corrupt", "frost_source", "table_for"]

_SMALLEST = 16
# Pictures are worked on in groups: on a CPU as many as its caches hold, on a GPU as many as keep it busy.
_GROUP_PIXELS = {"cpu": 1 << 17, "cuda": 1 << 22}

# Every function takes its own kind of parameters; `tables` pairs them.
_FUNCTIONS: dict[str, Callable[[Tensor, Any, Chance], Tensor]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": spatter,
    "saturate": digital.saturate,
}


def corrupt(
    images: Tensor,
    name: str,
    severity: int = 5,
    *,
    seed: int = 0,
    ids: Sequence[int | str] | None = None,
    size: int | None = None,
) -> Tensor:
    """Corrupted copies of 8-bit pictures, on the same device.

    Parameters
    ----------
    images
        Pixels in 0 … 255, uint8, [n, 3, H, W], red first.
    name
        One of `CORRUPTIONS` (the 15 of ImageNet-C) or `EXTRA` (4 more).
    severity
        1 to 5.
    seed
        Another seed gives other noise.
    ids
        One id a picture, which its noise is drawn from. Without ids the pixels take their place: the result is as
        reproducible, but pictures on a GPU are copied to the host to be hashed.
    size
        Whose parameters: 32 (CIFAR-10-C), 64 (TinyImageNet-C) or 224 (ImageNet-C). By default from the pictures' own
        size, see `table_for`.

    Examples
    --------
    >>> images = torch.full((2, 3, 32, 32), 128, dtype=torch.uint8)
    >>> noisy = corrupt(images, "gaussian_noise", 3, ids=["a", "b"])
    >>> noisy.shape, noisy.dtype
    (torch.Size([2, 3, 32, 32]), torch.uint8)
    >>> torch.equal(noisy[1:], corrupt(images[1:], "gaussian_noise", 3, ids=["b"]))
    True
    """
    _check(images, name, ids)
    level = _severity(severity)
    if size is None:
        size = table_for(*images.shape[-2:])
    elif size not in SIZES:
        raise BadConfig(f"no parameter table for {size} px pictures; size is one of {', '.join(map(str, SIZES))}")
    return apply(images, name, TABLES[size][name][level - 1], severity=level, seed=seed, ids=ids)


@torch.no_grad()
def apply(
    images: Tensor,
    name: str,
    parameters: Parameters,
    *,
    severity: int = 0,
    seed: int = 0,
    ids: Sequence[int | str] | None = None,
) -> Tensor:
    """A corruption with parameters of one's own, see `tables`. The severity only takes part in the picture's key.

    >>> from wise_atta.data.corruptions.tables import Amount
    >>> apply(torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "brightness", Amount(0.5)).unique().item()
    127
    """
    _check(images, name, ids)
    # Exact sums need float64, which some devices lack; those pictures are worked on by the CPU.
    device = images.device if images.device.type in _GROUP_PIXELS else torch.device("cpu")
    group = max(1, _GROUP_PIXELS[device.type] // (images.shape[2] * images.shape[3]))
    parts = []
    for start in range(0, len(images), group):
        part = images[start : start + group].to(device).contiguous()
        chance = draw(seed, name, severity, None if ids is None else ids[start : start + group], part, device)
        parts.append(_FUNCTIONS[name](part, parameters, chance))
    return torch.cat(parts).to(images.device) if parts else images.clone()


def _check(images: Tensor, name: str, ids: Sequence[int | str] | None) -> None:
    if name not in _FUNCTIONS:
        raise unknown("corruption", name, _FUNCTIONS)
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise BadInput(
            f"images are {kind}, not a tensor of torch.uint8. Pixels in [0, 1]: (x * 255).round().to(torch.uint8)"
        )
    if images.ndim != 4 or images.shape[1] != 3:
        raise BadInput(
            f"images have shape {list(images.shape)}, not [n, 3, H, W]: a batch of RGB pictures, channels first"
        )
    if min(images.shape[-2:]) < _SMALLEST:
        raise BadInput(
            f"images of {images.shape[2]} × {images.shape[3]} px are too small; the least side is {_SMALLEST} px"
        )
    if ids is not None and len(ids) != len(images):
        raise BadInput(f"{len(ids)} ids for {len(images)} images; give one id a picture")


def _severity(severity: int) -> int:
    try:
        level = operator.index(severity)
    except TypeError:
        level = 0
    if not 1 <= level <= 5:
        raise BadConfig(f"severity {severity!r} is not a whole number from 1 to 5")
    return level
