"""Blurs: Gaussian, out of focus, rough glass, moving camera or subject."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wise_atta.data.corruptions import filters
from wise_atta.data.corruptions.chance import Chance
from wise_atta.data.corruptions.tables import Amount, Disk, Glass, Motion, Zooms

# A pixel's origin is followed through at most 2**6 moves. A chain goes on with probability below 0.43 a move.
_DOUBLINGS = 6


def gaussian_blur(images: Tensor, amount: Amount, chance: Chance) -> Tensor:
    """A Gaussian blur."""
    return filters.to_bytes(filters.gaussian(images, amount.value))


def defocus_blur(images: Tensor, disk: Disk, chance: Chance) -> Tensor:
    """A lens out of focus: every point becomes a disk."""
    kernel = _disk(disk, images.device)
    corner = -(kernel.shape[-1] // 2)
    return filters.to_bytes(filters.correlate(images, kernel, (corner, corner), "mirror"))


@lru_cache(maxsize=64)
def _disk(disk: Disk, device: torch.device) -> Tensor:
    reach, soft = (8, 1) if disk.radius <= 8 else (int(disk.radius), 2)
    line = np.arange(-reach, reach + 1)
    hard = (line[:, None] ** 2 + line[None] ** 2 <= disk.radius**2).astype(np.float64)
    offset = np.arange(-soft, soft + 1)
    weight = np.exp(-(offset**2) / (2 * disk.alias**2))
    smooth = np.zeros((len(line), len(line)))
    rows = np.arange(len(line))[:, None]
    np.add.at(smooth, (rows, filters.fold(rows + offset, len(line), "mirror")), weight / weight.sum())
    kernel = smooth @ (hard / hard.sum()) @ smooth.T
    return torch.from_numpy(filters.quantise(kernel)).to(device)[None]


def motion_blur(images: Tensor, motion: Motion, chance: Chance) -> Tensor:
    """A movement along a line of any angle within 45° of the horizontal."""
    angle = chance.scalars(1)[:, 0] * 90 - 45
    return filters.to_bytes(along_line(images, motion, angle) + 0.5)


def along_line(images: Tensor, motion: Motion, angle: NDArray[np.float64]) -> Tensor:
    """8-bit pictures [n, c, H, W] moved along lines, one angle in degrees each: half a Gaussian in whole pixels."""
    step = np.arange(2 * motion.radius + 1)
    weight = np.exp(-(step**2) / (2 * motion.sigma**2))
    turn = np.deg2rad(angle)[:, None]
    row, column = (np.ceil(step * part - 0.5).astype(np.int64) for part in (np.sin(turn), np.cos(turn)))
    corner = (int(row.min()), int(column.min()))
    height, width = int(row.max()) - corner[0] + 1, int(column.max()) - corner[1] + 1
    place = torch.from_numpy((row - corner[0]) * width + column - corner[1]).to(images.device, non_blocking=True)
    weights = torch.from_numpy(filters.quantise(weight / weight.sum())).to(images.device, non_blocking=True)
    kernels = torch.zeros(len(place), height * width, dtype=torch.float64, device=images.device)
    rows = torch.arange(len(place), device=images.device)[:, None]
    kernels.index_put_((rows, place), weights, accumulate=True)
    return filters.correlate(images, kernels.view(-1, height, width), corner, "nearest")


def zoom_blur(images: Tensor, zooms: Zooms, chance: Chance) -> Tensor:
    """A movement towards the picture: the mean of it and of its centre at growing sizes."""
    picture = images.to(torch.float32)
    total = picture.clone()
    # Rows are quicker to pick than columns: widths are stretched in the transposed picture.
    turned = picture.transpose(-2, -1).contiguous()
    for factor in zooms.factors:
        if factor == 1:
            total += picture
        else:
            wide = _stretch(turned, factor).transpose(-2, -1).contiguous()
            total += _stretch(wide, factor)
    return filters.to_bytes(total / filters.constant(len(zooms.factors) + 1, total))


def _stretch(picture: Tensor, factor: float) -> Tensor:
    """The middle rows of a picture spread over its height."""
    low, high, weight = _axis(picture.shape[-2], factor, picture.device)
    near = picture.index_select(-2, low)
    rise = picture.index_select(-2, high).sub_(near)
    return near.add_(rise.mul_(weight[:, None]))


@lru_cache(maxsize=512)
def _axis(size: int, factor: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    position = zoom_positions(size, factor)
    low = np.floor(position)
    high = np.minimum(low + 1, np.ceil(position.max()))
    parts = (low.astype(np.int64), high.astype(np.int64), (position - low).astype(np.float32))
    first, second, weight = (torch.from_numpy(part).to(device) for part in parts)
    return first, second, weight


def zoom_positions(size: int, factor: float) -> NDArray[np.float64]:
    """Where along an axis each pixel of the enlarged centre comes from.

    The centre is cut out, resized so that its first and last pixels stay first and last, and trimmed to `size`.

    >>> zoom_positions(8, 2.0).round(2).tolist()
    [2.0, 2.43, 2.86, 3.29, 3.71, 4.14, 4.57, 5.0]
    """
    cut = int(np.ceil(size / factor))
    grown = round(cut * factor)
    trim = (grown - size) // 2
    inside = (np.arange(size) + trim) * ((cut - 1) / max(grown - 1, 1))
    return (size - cut) // 2 + np.minimum(inside, cut - 1)


def glass_blur(images: Tensor, glass: Glass, chance: Chance) -> Tensor:
    """Rough glass: blurred, pixels replaced by near neighbours, blurred again."""
    blurred = filters.to_bytes(filters.gaussian(images, glass.sigma))
    height, width = images.shape[-2:]
    origin = torch.arange(height * width, device=images.device).expand(len(images), -1)
    for turn in range(glass.rounds):
        origin = origin.gather(1, _moves(chance.bits(height, width, stream=turn), glass.reach).view_as(origin))
    moved = blurred.flatten(2).gather(2, origin[:, None].expand(-1, images.shape[1], -1)).view_as(images)
    return filters.to_bytes(filters.gaussian(moved, glass.sigma))


def _moves(bits: Tensor, reach: int) -> Tensor:
    """From which pixel each pixel's value comes after one round, as flat indices [n, H, W].

    A round goes through the pixels backwards, last row first, and copies into each one a random neighbour as it is
    by then. A neighbour that was visited before has itself been replaced; its origin counts. Those chains are followed
    for all pixels at once by squaring the map.
    """
    height, width = bits.shape[-2:]
    row = torch.arange(height, device=bits.device)[:, None]
    column = torch.arange(width, device=bits.device)
    visited = (row > reach) & (row <= height - reach) & (column > reach) & (column <= width - reach)
    down = (((bits & 0xFFFF) * (2 * reach)) >> 16) - reach
    right = ((((bits >> 16) & 0xFFFF) * (2 * reach)) >> 16) - reach
    source = torch.where(visited, (row + down) * width + column + right, row * width + column).flatten(1)
    if reach == 1:  # the only neighbours are above or to the left, never visited before
        return source
    follows = visited & ((down > 0) | ((down == 0) & (right > 0)))
    follows &= (row + down <= height - reach) & (column + right > reach) & (column + right <= width - reach)
    chain = torch.where(follows.flatten(1), source, (row * width + column).flatten())
    for _ in range(_DOUBLINGS):
        chain = chain.gather(1, chain)
    return source.gather(1, chain)
