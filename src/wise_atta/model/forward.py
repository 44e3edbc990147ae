"""What one forward gave, and how often the network was run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wise_atta.engine.first_layer import First
from wise_atta.model.layout import Version
from wise_atta.model.statistics import Statistics
from wise_atta.stream import Inputs


@dataclass(eq=False)
class Forward:
    """What one pass over a batch gave, with its graph if there is one.

    `scored` is the prediction that counts where a method's is not the logits, once it was computed. `notes` are the
    engine's own. `first` is what the first layer gave, for another forward of the same inputs.
    """

    inputs: Inputs
    logits: Tensor
    features: Tensor
    version: Version
    statistics: Statistics | None = None
    scored: Tensor | None = None
    notes: Any = None
    first: First | None = None


@dataclass(eq=False)
class Pass:
    """What the network itself gave: of a forward that is recorded, the memory that each replay fills."""

    logits: Tensor
    features: Tensor
    statistics: Statistics | None
    first: First | None


@dataclass
class Work:
    """How often the network was run: forwards of all kinds, those of them with a graph, backwards."""

    forwards: int = 0
    gradient_forwards: int = 0
    backwards: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.forwards + other.forwards,
            self.gradient_forwards + other.gradient_forwards,
            self.backwards + other.backwards,
        )

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.forwards - other.forwards,
            self.gradient_forwards - other.gradient_forwards,
            self.backwards - other.backwards,
        )
