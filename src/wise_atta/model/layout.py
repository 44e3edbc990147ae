"""Where adapted tensors lie in one flat vector, and the versions of their values."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

# By group: one tensor each, or the whole group as a slice of a flat vector.
Gradients: TypeAlias = Mapping[str, Sequence[Tensor] | Tensor]

# Offsets in a flat vector are multiples of this, so that every view starts on a 256-byte boundary (float32).
_ALIGN = 64


class Version:
    """One immutable set of values for the adapted tensors: a flat vector and named views of it."""

    def __init__(self, flat: Tensor, layout: Layout, grad: bool = True) -> None:
        self.flat = flat
        self.layout = layout
        self._grad = grad
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._whole: dict[int, Tensor] = {}

    @property
    def whole(self) -> Tensor:
        """All values as one leaf, which a recorded network takes in place of the views."""
        if not self._whole:
            self._whole.setdefault(0, self.flat.detach().requires_grad_(True))
        return self._whole[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The views, made when they are first asked for: a recorded network takes the vector alone."""
        if not self._tensors:
            views = self.layout.views(self.flat)
            if self._grad:
                for tensor in views.values():
                    tensor.requires_grad_(True)
            # Of two threads that ask at once, both get the same leaves.
            self._tensors.setdefault(0, views)
        return self._tensors[0]


def wide(values: Tensor) -> Tensor:
    """Values that others add up to: those of half precision in float32, others as they are."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


@dataclass(frozen=True)
class Layout:
    """Where each adapted tensor lies in the flat vector, and which slice each group of them takes."""

    shapes: dict[str, torch.Size]
    offsets: dict[str, int]
    groups: dict[str, tuple[str, ...]]
    slices: dict[str, slice]
    total: int
    pieces: tuple[int, ...] = field(repr=False)

    @staticmethod
    def of(groups: Mapping[str, Sequence[str]], shapes: Mapping[str, torch.Size]) -> Layout:
        offset, offsets, slices, pieces = 0, {}, {}, []
        for group, names in groups.items():
            start = offset
            for name in names:
                offsets[name] = offset
                values = shapes[name].numel()
                padding = -values % _ALIGN
                pieces += [values, padding] if padding else [values]
                offset += values + padding
            slices[group] = slice(start, offset)
        return Layout(
            shapes={name: shapes[name] for name in offsets},
            offsets=offsets,
            groups={group: tuple(names) for group, names in groups.items()},
            slices=slices,
            total=offset,
            pieces=tuple(pieces),
        )

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a flat vector, cut loose from its graph."""
        # One call cuts values and padding apart: a vector needs no view of its own.
        parts = iter(torch.split_with_sizes(flat.detach(), self.pieces) if self.pieces else ())
        views: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            part = next(parts)
            views[name] = part if len(shape) == 1 else part.view(shape)
            if shape.numel() % _ALIGN:
                next(parts)
        return views

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new flat vector with these values; padding is zero."""
        first = next(iter(tensors.values()))
        flat = torch.zeros(self.total, dtype=first.dtype, device=first.device)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name].detach())
        return flat


def checksum(values: Tensor) -> int:
    """CRC-32 of the values."""
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes()) if values.numel() else 0


def some_values(tensor: Tensor) -> Tensor:
    """Some values of a tensor, without reading all of it."""
    tensor = tensor.detach()
    while tensor.dim() > 1:
        tensor = tensor[..., 0]
    return tensor.reshape(-1)[:16].double()
