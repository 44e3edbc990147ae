"""Weather: snow, frost, fog, bright light, and a wet or dirty lens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from wise_atta.data.corruptions import digital, filters
from wise_atta.data.corruptions.blur import along_line, zoom_positions
from wise_atta.data.corruptions.chance import NORMAL_UNIT, Chance
from wise_atta.data.corruptions.frost_textures import canvas
from wise_atta.data.corruptions.tables import Amount, Fog, Frost, Motion, Snow

_GREY = (0.299, 0.587, 0.114)


def snow(images: Tensor, snow: Snow, chance: Chance) -> Tensor:
    """Flakes driven past the lens, and the same flakes turned by 180°, over a whitened picture."""
    down, across = (_zoom_matrix(size, snow.zoom, images.device) for size in images.shape[-2:])
    flakes = down @ chance.normal(down.shape[1], across.shape[1]) @ across.T
    flakes = flakes * (snow.deviation / (NORMAL_UNIT * filters.UNIT**2)) + snow.mean
    flakes = torch.where(flakes < snow.threshold, 0.0, flakes)
    layer = filters.to_bytes(flakes * 255)[:, None]
    angle = chance.scalars(1)[:, 0] * 90 - 135
    layer = filters.to_bytes(along_line(layer, Motion(snow.radius, snow.sigma), angle) + 0.5).to(torch.float64)
    picture = images.to(torch.float64)
    red, green, blue = (picture[:, i : i + 1] * weight for i, weight in enumerate(_GREY))
    white = (red + green + blue) * 1.5 + 0.5 * 255
    picture = picture * snow.mix + torch.maximum(picture, white) * (1 - snow.mix)
    return filters.to_bytes(picture + layer + layer.flip(-2, -1))


@lru_cache(maxsize=64)
def _zoom_matrix(size: int, factor: float, device: torch.device) -> Tensor:
    """The enlargement of an axis as a matrix in whole units; its columns are the pixels of the centre cut out."""
    position = zoom_positions(size, factor)
    first = (size - int(np.ceil(size / factor))) // 2
    low = np.floor(position).astype(np.int64)
    share = np.rint((position - low) * filters.UNIT)
    matrix = np.zeros((size, int(np.ceil(size / factor)) + 1))
    matrix[np.arange(size), low - first] = filters.UNIT - share
    matrix[np.arange(size), low - first + 1] += share
    return torch.from_numpy(matrix[:, :-1]).to(device)


def frost(images: Tensor, frost: Frost, chance: Chance) -> Tensor:
    """A crop of a frost texture laid over the picture."""
    height, width = images.shape[-2:]
    textures, sizes = canvas(frost.scale, height, width, images.device)
    which, top, left = chance.scalars(3).T
    number = np.floor(which * len(sizes)).astype(np.int64)
    room = sizes[number] - (height, width)
    corner = np.stack([number, np.floor(top * room[:, 0]), np.floor(left * room[:, 1])]).astype(np.int64)
    texture, row, column = torch.from_numpy(corner).to(images.device, non_blocking=True)[..., None, None, None]
    row = row + torch.arange(height, device=images.device)[:, None]
    column = column + torch.arange(width, device=images.device)
    channel = torch.arange(3, device=images.device)[:, None, None]
    layer = textures[texture, channel, row, column].to(torch.float64)
    return filters.to_bytes(images.to(torch.float64) * frost.picture + layer * frost.texture)


def fog(images: Tensor, fog: Fog, chance: Chance) -> Tensor:
    """A cloud of many scales in front of the picture, the whole dimmed to the picture's own brightest value."""
    height, width = images.shape[-2:]
    thickness = fog.thickness * 255
    cloud = _plasma(max(height, width), fog.decay, chance)[:, None, :height, :width]
    brightest = images.flatten(1).amax(1).to(torch.float32).view(-1, 1, 1, 1)
    return filters.to_bytes((images.to(torch.float32) + cloud * thickness) * (brightest / (brightest + thickness)))


def _plasma(side: int, decay: float, chance: Chance) -> Tensor:
    """Height maps in [0, 1] whose side is the next power of two, by the diamond-square algorithm on a torus."""
    side = 1 << (side - 1).bit_length()
    # Every point of the map is set once, with its own draw.
    draw = chance.uniform(side, side).to(torch.float32).mul_(2.0 / 65536).sub_(1 - 1 / 65536)
    heights = torch.zeros_like(draw)
    step, wobble = side, 100.0
    while step >= 2:
        half = step // 2
        corner, middle = heights[:, ::step, ::step], heights[:, half::step, half::step]
        rough = draw * (wobble * wobble)
        square = corner + corner.roll(-1, 1)
        middle.copy_((square + square.roll(-1, 2)) * 0.25 + rough[:, half::step, half::step])
        above = (middle + middle.roll(1, 1)) + (corner + corner.roll(-1, 2))
        heights[:, ::step, half::step] = above * 0.25 + rough[:, ::step, half::step]
        beside = (middle + middle.roll(1, 2)) + (corner + corner.roll(-1, 1))
        heights[:, half::step, ::step] = beside * 0.25 + rough[:, half::step, ::step]
        step, wobble = half, wobble / decay
    flat = heights.flatten(1)
    low, high = flat.amin(1).view(-1, 1, 1), flat.amax(1).view(-1, 1, 1)
    return (heights - low) / (high - low)


def brightness(images: Tensor, amount: Amount, chance: Chance) -> Tensor:
    """More light: the value of hue, saturation and value grows."""
    return digital.recolour(images, lift=amount.value)
