"""JPEG's lossy half, in the integer arithmetic of libjpeg.

Colour conversion, 4:2:0 subsampling, the integer cosine transform, quantisation and all of it back; Huffman coding
loses nothing and is left out. libjpeg's "slow" transform is linear with integer coefficients up to one rounding shift
a pass, so each pass is a product with an 8 × 8 integer matrix in float64, exact.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = 13  # fraction bits of the transform's constants
_EXTRA = 2  # fraction bits kept between its two passes

# The example tables of the standard (ITU-T T.81, annex K), brightness and colour.
_LUMA = """
16 11 10 16 24 40 51 61  12 12 14 19 26 58 60 55  14 13 16 24 40 57 69 56  14 17 22 29 51 87 80 62
18 22 37 56 68 109 103 77  24 35 55 64 81 104 113 92  49 64 78 87 103 121 120 101  72 92 95 98 112 100 103 99
"""
_CHROMA = """
17 18 24 47 99 99 99 99  18 21 26 66 99 99 99 99  24 26 56 99 99 99 99 99  47 66 99 99 99 99 99 99
99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99
"""


def compress(images: Tensor, quality: int) -> Tensor:
    """8-bit pictures [n, 3, H, W] written as JPEG at a quality from 1 to 100 and read back."""
    height, width = images.shape[-2:]
    red, green, blue = images.to(torch.int32).unbind(1)
    luma = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16
    offset = (128 << 16) + 32767
    chroma = torch.stack(
        [
            (-11059 * red - 21709 * green + 32768 * blue + offset) >> 16,
            (32768 * red - 27439 * green - 5329 * blue + offset) >> 16,
        ],
        dim=1,
    )
    luma = _code(_pad(luma[:, None], 8), quality, _LUMA)[:, 0, :height, :width]
    half_height, half_width = (height + 1) // 2, (width + 1) // 2
    # The encoder repeats the last column before it halves the width, but the last row only up to an even number:
    # rows that fill the last block repeat the halved row.
    chroma = _halve(_pad(_pad(chroma, 2, rows=True, columns=False), 16, rows=False))
    chroma = _code(_pad(chroma, 8), quality, _CHROMA)[:, :, :half_height, :half_width]
    blueness, redness = (_double(chroma)[:, :, :height, :width] - 128).unbind(1)
    picture = torch.stack(
        [
            luma + ((91881 * redness + 32768) >> 16),
            luma + ((-22554 * blueness - 46802 * redness + 32768) >> 16),
            luma + ((116130 * blueness + 32768) >> 16),
        ],
        dim=1,
    )
    return picture.clamp_(0, 255).to(torch.uint8)


def _pad(planes: Tensor, multiple: int, *, rows: bool = True, columns: bool = True) -> Tensor:
    """The last row and column repeated up to a multiple."""
    for dim, wanted in ((-2, rows), (-1, columns)):
        missing = -planes.shape[dim] % multiple if wanted else 0
        if missing:
            last = planes.narrow(dim, planes.shape[dim] - 1, 1)
            planes = torch.cat([planes, *[last] * missing], dim=dim)
    return planes


def _halve(planes: Tensor) -> Tensor:
    """Means of 2 × 2, halves rounded down and up in turn along a row."""
    total = planes[..., ::2, ::2] + planes[..., ::2, 1::2] + planes[..., 1::2, ::2] + planes[..., 1::2, 1::2]
    turn = torch.arange(total.shape[-1], dtype=torch.int32, device=planes.device) & 1
    return (total + 1 + turn) >> 2


def _double(planes: Tensor) -> Tensor:
    """Each sample becomes 2 × 2, three parts of itself and one of the neighbour on that side, along both axes."""
    above = torch.cat([planes[..., :1, :], planes[..., :-1, :]], dim=-2)
    below = torch.cat([planes[..., 1:, :], planes[..., -1:, :]], dim=-2)
    tall = torch.stack([planes * 3 + above, planes * 3 + below], dim=-2).flatten(-3, -2)
    left = torch.cat([tall[..., :1], tall[..., :-1]], dim=-1)
    right = torch.cat([tall[..., 1:], tall[..., -1:]], dim=-1)
    return torch.stack([(tall * 3 + left + 8) >> 4, (tall * 3 + right + 7) >> 4], dim=-1).flatten(-2)


def _code(planes: Tensor, quality: int, table: str) -> Tensor:
    """Planes [n, c, H, W] in whole blocks through transform and quantisation and back."""
    n, c, height, width = planes.shape
    forward, backward = _transform(planes.device)
    step = _steps(table, quality, planes.device)
    rows, columns = (n, c, height // 8, 8, width), (n, c, height // 8, 8, width // 8, 8)
    samples = (planes - 128).to(torch.float64).view(-1, 8)
    samples = _shift(samples @ forward.T, _BITS - _EXTRA).view(rows)
    # The transform comes out 8 times too large.
    spectrum = _shift(forward @ samples, _BITS + _EXTRA).view(columns)
    levels = torch.copysign(((spectrum.abs() + step * 4) / (step * 8)).floor(), spectrum)
    samples = _shift(backward @ (levels * step).view(rows), _BITS - _EXTRA).view(-1, 8)
    samples = _shift(samples @ backward.T, _BITS + _EXTRA + 3)
    return (samples + 128).clamp_(0, 255).to(torch.int32).view(n, c, height, width)


def _shift(value: Tensor, bits: int) -> Tensor:
    return (value * (1.0 / (1 << bits)) + 0.5).floor_()


@lru_cache(maxsize=64)
def _steps(table: str, quality: int, device: torch.device) -> Tensor:
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = ((np.array(table.split(), dtype=np.int64) * scale + 50) // 100).clip(1, 255)
    return torch.from_numpy(steps.reshape(8, 1, 8).astype(np.float64)).to(device)


@lru_cache(maxsize=8)
def _transform(device: torch.device) -> tuple[Tensor, Tensor]:
    """The integer matrices of the cosine transform and its inverse."""
    forward = _cosines()
    # The factorisation uses the same rotations both ways: the inverse has the transposed matrix.
    return torch.from_numpy(forward).to(device), torch.from_numpy(forward.T.copy()).to(device)


def _cosines() -> NDArray[np.float64]:
    """The transform of Loeffler, Ligtenberg and Moschytz with its constants rounded to 13 bits, as one matrix."""

    def fixed(value: float) -> int:
        return round(value * (1 << _BITS))

    matrix = np.zeros((8, 8), dtype=np.int64)
    unit = np.eye(8, dtype=np.int64)
    add = [unit[i] + unit[7 - i] for i in range(4)]
    sub = [unit[3 - i] - unit[4 + i] for i in range(4)]  # the odd half, from the middle outwards
    even, odd = add[0] + add[3], add[1] + add[2]
    matrix[0], matrix[4] = (even + odd) << _BITS, (even - odd) << _BITS
    outer, inner = add[0] - add[3], add[1] - add[2]
    turn = (outer + inner) * fixed(0.541196100)
    matrix[2] = turn + outer * fixed(0.765366865)
    matrix[6] = turn - inner * fixed(1.847759065)
    a, b, c, d = sub
    turn = (a + c + b + d) * fixed(1.175875602)
    ad, bc = -(a + d) * fixed(0.899976223), -(b + c) * fixed(2.562915447)
    ac, bd = turn - (a + c) * fixed(1.961570560), turn - (b + d) * fixed(0.390180644)
    matrix[7] = a * fixed(0.298631336) + ad + ac
    matrix[5] = b * fixed(2.053119869) + bc + bd
    matrix[3] = c * fixed(3.072711026) + bc + ac
    matrix[1] = d * fixed(1.501321110) + ad + bd
    return matrix.astype(np.float64)
