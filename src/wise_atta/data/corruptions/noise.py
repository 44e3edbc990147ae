"""Noises of single pixels: a draw from the exact distribution over the 256 levels that a pixel can take.

These noises treat every value alone, from 8 bits to 8 bits. So the distribution of the outcome given the level is a
table of 256 × 256 probabilities, and a draw is one look-up (Walker's alias method): 8 random bits choose a column,
24 more decide between that column's level and its alias.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wise_atta.data.corruptions.chance import Chance
from wise_atta.data.corruptions.tables import Amount

_LEVELS = np.arange(256)
_FINE = (1 << 24) - 1


def gaussian_noise(images: Tensor, amount: Amount, chance: Chance) -> Tensor:
    """Normal noise of the same deviation everywhere."""
    return _sample(images, _gaussian, amount.value, chance)


def speckle_noise(images: Tensor, amount: Amount, chance: Chance) -> Tensor:
    """Normal noise whose deviation is proportional to the pixel."""
    return _sample(images, _speckle, amount.value, chance)


def shot_noise(images: Tensor, amount: Amount, chance: Chance) -> Tensor:
    """Poisson counts of a light of so many photons at full brightness."""
    return _sample(images, _shot, amount.value, chance)


def impulse_noise(images: Tensor, amount: Amount, chance: Chance) -> Tensor:
    """Black and white values at the given rate, channels apart."""
    return _sample(images, _impulse, amount.value, chance)


Outcomes = Callable[[float], NDArray[np.float64]]


def _sample(images: Tensor, outcomes: Outcomes, amount: float, chance: Chance) -> Tensor:
    bits = chance.bits(*images.shape[1:])
    own = bits & 0xFF
    place = (images.to(torch.int32) << 8) + own
    entry = _alias_table(outcomes, amount, images.device).index_select(0, place.view(-1)).view(bits.shape)
    # Both numbers lie above bit 8 of an int32: shifted down without the mask they would compare as signed.
    keeps = (bits >> 8).bitwise_and_(_FINE) < (entry >> 8).bitwise_and_(_FINE)
    return torch.where(keeps, own, entry & 0xFF).to(torch.uint8)


def _gaussian(deviation: float) -> NDArray[np.float64]:
    return _normal_outcomes(np.full(256, deviation * 255))


def _speckle(deviation: float) -> NDArray[np.float64]:
    return _normal_outcomes(deviation * _LEVELS.astype(np.float64))


def _normal_outcomes(deviation: NDArray[np.float64]) -> NDArray[np.float64]:
    """P(outcome | level), rounded down: an outcome j is a value in [j, j + 1), the last one everything from 255 on."""
    edge = (np.arange(1, 256)[None] - _LEVELS[:, None]) / np.maximum(deviation, 1e-9)[:, None]
    below = torch.special.ndtr(torch.from_numpy(edge)).numpy()
    return np.diff(below, prepend=0.0, append=1.0, axis=1)


def _shot(photons: float) -> NDArray[np.float64]:
    expected = np.maximum(_LEVELS / 255 * photons, 1e-300)
    table = np.zeros((256, 256))
    # Counts from `photons` on are cut to white.
    counts = np.arange(math.ceil(photons))
    factorial = np.array([math.lgamma(k + 1) for k in counts])
    chances = np.exp(counts * np.log(expected)[:, None] - expected[:, None] - factorial)
    for count in counts:
        table[:, int(count / photons * 255)] += chances[:, count]
    table[:, 255] += np.clip(1 - chances.sum(1), 0, 1)
    return table / table.sum(1, keepdims=True)


def _impulse(rate: float) -> NDArray[np.float64]:
    table = np.eye(256) * (1 - rate)
    table[:, 0] += rate / 2
    table[:, 255] += rate / 2
    return table


@lru_cache(maxsize=64)
def _alias_table(outcomes: Outcomes, amount: float, device: torch.device) -> Tensor:
    """Walker's tables for all 256 levels, an entry a level and column: 24 bits of threshold over 8 bits of alias."""
    mass = outcomes(amount) * 256
    threshold, alias = np.ones((256, 256)), np.tile(_LEVELS, (256, 1))
    rows = np.arange(256)
    open_ = np.ones((256, 256), dtype=bool)
    for _ in range(255):
        poor = np.where(open_, mass, np.inf).argmin(1)
        rich = np.where(open_, mass, -np.inf).argmax(1)
        threshold[rows, poor], alias[rows, poor] = mass[rows, poor], rich
        mass[rows, rich] -= 1 - mass[rows, poor]
        open_[rows, poor] = False
    packed = (np.rint(threshold.clip(0, 1) * _FINE).astype(np.int64) << 8) | alias
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).ravel()).to(device)
