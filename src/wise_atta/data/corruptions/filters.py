"""Filters that give the same bits everywhere, with whole numbers in float64.

Pixels and weights are integers (weights in `UNIT`ths), every sum stays below 2**53, and so matrix products and
Fourier transforms give the exact result whatever their order of summation: in any batch, on any device, with any
number of threads.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UNIT = 1 << 18

Border = Literal["nearest", "reflect", "mirror"]


def fold(index: NDArray[np.int64], size: int, border: Border) -> NDArray[np.int64]:
    """Indices beyond the edge, brought back inside.

    >>> fold(np.arange(-2, 5), 3, "nearest").tolist()
    [0, 0, 0, 1, 2, 2, 2]
    >>> fold(np.arange(-2, 5), 3, "reflect").tolist()
    [1, 0, 0, 1, 2, 2, 1]
    >>> fold(np.arange(-2, 5), 3, "mirror").tolist()
    [2, 1, 0, 1, 2, 1, 0]
    """
    if border == "nearest":
        return index.clip(0, size - 1)
    if border == "reflect":
        index = index % (2 * size)
        return np.minimum(index, 2 * size - 1 - index)
    period = max(2 * size - 2, 1)
    index = index % period
    return np.minimum(index, period - index)


def quantise(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights in whole `UNIT`ths whose sum is the rounded sum: what one loses to rounding the next one gains."""
    total = np.concatenate([[0.0], np.cumsum(weights.ravel())])
    return np.diff(np.rint(total * UNIT)).reshape(weights.shape)


@lru_cache(maxsize=64)
def _gaussian_matrix(size: int, sigma: float, truncate: float, border: Border, device: torch.device) -> Tensor:
    radius = int(truncate * sigma + 0.5)
    offset = np.arange(-radius, radius + 1)
    weight = np.exp(-0.5 * (offset / sigma) ** 2) if radius else np.ones(1)
    matrix = np.zeros((size, size))
    rows = np.arange(size)[:, None]
    np.add.at(matrix, (rows, fold(rows + offset, size, border)), quantise(weight / weight.sum()))
    return torch.from_numpy(matrix).to(device)


def gaussian(fields: Tensor, sigma: float, *, truncate: float = 4.0, border: Border = "nearest") -> Tensor:
    """A Gaussian blur over the last two dimensions of whole numbers below 2**16, exact, as float64."""
    height, width = fields.shape[-2:]
    down = _gaussian_matrix(height, sigma, truncate, border, fields.device)
    across = _gaussian_matrix(width, sigma, truncate, border, fields.device)
    return (down @ fields.to(torch.float64) @ across.T) * (1.0 / (UNIT * UNIT))


def correlate(images: Tensor, kernels: Tensor, corner: tuple[int, int], border: Border) -> Tensor:
    """Each 8-bit picture [n, c, H, W] filtered with its kernel, exact, as float64.

    Parameters
    ----------
    kernels
        [n or 1, kh, kw] in whole `UNIT`ths.
    corner
        Where the kernel's first element looks, relative to the pixel: (row, column).
    """
    height, width = images.shape[-2:]
    kh, kw = kernels.shape[-2:]
    rows = window(height, corner[0], kh, border, images.device)
    columns = window(width, corner[1], kw, border, images.device)
    padded = images.index_select(-2, rows).index_select(-1, columns).to(torch.float64)
    size = (_fast_size(height + kh - 1), _fast_size(width + kw - 1))
    spectrum = torch.fft.rfft2(padded, s=size)
    spectrum *= torch.fft.rfft2(kernels, s=size).conj()[:, None]
    # The exact result is a whole number and the transform's error far below one half: rounding restores it.
    return torch.fft.irfft2(spectrum, s=size)[..., :height, :width].round() * (1.0 / UNIT)


@lru_cache(maxsize=256)
def window(size: int, start: int, length: int, border: Border, device: torch.device) -> Tensor:
    """The indices that pad an axis for a kernel of `length` whose first element looks at `start`."""
    return torch.from_numpy(fold(np.arange(start, start + size + length - 1), size, border)).to(device)


@lru_cache(maxsize=256)
def _fast_size(size: int) -> int:
    """The next number without prime factors above 5: transforms of that length are quick."""
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 1


def constant(value: float, like: Tensor) -> Tensor:
    """A divisor as a tensor: by a plain number a GPU divides otherwise, as a product with the rounded inverse."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def to_bytes(grey: Tensor) -> Tensor:
    """Grey levels cut to [0, 255] and rounded down, as the released sets were written."""
    return grey.clamp(0, 255).to(torch.uint8)
