"""Moving averages: of a mean prediction, a loss, a weight. And which predictions differ from their average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wise_atta import errors, signals
from wise_atta.part import Part, running


@dataclass(eq=False)
class Average(Part):
    """v ← μ·v + (1 − μ)·x. The first x is taken as it is, unless `value` was set before.

    Parameters
    ----------
    momentum
        μ.

    Examples
    --------
    >>> loss = Average(0.9)
    >>> for x in (1.0, 2.0):
    ...     loss.follow(torch.tensor(x))
    >>> round(loss.value.item(), 6)
    1.1
    """

    momentum: float = 0.9
    value: Tensor | None = running(key="value")

    def __post_init__(self) -> None:
        if not 0 <= self.momentum <= 1:
            raise errors.BadConfig(f"the momentum of a moving average must be in [0, 1], not {self.momentum}")

    def follow(self, x: Tensor) -> None:
        """Move towards a new value."""
        x = x.detach()
        self.value = x if self.value is None else self.momentum * self.value.to(x) + (1 - self.momentum) * x


@dataclass(eq=False)
class Redundancy(Part):
    """A sample is new if |cos(p̄, p)| < ε, with p̄ the moving average of the mean prediction of what was kept.

    Parameters
    ----------
    epsilon
        ε. As long as nothing was kept every sample is new.
    momentum
        Of p̄.

    Examples
    --------
    >>> redundancy = Redundancy(epsilon=0.5)
    >>> probs = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    >>> redundancy.new(probs).tolist()
    [True, True]
    >>> redundancy.follow(probs[:1])
    >>> redundancy.new(probs).tolist()
    [False, True]
    """

    epsilon: float = 0.05
    momentum: float = 0.9
    mean: Average = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.epsilon <= 0:
            raise errors.BadConfig(f"epsilon is a cosine above 0, not {self.epsilon}")
        self.mean = Average(self.momentum)

    def new(self, probs: Tensor) -> Tensor:
        """True where a prediction differs from what was kept before."""
        if self.mean.value is None:
            return torch.ones(len(probs), dtype=torch.bool, device=probs.device)
        return signals.cosine_to(self.mean.value.to(probs), probs).abs() < self.epsilon

    def follow(self, probs: Tensor) -> None:
        """Take note of the predictions that were kept; of none, nothing."""
        if len(probs):
            self.mean.follow(probs.mean(dim=0))

    # Saved as the average alone.
    def reset(self) -> None:
        self.mean.reset()

    def state_dict(self) -> dict[str, Any]:
        return self.mean.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean.load_state_dict(state)
