"""Corruptions of contrast, colour, geometry, resolution, and by compression."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wise_atta.data.corruptions import filters
from wise_atta.data.corruptions.chance import Chance
from wise_atta.data.corruptions.jpeg import compress
from wise_atta.data.corruptions.tables import Amount, Elastic, Saturate

_BOX_BITS = 22  # Pillow keeps its resampling weights in 22 bits


def contrast(images: Tensor, amount: Amount, chance: Chance) -> Tensor:
    """Every channel drawn towards its own mean."""
    picture = images.to(torch.float64)
    total = picture.sum((2, 3), keepdim=True)
    mean = total / filters.constant(images.shape[2] * images.shape[3], total)
    return filters.to_bytes((picture - mean) * amount.value + mean)


def saturate(images: Tensor, saturate: Saturate, chance: Chance) -> Tensor:
    """Colours paler or stronger: the saturation of hue, saturation and value is scaled and shifted."""
    return recolour(images, scale=saturate.scale, shift=saturate.shift)


def recolour(images: Tensor, *, scale: float = 1.0, shift: float = 0.0, lift: float = 0.0) -> Tensor:
    """Saturation · scale + shift and value + lift, both cut to [0, 1], at the same hue.

    The share of a channel's distance to the brightest in that of the darkest is a matter of hue alone, so the new
    channel is value · (1 - saturation · share), and no hue need be computed. Grey has no hue and counts as red.
    """
    picture = images.to(torch.float64)
    picture = picture / filters.constant(255, picture)
    value, darkest = picture.amax(1, keepdim=True), picture.amin(1, keepdim=True)
    span = value - darkest
    grey = span == 0
    red = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64).to(images.device, non_blocking=True).view(1, 3, 1, 1)
    share = torch.where(grey, red, (value - picture) / span)
    saturation = torch.where(grey, 0.0, span / value)
    saturation = (saturation * scale + shift).clamp(0, 1)
    return filters.to_bytes((1 - saturation * share) * (value + lift).clamp(0, 1) * 255)


def pixelate(images: Tensor, amount: Amount, chance: Chance) -> Tensor:
    """Shrunk by averaging and enlarged by repetition, with Pillow's arithmetic."""
    height, width = images.shape[-2:]
    small = (int(height * amount.value), int(width * amount.value))
    picture = images.to(torch.float64)
    shrunk = _rounded(picture @ _box(width, small[1], images.device).T)
    shrunk = _rounded(_box(height, small[0], images.device) @ shrunk).to(torch.uint8)
    rows, columns = (_nearest(s, b, images.device) for s, b in zip(small, (height, width), strict=True))
    return shrunk.index_select(-2, rows).index_select(-1, columns)


def _rounded(total: Tensor) -> Tensor:
    return (total * (1.0 / (1 << _BOX_BITS)) + 0.5).floor()


@lru_cache(maxsize=64)
def _box(big: int, small: int, device: torch.device) -> Tensor:
    scale = big / small
    centre = (np.arange(small)[:, None] + 0.5) * scale
    distance = (np.arange(big) + 0.5 - centre) / scale
    inside = (distance > -0.5) & (distance <= 0.5)
    # Pillow looks only at pixels from round(centre - half) to round(centre + half).
    window = (np.arange(big) >= np.floor(centre - scale / 2 + 0.5)) & (
        np.arange(big) < np.floor(centre + scale / 2 + 0.5)
    )
    weight = (inside & window).astype(np.float64)
    weight /= weight.sum(1, keepdims=True)
    return torch.from_numpy(np.floor(weight * (1 << _BOX_BITS) + 0.5)).to(device)


@lru_cache(maxsize=64)
def _nearest(small: int, big: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.floor((np.arange(big) + 0.5) * (small / big)).astype(np.int64)).to(device)


def jpeg_compression(images: Tensor, amount: Amount, chance: Chance) -> Tensor:
    """What JPEG at a low quality leaves of the picture."""
    return compress(images, int(amount.value))


