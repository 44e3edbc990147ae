"""Strengths of the corruptions by severity, as published for pictures of 32, 64 and 224 px.

The numbers are those of CIFAR-10-C (32 px), TinyImageNet-C (64 px) and ImageNet-C (224 px), Hendrycks and Dietterich,
"Benchmarking Neural Network Robustness to Common Corruptions and Perturbations" (ICLR 2019). Lengths are in pixels,
intensities in units of the full range, five entries a row for severities 1 to 5.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

SIZES: Final = (32, 64, 224)

CORRUPTIONS: Final = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA: Final = ("speckle_noise", "gaussian_blur", "spatter", "saturate")


class Amount(NamedTuple):
    """One number: a deviation, a rate, a factor, a quality."""

    value: float


class Disk(NamedTuple):
    """Defocus: a disk, softened by a small Gaussian."""

    radius: float
    alias: float


class Glass(NamedTuple):
    """Glass: a blur, pixels moved by less than `reach`, several times, and the blur again."""

    sigma: float
    reach: int
    rounds: int


class Motion(NamedTuple):
    """Motion: a half Gaussian along a line of 2·radius + 1 pixels."""

    radius: int
    sigma: float


class Zooms(NamedTuple):
    """Zoom: the factors that are averaged."""

    factors: tuple[float, ...]


class Snow(NamedTuple):
    """Snow: noise, zoomed, cut below a threshold, blurred by motion, on a picture mixed with its whitened grey."""

    mean: float
    deviation: float
    zoom: float
    threshold: float
    radius: int
    sigma: float
    mix: float


class Frost(NamedTuple):
    """Frost: picture and texture are weighted; `scale` resizes the texture."""

    picture: float
    texture: float
    scale: float


class Fog(NamedTuple):
    """Fog: its thickness and how fast its details fade from one scale to the next."""

    thickness: float
    decay: float


class Elastic(NamedTuple):
    """Elastic: displacement amplitude, its smoothing, and how far the three corners of an affine map may move."""

    amplitude: float
    sigma: float
    affine: float


class Spatter(NamedTuple):
    """Spatter: smoothed noise cut below a threshold, as water (`mud` 0) or mud (`mud` 1) of some strength."""

    mean: float
    deviation: float
    sigma: float
    threshold: float
    strength: float
    mud: int


class Saturate(NamedTuple):
    """Saturation is scaled, then shifted."""

    scale: float
    shift: float


Parameters = Amount | Disk | Glass | Motion | Zooms | Snow | Frost | Fog | Elastic | Spatter | Saturate


def _amounts(*values: float) -> list[Amount]:
    return [Amount(v) for v in values]


def _zooms(*ranges: tuple[float, float]) -> list[Zooms]:
    # numpy's arange decides how many factors there are: 1.11 in steps of 0.01 yields twelve, the end included.
    return [Zooms(tuple(float(f) for f in np.arange(1, stop, step))) for stop, step in ranges]


def _elastic(unit: int, *rows: tuple[float, float, float]) -> list[Elastic]:
    return [Elastic(*(unit * value for value in row)) for row in rows]


_32: dict[str, list[Parameters]] = {
    "gaussian_noise": [*_amounts(0.04, 0.06, 0.08, 0.09, 0.10)],
    "shot_noise": [*_amounts(500, 250, 100, 75, 50)],
    "impulse_noise": [*_amounts(0.01, 0.02, 0.03, 0.05, 0.07)],
    "defocus_blur": [Disk(0.3, 0.4), Disk(0.4, 0.5), Disk(0.5, 0.6), Disk(1, 0.2), Disk(1.5, 0.1)],
    "glass_blur": [Glass(0.05, 1, 1), Glass(0.25, 1, 1), Glass(0.4, 1, 1), Glass(0.25, 1, 2), Glass(0.4, 1, 2)],
    "motion_blur": [Motion(6, 1), Motion(6, 1.5), Motion(6, 2), Motion(8, 2), Motion(9, 2.5)],
    "zoom_blur": [*_zooms((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01))],
    "snow": [
        Snow(0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        Snow(0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        Snow(0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        Snow(0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        Snow(0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ],
    "frost": [
        Frost(1, 0.2, 0.2),
        Frost(1, 0.3, 0.2),
        Frost(0.9, 0.4, 0.2),
        Frost(0.85, 0.4, 0.2),
        Frost(0.75, 0.45, 0.2),
    ],
    "fog": [Fog(0.2, 3), Fog(0.5, 3), Fog(0.75, 2.5), Fog(1, 2), Fog(1.5, 1.75)],
    "brightness": [*_amounts(0.05, 0.1, 0.15, 0.2, 0.3)],
    "contrast": [*_amounts(0.75, 0.5, 0.4, 0.3, 0.15)],
    "elastic_transform": [
        *_elastic(32, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
    ],
    "pixelate": [*_amounts(0.95, 0.9, 0.85, 0.75, 0.65)],
    "jpeg_compression": [*_amounts(80, 65, 58, 50, 40)],
    "speckle_noise": [*_amounts(0.06, 0.1, 0.12, 0.16, 0.2)],
    "gaussian_blur": [*_amounts(0.4, 0.6, 0.7, 0.8, 1)],
    "spatter": [
        Spatter(0.62, 0.1, 0.7, 0.7, 0.5, 0),
        Spatter(0.65, 0.1, 0.8, 0.7, 0.5, 0),
        Spatter(0.65, 0.3, 1, 0.69, 0.5, 0),
        Spatter(0.65, 0.1, 0.7, 0.69, 0.6, 1),
        Spatter(0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ],
    "saturate": [Saturate(0.3, 0), Saturate(0.1, 0), Saturate(1.5, 0), Saturate(2, 0.1), Saturate(2.5, 0.2)],
}

_64: dict[str, list[Parameters]] = {
    "gaussian_noise": [*_amounts(0.04, 0.08, 0.12, 0.15, 0.18)],
    "shot_noise": [*_amounts(250, 100, 50, 30, 15)],
    "impulse_noise": [*_amounts(0.01, 0.02, 0.05, 0.08, 0.14)],
    "defocus_blur": [Disk(0.5, 0.6), Disk(1, 0.1), Disk(1.5, 0.1), Disk(2.5, 0.01), Disk(3, 0.1)],
    "glass_blur": [Glass(0.1, 1, 1), Glass(0.5, 1, 1), Glass(0.6, 1, 2), Glass(0.7, 2, 1), Glass(0.9, 2, 2)],
    "motion_blur": [Motion(10, 1), Motion(10, 1.5), Motion(10, 2), Motion(10, 2.5), Motion(12, 3)],
    "zoom_blur": [*_zooms((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01))],
    "snow": [
        Snow(0.1, 0.2, 1, 0.6, 8, 3, 0.8),
        Snow(0.1, 0.2, 1, 0.5, 10, 4, 0.8),
        Snow(0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        Snow(0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
        Snow(0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ],
    "frost": [
        Frost(1, 0.3, 0.3),
        Frost(0.9, 0.4, 0.3),
        Frost(0.8, 0.45, 0.3),
        Frost(0.75, 0.5, 0.3),
        Frost(0.7, 0.55, 0.3),
    ],
    "fog": [Fog(0.4, 3), Fog(0.7, 3), Fog(1, 2.5), Fog(1.5, 2), Fog(2, 1.75)],
    "brightness": [*_amounts(0.1, 0.2, 0.3, 0.4, 0.5)],
    "contrast": [*_amounts(0.4, 0.3, 0.2, 0.1, 0.05)],
    "elastic_transform": [
        *_elastic(64, (0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02))
    ],
    "pixelate": [*_amounts(0.9, 0.8, 0.7, 0.6, 0.5)],
    "jpeg_compression": [*_amounts(65, 58, 50, 40, 25)],
    "speckle_noise": [*_amounts(0.15, 0.2, 0.25, 0.3, 0.35)],
    "gaussian_blur": [*_amounts(0.5, 0.75, 1, 1.25, 1.5)],
    "spatter": [
        Spatter(0.62, 0.1, 0.7, 0.7, 0.6, 0),
        Spatter(0.65, 0.1, 0.8, 0.7, 0.6, 0),
        Spatter(0.65, 0.3, 1, 0.69, 0.6, 0),
        Spatter(0.65, 0.1, 0.7, 0.68, 0.6, 1),
        Spatter(0.65, 0.1, 0.5, 0.67, 0.6, 1),
    ],
    "saturate": [Saturate(0.3, 0), Saturate(0.1, 0), Saturate(2, 0), Saturate(5, 0.1), Saturate(30, 0.2)],
}

_224: dict[str, list[Parameters]] = {
    "gaussian_noise": [*_amounts(0.08, 0.12, 0.18, 0.26, 0.38)],
    "shot_noise": [*_amounts(60, 25, 12, 5, 3)],
    "impulse_noise": [*_amounts(0.03, 0.06, 0.09, 0.17, 0.27)],
    "defocus_blur": [Disk(3, 0.1), Disk(4, 0.5), Disk(6, 0.5), Disk(8, 0.5), Disk(10, 0.5)],
    "glass_blur": [Glass(0.7, 1, 2), Glass(0.9, 2, 1), Glass(1, 2, 3), Glass(1.1, 3, 2), Glass(1.5, 4, 2)],
    "motion_blur": [Motion(10, 3), Motion(15, 5), Motion(15, 8), Motion(15, 12), Motion(20, 15)],
    "zoom_blur": [*_zooms((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))],
    "snow": [
        Snow(0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        Snow(0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        Snow(0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        Snow(0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        Snow(0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ],
    "frost": [Frost(1, 0.4, 1), Frost(0.8, 0.6, 1), Frost(0.7, 0.7, 1), Frost(0.65, 0.7, 1), Frost(0.6, 0.75, 1)],
    "fog": [Fog(1.5, 2), Fog(2, 2), Fog(2.5, 1.7), Fog(2.5, 1.5), Fog(3, 1.4)],
    "brightness": [*_amounts(0.1, 0.2, 0.3, 0.4, 0.5)],
    "contrast": [*_amounts(0.4, 0.3, 0.2, 0.1, 0.05)],
    # 244, not 224, is what the released set was made with.
    "elastic_transform": [
        *_elastic(244, (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
    ],
    "pixelate": [*_amounts(0.6, 0.5, 0.4, 0.3, 0.25)],
    "jpeg_compression": [*_amounts(25, 18, 15, 10, 7)],
    "speckle_noise": [*_amounts(0.15, 0.2, 0.35, 0.45, 0.6)],
    "gaussian_blur": [*_amounts(1, 2, 3, 4, 6)],
    "spatter": [
        Spatter(0.65, 0.3, 4, 0.69, 0.6, 0),
        Spatter(0.65, 0.3, 3, 0.68, 0.6, 0),
        Spatter(0.65, 0.3, 2, 0.68, 0.5, 0),
        Spatter(0.65, 0.3, 1, 0.65, 1.5, 1),
        Spatter(0.67, 0.4, 1, 0.65, 1.5, 1),
    ],
    "saturate": [Saturate(0.3, 0), Saturate(0.1, 0), Saturate(2, 0), Saturate(5, 0.1), Saturate(20, 0.2)],
}

TABLES: Final[dict[int, dict[str, list[Parameters]]]] = {32: _32, 64: _64, 224: _224}


def table_for(height: int, width: int) -> int:
    """The table for a picture of that size, by its short side: below 48 px the 32 px one, below 112 px the 64 px one.

    >>> table_for(32, 32), table_for(64, 64), table_for(224, 224), table_for(160, 96)
    (32, 64, 224, 64)
    """
    short = min(height, width)
    return 32 if short < 48 else 64 if short < 112 else 224
