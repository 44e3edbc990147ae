"""Drops on the lens: water, which shows at its edges, and mud, which covers.

Water needs the edges of the drops, the distance to them, and a relief made from it. These are the steps that OpenCV
calls Canny, distanceTransform, blur, equalizeHist and filter2D, written for whole batches in whole numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wise_atta.data.corruptions import filters
from wise_atta.data.corruptions.chance import NORMAL_UNIT, Chance
from wise_atta.data.corruptions.tables import Spatter

_WATER = (175, 238, 238)
_MUD = (63, 42, 20)
_OPAQUE = 0.8
_WEAK, _STRONG = 50, 150  # edge thresholds
_FAR = 20  # distances beyond count as this
_ONE = 1 << 16
_STRAIGHT, _DIAGONAL, _KNIGHT = _ONE, round(1.4 * _ONE), round(2.1969 * _ONE)
_RELIEF = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))


def spatter(images: Tensor, spatter: Spatter, chance: Chance) -> Tensor:
    """Drops of water (severities 1 to 3) or mud (4 and 5)."""
    height, width = images.shape[-2:]
    liquid = filters.gaussian(chance.normal(height, width), spatter.sigma)
    liquid = liquid * (spatter.deviation / NORMAL_UNIT) + spatter.mean
    liquid = torch.where(liquid < spatter.threshold, 0.0, liquid)
    picture = images.to(torch.float64)
    if spatter.mud:
        cover = filters.gaussian(liquid > spatter.threshold, spatter.strength)[:, None]
        cover = torch.where(cover < _OPAQUE, 0.0, cover)
        return filters.to_bytes(picture * (1 - cover) + cover * _colour(_MUD, picture))
    drops = (liquid * 255).to(torch.int32)
    shine = (drops * _relief(_distance(_edges(drops)))).to(torch.float64)[:, None]
    brightest = shine.flatten(1).amax(1).clamp(min=1).view(-1, 1, 1, 1)
    return filters.to_bytes(picture + shine / brightest * spatter.strength * _colour(_WATER, picture))


def _colour(colour: tuple[int, int, int], like: Tensor) -> Tensor:
    return torch.tensor(colour, dtype=like.dtype).to(like.device, non_blocking=True).view(1, 3, 1, 1)


def _neighbours(field: Tensor, reach: int, value: int) -> Tensor:
    """The field with a margin of `reach` pixels of one value."""
    return torch.nn.functional.pad(field, (reach,) * 4, value=value)


def _window(field: Tensor, border: filters.Border) -> Tensor:
    """The nine neighbours of every pixel, [3, 3, n, H, W]."""
    height, width = field.shape[-2:]
    rows, columns = (filters.window(size, -1, 3, border, field.device) for size in (height, width))
    padded = field.index_select(-2, rows).index_select(-1, columns)
    return padded.unfold(-2, 3, 1).unfold(-2, 3, 1).permute(3, 4, 0, 1, 2)


def _edges(drops: Tensor) -> Tensor:
    """Canny's edges: ridges of the gradient above the strong threshold, and weaker ones that touch them."""
    around = _window(drops, "nearest")
    across = (around[:, 2] - around[:, 0]).mul_(_column((1, 2, 1), drops)).sum(0)
    down = (around[2] - around[0]).mul_(_column((1, 2, 1), drops)).sum(0)
    size = across.abs() + down.abs()
    height, width = size.shape[-2:]
    margin = _neighbours(size, 1, 0)

    def beside(row: int, column: int) -> Tensor:
        return margin[:, 1 + row : 1 + row + height, 1 + column : 1 + column + width]

    steep, flat = down.abs().to(torch.int64) << 15, across.abs().to(torch.int64) * 13573  # tan 22.5° in 15 bits
    lying, standing = steep < flat, steep > flat + (across.abs().to(torch.int64) << 16)
    same = (across < 0) == (down < 0)
    ridge = torch.where(
        lying,
        (size > beside(0, -1)) & (size >= beside(0, 1)),
        torch.where(
            standing,
            (size > beside(-1, 0)) & (size >= beside(1, 0)),
            torch.where(
                same,
                (size > beside(-1, -1)) & (size > beside(1, 1)),
                (size > beside(-1, 1)) & (size > beside(1, -1)),
            ),
        ),
    )
    weak = ridge & (size > _WEAK)
    edge = weak & (size > _STRONG)
    while True:
        grown = torch.nn.functional.max_pool2d(edge.to(torch.float32), 3, 1, 1).to(torch.bool) & weak
        if torch.equal(grown, edge):
            return edge
        edge = grown


def _column(weights: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(weights, dtype=like.dtype).to(like.device, non_blocking=True).view(-1, 1, 1, 1)


def _distance(edges: Tensor) -> Tensor:
    """The distance to the nearest edge by steps to neighbours and knight's moves, up to 20 px, in 65536ths."""
    height, width = edges.shape[-2:]
    steps = [
        (row, column, {1: _STRAIGHT, 2: _DIAGONAL, 5: _KNIGHT}[row * row + column * column])
        for row in range(-2, 3)
        for column in range(-2, 3)
        if row * row + column * column in (1, 2, 5)
    ]
    distance = (~edges).to(torch.int32) * (_FAR * _ONE)
    for _ in range(_FAR):  # no path of this length has more steps
        margin = _neighbours(distance, 2, _FAR * _ONE)
        for row, column, length in steps:
            step = margin[:, 2 + row : 2 + row + height, 2 + column : 2 + column + width] + length
            distance = torch.minimum(distance, step)
    return distance


def _relief(distance: Tensor) -> Tensor:
    """Distances as light falling from one corner: smoothed, spread over all grey levels, differentiated, smoothed."""
    level = torch.div(_window(distance, "mirror").sum((0, 1)), 9 * _ONE, rounding_mode="floor")
    spread = _equalise(level)
    kernel = torch.tensor(_RELIEF, dtype=torch.int64).to(distance.device, non_blocking=True).view(3, 3, 1, 1, 1)
    relief = (_window(spread, "mirror") * kernel).sum((0, 1)).clamp(0, 255)
    total = _window(relief, "mirror").sum((0, 1))
    return torch.div(total * 2 + 9, 18, rounding_mode="floor").to(torch.int32)


def _equalise(level: Tensor) -> Tensor:
    """Levels replaced by how many pixels lie below, so that each grey level is about as frequent."""
    flat = level.flatten(1).to(torch.int64)
    count = torch.stack([(flat == value).sum(1) for value in range(_FAR + 1)], dim=1)
    first = (count > 0).to(torch.uint8).argmax(1, keepdim=True)
    lowest = count.gather(1, first)
    above = (count.cumsum(1) - lowest).to(torch.float64)
    rest = flat.shape[1] - lowest
    look_up = (above * 255 / rest.clamp(min=1)).round().clamp(0, 255).to(torch.int64)
    look_up = torch.where(rest == 0, first, look_up)
    return look_up.gather(1, flat).view(level.shape)
