"""A comparison of the corruptions with the package `imagecorruptions`, picture by picture.

    python -m wise_atta.data.corruptions.check --data imagenet-sample.zip --pictures 8

The pictures and severities are the same, and so is chance: the reference is handed the random angles, fields and crops
that were drawn here, so that pixels can be compared. Only the noises, whose draws have another form, are compared by
their statistics alone. The command prints a table and fails where a bound is exceeded.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wise_atta.data.corruptions import CORRUPTIONS, EXTRA, apply
from wise_atta.data.corruptions.chance import NORMAL_UNIT, draw
from wise_atta.data.corruptions.frost_textures import canvas, frost_source
from wise_atta.data.corruptions.tables import TABLES, Elastic, Fog, Frost, Glass, Parameters, Snow
from wise_atta.errors import DataError, MissingExtra

Picture = NDArray[np.uint8]
Reference = Callable[[Picture, str, int], Picture]
SEVERITIES = (1, 2, 3, 4, 5)


def reference() -> Reference:
    """The package `imagecorruptions` as a function of picture [H, W, 3], name and severity.

    The package is older than the libraries it stands on: numpy's name `float_` and scikit-image's argument
    `multichannel` are put back for it.
    """
    try:
        vars(np).setdefault("float_", np.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = importlib.import_module("imagecorruptions")
            inside = importlib.import_module("imagecorruptions.corruptions")
            blur = importlib.import_module("skimage.filters").gaussian
    except ImportError as error:
        raise MissingExtra(
            f"the reference package imagecorruptions cannot be imported ({error}); "
            "pip install imagecorruptions 'setuptools<80' opencv-python-headless"
        ) from error

    def gaussian(image: object, *args: object, multichannel: bool = False, **options: object) -> object:
        return blur(image, *args, channel_axis=-1 if multichannel else None, **options)

    def corrupt_one(picture: Picture, name: str, severity: int) -> Picture:
        with mock.patch.object(inside, "gaussian", gaussian), contextlib.redirect_stdout(io.StringIO()):
            return np.asarray(package.corrupt(picture, corruption_name=name, severity=severity), dtype=np.uint8)

    return corrupt_one


def pictures(path: Path, count: int, size: int = 224) -> Tensor:
    """The centres of the first pictures of a zip file, [count, 3, size, size], at most one a folder."""
    from PIL import Image

    if not path.is_file():
        raise DataError(f"no zip file of pictures at {path}; name one with --data or set WISE_ATTA_DATA to its folder")
    crops: dict[str, Picture] = {}
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            folder = str(Path(name).parent)
            if len(crops) == count or folder in crops or not name.lower().endswith((".jpg", ".jpeg", ".png")):
                continue
            with Image.open(io.BytesIO(archive.read(name))) as image:
                left, top = (image.width - size) // 2, (image.height - size) // 2
                if min(left, top) >= 0:
                    crops[folder] = np.array(image.convert("RGB").crop((left, top, left + size, top + size)))
    if len(crops) < count:
        raise DataError(f"{path} has {len(crops)} pictures of {size} px or more in folders of their own, not {count}")
    return torch.from_numpy(np.stack(list(crops.values()))).permute(0, 3, 1, 2).contiguous()


def reference_parameters(name: str, severity: int, height: int) -> Parameters:
    """The parameters of ours that mean what the reference does at 224 px, where it departs from the released set.

    Its elastic transform has no affine part and other strengths.
    """
    if name == "elastic_transform":
        strength = (12.5, 16.25, 21.25, 25.0, 30.0)[severity - 1]
        return Elastic(strength * 0.005 * height, 0.01 * height, 0)
    return TABLES[224][name][severity - 1]


@contextlib.contextmanager
def handed(images: Tensor, name: str, severity: int, seed: int, key: int | str) -> Iterator[None]:
    """Numpy's global draws are replaced by those that one picture [1, 3, H, W] gets here, in the reference's order.

    OpenCV's resize is switched off meanwhile: the reference enlarges frost textures by a tenth, the released set not.
    """
    height, width = images.shape[-2:]
    chance = draw(seed, name, severity, [key], images, images.device)
    scalar = chance.scalars(6)[0]
    own = reference_parameters(name, severity, height)
    uniform: Iterator[object] = iter(())
    normal: Iterator[object] = iter(())
    integer: Iterator[object] = iter(())
    if name == "motion_blur":
        uniform = iter([scalar[0] * 90 - 45])
    elif isinstance(own, Snow):
        uniform = iter([scalar[0] * 90 - 135])
        cut = [int(np.ceil(side / own.zoom)) for side in (height, width)]
        top, left = (height - cut[0]) // 2, (width - cut[1]) // 2
        field = np.zeros((height, width))
        field[top : top + cut[0], left : left + cut[1]] = chance.normal(*cut)[0].numpy() / NORMAL_UNIT
        normal = iter([field])
    elif name == "spatter":
        normal = iter([chance.normal(height, width)[0].numpy() / NORMAL_UNIT])
    elif isinstance(own, Elastic):
        uniform = iter([(chance.uniform(height, width, stream=i)[0].numpy() * 2 - 65535) / 65536 for i in range(2)])
    elif isinstance(own, Fog):
        uniform = _fog_draws((chance.uniform(256, 256)[0].numpy() * 2 - 65535) / 65536)
    elif isinstance(own, Frost):
        sizes = canvas(own.scale, height, width, images.device)[1]
        number = int(scalar[0] * len(sizes))
        room = sizes[number] - (height, width)
        integer = iter([number, int(scalar[1] * room[0]), int(scalar[2] * room[1])])
    elif isinstance(own, Glass):
        bits = [chance.bits(height, width, stream=i)[0].numpy() for i in range(own.rounds)]
        integer = _glass_draws(bits, own.reach)

    def next_uniform(low: float, high: float, size: object = None) -> object:
        value = next(uniform)
        return value * high if isinstance(value, np.ndarray) else value

    def next_normal(loc: float = 0.0, scale: float = 1.0, size: object = None) -> object:
        return np.asarray(next(normal)) * scale + loc

    with (
        mock.patch("numpy.random.uniform", next_uniform),
        mock.patch("numpy.random.normal", next_normal),
        mock.patch("numpy.random.randint", lambda *_, **__: next(integer)),
        mock.patch("cv2.resize", lambda image, **_: image),
    ):
        yield


def _fog_draws(field: NDArray[np.float64]) -> Iterator[object]:
    step = len(field)
    while step >= 2:
        half = step // 2
        for rows, columns in ((half, half), (0, half), (half, 0)):
            yield field[rows::step, columns::step]
        step = half


def _glass_draws(rounds: list[NDArray[np.int32]], reach: int) -> Iterator[object]:
    for bits in rounds:
        down, right = (((half & 0xFFFF) * 2 * reach >> 16) - reach for half in (bits, bits >> 16))
        for row in range(len(bits) - reach, reach, -1):
            for column in range(bits.shape[1] - reach, reach, -1):
                yield right[row, column], down[row, column]


@dataclass(frozen=True)
class Bounds:
    """What a comparison may not exceed: grey levels for `pixels` and `mean`, a relative difference for the ratios."""

    pixels: float = 0.05
    mean: float = 0.05
    ratio: float = 0.01


_NOISE = Bounds(mean=0.7, ratio=0.05)  # each side draws for itself: so much do a few pictures vary
BOUNDS = {
    "gaussian_noise": _NOISE,
    "shot_noise": _NOISE,
    "impulse_noise": _NOISE,
    "speckle_noise": _NOISE,
    # The released set rounds here, the reference rounds down.
    "motion_blur": Bounds(pixels=0.55, mean=0.55),
    # The released set brings the flakes to 8 bits before the motion blur, the reference after it.
    "snow": Bounds(pixels=0.3, mean=0.3),
}


@dataclass(frozen=True)
class Comparison:
    """How far the results of one corruption at one severity lie from the reference's.

    Parameters
    ----------
    pixels
        Mean absolute difference a pixel, in grey levels; None for noise, where each side draws for itself.
    mean
        Difference of the means, the channel where it is largest, in grey levels.
    deviation, detail
        Ratios of the deviation of pixels, and of the root mean square step between neighbours.
    spectrum
        The largest ratio of power in four octaves of spatial frequency, ours to theirs or theirs to ours.
    change
        Ratio of the mean absolute change to the picture.
    """

    name: str
    severity: int
    pixels: float | None
    mean: float
    deviation: float
    detail: float
    spectrum: float
    change: float

    @property
    def bounds(self) -> Bounds:
        """The bounds for this corruption."""
        return BOUNDS.get(self.name, Bounds())

    def excess(self) -> dict[str, float]:
        """Each quantity as a share of its bound: above 1 is too far."""
        ratios = {"deviation": self.deviation, "detail": self.detail, "spectrum": self.spectrum, "change": self.change}
        shares = {key: (max(ratio, 1 / ratio) - 1) / self.bounds.ratio for key, ratio in ratios.items()}
        shares["mean"] = self.mean / self.bounds.mean
        if self.pixels is not None:
            shares["pixels"] = self.pixels / self.bounds.pixels
        return shares


def compare(images: Tensor, name: str, severity: int, theirs: Reference, seed: int = 0) -> Comparison:
    """Pictures [n, 3, H, W] corrupted here and by the reference."""
    parameters = reference_parameters(name, severity, images.shape[2])
    ours = apply(images, name, parameters, severity=severity, seed=seed, ids=range(len(images)))
    clean = _last(images)
    if "_noise" in name:
        state = np.random.get_state()
        np.random.seed(seed)
        other = np.stack([theirs(picture, name, severity) for picture in clean])
        np.random.set_state(state)
    else:
        results = []
        for i, picture in enumerate(clean):
            with handed(images[i : i + 1], name, severity, seed, i):
                results.append(theirs(picture, name, severity))
        other = np.stack(results)
    a, b, c = (pictures.astype(float) for pictures in (_last(ours), other, clean))
    bands = _bands(a) / _bands(b)
    return Comparison(
        name,
        severity,
        pixels=None if "_noise" in name else float(np.abs(a - b).mean()),
        mean=float(np.abs(a.mean((0, 1, 2)) - b.mean((0, 1, 2))).max()),
        deviation=float(a.std((1, 2)).mean() / b.std((1, 2)).mean()),
        detail=_detail(a) / _detail(b),
        spectrum=float(np.maximum(bands, 1 / bands).max()),
        change=float(np.abs(a - c).mean() / np.abs(b - c).mean()),
    )


def _last(images: Tensor) -> Picture:
    return np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())


def _detail(pixels: NDArray[np.float64]) -> float:
    return float(np.sqrt((np.diff(pixels, axis=1) ** 2).mean() + (np.diff(pixels, axis=2) ** 2).mean()))


def _bands(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Power in the octaves below half a cycle a pixel."""
    power = np.abs(np.fft.fft2(pixels, axes=(1, 2))) ** 2
    row, column = np.fft.fftfreq(pixels.shape[1])[:, None], np.fft.fftfreq(pixels.shape[2])
    octave = np.hypot(row, column)
    edges = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
    return np.array([power[:, (octave > low) & (octave <= high)].mean() for low, high in itertools.pairwise(edges)])


