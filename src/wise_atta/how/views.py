"""Views of a batch: one random change of colour, place and sharpness, the same for all.

Plain torch on the device of the pictures. The few numbers that decide a view are drawn on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from wise_atta import errors
from wise_atta.stream import Inputs

# A batch and a generator for whatever is drawn → the batch as it could have looked.
Augmentation: TypeAlias = Callable[[Inputs, torch.Generator], Inputs]
Range: TypeAlias = tuple[float, float]

_LUMA = (0.299, 0.587, 0.114)
_KERNEL = 5


@dataclass(frozen=True)
class Augment:
    """Pictures [n, c, h, w] in [0, 1] → one view of them. None leaves a part out.

    Colour jitter in random order, then a turn, shift and zoom of the padded picture, blur, crop to the old size, flip
    and noise; clipped to [0, 1] before and after. Everything is drawn once for the whole batch, noise too.

    Parameters
    ----------
    brightness, contrast, saturation, gamma
        Ranges of factors (an exponent, for gamma).
    hue
        Range of the shift, in turns of the colour circle. Hue and saturation are for three channels only.
    padding
        What lies around a picture: its ``"edge"``, or its ``"reflect"``-ion.
    degrees, shift, zoom
        Largest turn; largest shift each way, as a share of the picture padded by half (so twice the share of the
        picture itself); range of the zoom.
    blur
        Range of σ, in pixels, of a Gaussian of 5 × 5.
    flip
        Probability of a mirror image.
    noise
        σ of Gaussian noise.

    Examples
    --------
    >>> pictures = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    >>> Augment()(pictures, torch.Generator().manual_seed(1)).shape
    torch.Size([4, 3, 32, 32])
    """

    brightness: Range | None = (0.6, 1.4)
    contrast: Range | None = (0.7, 1.3)
    saturation: Range | None = (0.5, 1.5)
    hue: Range | None = (-0.06, 0.06)
    gamma: Range | None = (0.7, 1.3)
    padding: Literal["edge", "reflect"] = "edge"
    degrees: float = 15.0
    shift: float = 1 / 16
    zoom: Range = (0.9, 1.1)
    blur: Range | None = (0.001, 0.5)
    flip: float = 0.5
    noise: float = 0.005

    def __call__(self, inputs: Inputs, generator: torch.Generator) -> Tensor:
        if not isinstance(inputs, Tensor) or inputs.dim() != 4 or not inputs.is_floating_point():
            raise errors.BadInput(
                "views are made of pictures, a float tensor [n, c, h, w] in [0, 1]: for other inputs give a function "
                "(inputs, generator) → inputs that makes a view of them"
            )
        with torch.no_grad():
            x = self._jitter(inputs.clamp(0, 1), generator)
            x = self._move(x, generator)
            if self.blur is not None:
                x = _blur(x, _uniform(self.blur, generator))
            if _uniform((0, 1), generator) < self.flip:
                x = x.flip(-1)
            if self.noise:
                x = x + self.noise * torch.randn(x.shape[1:], generator=generator, device="cpu").to(x)
            return x.clamp(0, 1)

    def _jitter(self, x: Tensor, generator: torch.Generator) -> Tensor:
        changes: list[tuple[Range | None, Callable[[Tensor, float], Tensor]]] = [
            (self.brightness, lambda x, f: x * f),
            (self.contrast, lambda x, f: _blend(x, _grey(x).mean(dim=(1, 2, 3), keepdim=True), f)),
            (self.saturation if x.shape[1] == 3 else None, lambda x, f: _blend(x, _grey(x), f)),
            (self.hue if x.shape[1] == 3 else None, _turn_hue),
            (self.gamma, lambda x, f: x**f),
        ]
        for index in torch.randperm(len(changes), generator=generator, device="cpu").tolist():
            extent, change = changes[index]
            if extent is not None:
                x = change(x, _uniform(extent, generator)).clamp(0, 1)
        return x

    def _move(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Where each pixel of the new picture lies in the old one.

        Padding, turning and cropping are one look-up. With the default ranges no look-up leaves a padding of half the
        picture, so what lies beyond it need not be said. Blur needs a margin, which it then takes off.
        """
        height, width = x.shape[-2:]
        turn = math.radians(_uniform((-self.degrees, self.degrees), generator))
        right, down = (2 * side * _uniform((-self.shift, self.shift), generator) for side in (width, height))
        zoom = _uniform(self.zoom, generator)
        margin = 0 if self.blur is None else _KERNEL // 2
        u = torch.arange(-margin, width + margin, device=x.device, dtype=x.dtype) - (width - 1) / 2 - right
        v = torch.arange(-margin, height + margin, device=x.device, dtype=x.dtype) - (height - 1) / 2 - down
        v, u = torch.meshgrid(v, u, indexing="ij")
        cos, sin = math.cos(turn) / zoom, math.sin(turn) / zoom
        # grid_sample counts from −1, the centre of the first pixel, to 1, the centre of the last.
        grid = torch.stack([(cos * u + sin * v) * _span(width), (cos * v - sin * u) * _span(height)], dim=-1)
        mode = "border" if self.padding == "edge" else "reflection"
        return functional.grid_sample(x, grid.expand(len(x), -1, -1, -1), padding_mode=mode, align_corners=True)


def _uniform(extent: Range, generator: torch.Generator) -> float:
    low, high = extent
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64, device="cpu"))


def _span(side: int) -> float:
    return 2 / max(side - 1, 1)


def _blend(x: Tensor, other: Tensor, share: float) -> Tensor:
    return share * x + (1 - share) * other


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return (x * torch.tensor(_LUMA, dtype=x.dtype, device=x.device).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)


def _turn_hue(x: Tensor, turns: float) -> Tensor:
    """To hue, saturation and value, and back with another hue."""
    red, green, blue = x.unbind(dim=1)
    value, low = x.amax(dim=1), x.amin(dim=1)
    chroma = value - low
    safe = chroma.clamp_min(torch.finfo(x.dtype).tiny)
    # Sixths of the colour circle: red is 0, green 2, blue 4.
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    channels = []
    for offset in (5, 3, 1):
        place = (offset + hue + 6 * turns) % 6
        channels.append(value - chroma * torch.minimum(place, 4 - place).clamp(0, 1))
    return torch.stack(channels, dim=1)


def _blur(x: Tensor, sigma: float) -> Tensor:
    """A Gaussian over 5 × 5 pixels; the picture loses the margin that the kernel needs."""
    place = torch.arange(_KERNEL, dtype=torch.float64, device="cpu") - _KERNEL // 2
    kernel = (-0.5 * (place / sigma) ** 2).exp()
    kernel = (kernel / kernel.sum()).to(x)
    channels = x.shape[1]
    x = functional.conv2d(x, kernel.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
    return functional.conv2d(x, kernel.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)
