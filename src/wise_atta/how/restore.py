"""A way back for a model that adapts for long: some of its values return to the source, at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from wise_atta import rng
from wise_atta.model import Layout
from wise_atta.part import share

# Shapes by name, and a generator → for each tensor, numbers in [0, 1).
Draws: TypeAlias = Callable[[Mapping[str, torch.Size], torch.Generator], Mapping[str, Tensor]]


@dataclass(eq=False)
class Restore:
    """Every value returns to its source value with a small probability.

    Parameters
    ----------
    probability
        Of each value, at each call.
    draws
        What gives the numbers, one a value: those below `probability` return. Independent and uniform if not given.
    seed
        The draw of batch t depends on the seed and t alone.
    """

    probability: float = 0.001
    _: KW_ONLY
    draws: Draws | None = field(default=None, repr=False)
    seed: int = 0

    def __post_init__(self) -> None:
        share(probability=self.probability)

    def draw(self, layout: Layout, number: int) -> Tensor:
        """A flat vector, true where a value returns at batch `number`."""
        draws = (self.draws or _uniform)(layout.shapes, rng.torch_cpu(self.seed, "restore", number))
        return layout.flatten({name: draw < self.probability for name, draw in draws.items()})


def _uniform(shapes: Mapping[str, torch.Size], generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.rand(shape, generator=generator, device="cpu") for name, shape in shapes.items()}