def elastic_transform(images: Tensor, elastic: Elastic, chance: Chance) -> Tensor:
    """A random affine map, then every pixel moved by a smooth random field."""
    height, width = images.shape[-2:]
    row = torch.arange(height, dtype=torch.float64, device=images.device)[:, None]
    column = torch.arange(width, dtype=torch.float64, device=images.device)
    picture = images.to(torch.float32)
    if elastic.affine:
        inverse = torch.from_numpy(_affine(height, width, elastic.affine, chance)).to(images.device, non_blocking=True)
        x, y = ((inverse[:, i, 0] * column + inverse[:, i, 1] * row) + inverse[:, i, 2] for i in range(2))
        picture = _bilinear(picture, y, x, "mirror")
    if elastic.amplitude:
        right, down = (_displacement(height, width, elastic, chance, stream) for stream in range(2))
        picture = _bilinear(picture, row + down, column + right, "reflect")
    return filters.to_bytes(picture)


def _affine(height: int, width: int, reach: float, chance: Chance) -> NDArray[np.float64]:
    """Maps that say where a pixel (x, y) of the result lies in the picture, [n, 2, 3, 1, 1].

    Three corners of a square around the centre are moved by up to `reach` in x and y; the affine map that takes the
    old corners to the new ones is inverted.
    """
    centre, side = np.array([width // 2, height // 2]), min(height, width) // 3
    old = np.array([centre + side, [centre[0] + side, centre[1] - side], centre - side], dtype=np.float64)
    new = old + (chance.scalars(6).reshape(-1, 3, 2) * 2 - 1) * reach
    padded = np.concatenate([new, np.ones((len(new), 3, 1))], axis=2)
    return np.linalg.solve(padded, np.broadcast_to(old, new.shape)).transpose(0, 2, 1)[..., None, None]


def _displacement(height: int, width: int, elastic: Elastic, chance: Chance, stream: int) -> Tensor:
    field = chance.uniform(height, width, stream=stream) * 2 - 65535
    if elastic.sigma:
        field = filters.gaussian(field, elastic.sigma, truncate=3.0, border="reflect")
    return field * (elastic.amplitude / 65536)


def _bilinear(picture: Tensor, y: Tensor, x: Tensor, border: filters.Border) -> Tensor:
    """Pictures [n, c, H, W] read at real positions [n, H, W]."""
    n, channels, height, width = picture.shape
    top, left = y.floor(), x.floor()
    down, right = ((position - low).to(torch.float32)[:, None] for position, low in ((y, top), (x, left)))
    top, left = top.to(torch.float32), left.to(torch.float32)
    rows = [_inside(top + i, height, border) * width for i in range(2)]
    columns = [_inside(left + i, width, border) for i in range(2)]
    flat = picture.flatten(2)

    def read(row: Tensor, column: Tensor) -> Tensor:
        place = (row + column).view(n, 1, -1).expand(-1, channels, -1)
        return flat.gather(2, place).view(picture.shape)

    def across(row: Tensor) -> Tensor:
        near = read(row, columns[0])
        return near.add_(read(row, columns[1]).sub_(near).mul_(right))

    upper = across(rows[0])
    return upper.add_(across(rows[1]).sub_(upper).mul_(down))


def _inside(position: Tensor, size: int, border: filters.Border) -> Tensor:
    """Whole positions as indices, those beyond the edge mirrored back (see `filters.fold`)."""
    period = 2 * size if border == "reflect" else max(2 * size - 2, 1)
    last = period - 1 if border == "reflect" else period
    # Half a pixel further no multiple of the period is near, so that rounding cannot choose the wrong turn.
    turns = ((position + 0.5) * (1.0 / period)).floor_()
    rest = position - turns.mul_(period)
    return torch.minimum(rest, last - rest).to(torch.int64)
