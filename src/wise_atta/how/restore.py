"""How does a model that adapts for long keep what it knew? Some of its values return to the source, at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from wise_atta import errors, rng
from wise_atta.model import Layout

# Shapes by name, and a generator → for each tensor, true where it is to be restored.
Mask: TypeAlias = Callable[[Mapping[str, torch.Size], torch.Generator], Mapping[str, Tensor]]


class Restore:
    """Every value returns to its source value with a small probability.

    Parameters
    ----------
    probability
        Of each value, at each call.
    mask
        What draws which values return, instead of independent draws with `probability`.
    seed
        The draw of batch t depends on the seed and t alone.
    """

    def __init__(self, probability: float = 0.001, *, mask: Mask | None = None, seed: int = 0) -> None:
        if not 0 <= probability <= 1:
            raise errors.BadConfig(f"the probability to restore a value must be in [0, 1], not {probability}")
        self.probability = probability
        self.mask = mask
        self.seed = seed

    def draw(self, layout: Layout, number: int) -> Tensor:
        """A flat vector, true where a value returns at batch `number`."""
        mask = self._independent if self.mask is None else self.mask
        return layout.flatten(mask(layout.shapes, rng.torch_cpu(self.seed, "restore", number)))

    def _independent(self, shapes: Mapping[str, torch.Size], generator: torch.Generator) -> dict[str, Tensor]:
        return {name: torch.rand(shape, generator=generator) < self.probability for name, shape in shapes.items()}

    def __repr__(self) -> str:
        return f"Restore({self.probability}, seed={self.seed})"