def table(comparisons: Sequence[Comparison]) -> str:
    """The worst of every corruption's severities as a Markdown table, bounds in brackets."""
    lines = [
        "| corruption | pixels | mean | deviation | detail | spectrum | change |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(c.name for c in comparisons):
        mine = [c for c in comparisons if c.name == name]
        bound = mine[0].bounds
        worst = {key: max(c.excess()[key] for c in mine) for key in mine[0].excess()}
        cells = [name, f"{worst['pixels'] * bound.pixels:.3f} (≤ {bound.pixels:g})" if "pixels" in worst else "–"]
        cells.append(f"{worst['mean'] * bound.mean:.3f} (≤ {bound.mean:g})")
        for key in ("deviation", "detail", "spectrum", "change"):
            cells.append(f"{worst[key] * bound.ratio:.1%} (≤ {bound.ratio:.0%})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = Path(os.environ.get("WISE_ATTA_DATA", ".")) / "imagenet-sample.zip"
    parser.add_argument("--data", type=Path, default=default, help="a zip file of pictures")
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--severities", type=int, nargs="+", default=list(SEVERITIES))
    parser.add_argument("--only", nargs="+", default=[*CORRUPTIONS, *EXTRA], help="corruptions by name")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(argv)
    theirs = reference()
    images = pictures(chosen.data, chosen.pictures)
    comparisons = [compare(images, n, s, theirs, chosen.seed) for n in chosen.only for s in chosen.severities]
    print(f"{len(images)} pictures of {images.shape[2]} × {images.shape[3]} px, frost: {frost_source()}\n")
    print(table(comparisons))
    broken = [(c, key) for c in comparisons for key, share in c.excess().items() if share > 1]
    for comparison, key in broken:
        print(f"{comparison.name} at severity {comparison.severity}: {key} out of bounds", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
