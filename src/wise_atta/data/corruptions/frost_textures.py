"""Textures of frost on a window: photographs where they are installed, drawn crystals where not."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wise_atta import rng

# The released sets choose among the first five of six photographs.
_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
# Height, width, mean colour and deviation of each photograph, which the drawn textures take over.
_LOOKS = (
    (600, 900, (78, 149, 166), 19),
    (315, 560, (201, 205, 214), 22),
    (315, 560, (201, 205, 214), 22),
    (350, 527, (138, 153, 165), 29),
    (495, 660, (112, 123, 135), 43),
)
_DIRECTIONS = 8
_MARGIN = 1.1

Texture = NDArray[np.uint8]


def frost_source() -> Literal["imagecorruptions", "procedural"]:
    """Where the frost textures come from: photographs of the package `imagecorruptions`, or drawn by this module."""
    return "imagecorruptions" if _folder() is not None else "procedural"


def _folder() -> Path | None:
    package = importlib.util.find_spec("imagecorruptions")
    if package is None or package.origin is None or importlib.util.find_spec("PIL") is None:
        return None
    folder = Path(package.origin).parent / "frost"
    return folder if all((folder / name).is_file() for name in _FILES) else None


@lru_cache(maxsize=16)
def canvas(scale: float, height: int, width: int, device: torch.device) -> tuple[Tensor, NDArray[np.int64]]:
    """All textures resized, in one tensor [5, 3, H, W] of 8 bits, and each one's height and width inside it.

    A texture that is not larger than the picture of `height` × `width` is enlarged until it is.
    """
    textures = []
    for texture in _textures():
        need = max(height / (texture.shape[0] * scale), width / (texture.shape[1] * scale))
        textures.append(_resize(texture, scale if need < 1 else scale * need * _MARGIN))
    sizes = np.array([t.shape[:2] for t in textures], dtype=np.int64)
    room = np.zeros((len(textures), 3, *sizes.max(0)), dtype=np.uint8)
    for slot, texture in zip(room, textures, strict=True):
        slot[:, : texture.shape[0], : texture.shape[1]] = texture.transpose(2, 0, 1)
    return torch.from_numpy(room).to(device), sizes


@lru_cache(maxsize=1)
def _textures() -> list[Texture]:
    folder = _folder()
    if folder is None:
        return [_draw(number) for number in range(len(_LOOKS))]
    from PIL import Image

    return [np.array(Image.open(folder / name).convert("RGB")) for name in _FILES]


def _resize(texture: Texture, scale: float) -> Texture:
    """Bilinear between pixel centres, without smoothing when made smaller: so were the released sets."""
    if scale == 1:
        return texture
    down, across = (_interpolation(size, scale) for size in texture.shape[:2])
    return np.rint(np.einsum("hi,ijc,wj->hwc", down, texture, across, optimize=True)).astype(np.uint8)


def _interpolation(size: int, scale: float) -> NDArray[np.float64]:
    position = ((np.arange(round(size * scale)) + 0.5) / scale - 0.5).clip(0, size - 1)
    low = np.floor(position).astype(np.int64)
    rows = np.arange(len(position))
    matrix = np.zeros((len(position), size))
    np.add.at(matrix, (rows, low), 1 - (position - low))
    np.add.at(matrix, (rows, np.minimum(low + 1, size - 1)), position - low)
    return matrix


def _draw(number: int) -> Texture:
    """Needles in patches: noise smeared along lines, in a direction that changes from patch to patch."""
    height, width, colour, deviation = _LOOKS[number]
    chance = rng.numpy(number, "frost texture")
    row, column = np.meshgrid(np.fft.fftfreq(height), np.fft.rfftfreq(width), indexing="ij")
    best, needles = np.full((height, width), -np.inf), np.zeros((height, width))
    for angle in np.pi * np.arange(_DIRECTIONS) / _DIRECTIONS:
        along, across = row * np.sin(angle) + column * np.cos(angle), column * np.sin(angle) - row * np.cos(angle)
        noise = np.fft.rfft2(chance.standard_normal((2, height, width)))
        smear = np.exp(-((along * 60) ** 2) - (across * 3) ** 2)
        patch = np.exp(-((along * 120) ** 2) - (across * 40) ** 2)
        streaks, where = np.fft.irfft2(noise * np.stack([smear, patch]), s=(height, width))
        where /= where.std()
        needles = np.where(where > best, np.abs(streaks) / streaks.std(), needles)
        best = np.maximum(best, where)
    needles = (needles - needles.mean()) / needles.std()
    return (np.array(colour) + deviation * needles[..., None]).clip(0, 255).astype(np.uint8)
