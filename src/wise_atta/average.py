"""Moving averages: of a mean prediction, a loss, a weight. And which predictions differ from their average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wise_atta import signals
from wise_atta.part import Part, above, running, share


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
        share(momentum=self.momentum)

    def follow(self, x: Tensor) -> None:
        """Move towards a new value."""
        x = x.detach()
        self.value = x if self.value is None else self.momentum * self.value.to(x) + (1 - self.momentum) * x


@dataclass(kw_only=True, eq=False)
class Redundancy(Average):
    """A sample is new if |cos(p̄, p)| < ε, with p̄ the moving average of the mean prediction of what was kept.

    Parameters
    ----------
    momentum
        Of p̄.
    epsilon
        ε. As long as nothing was kept every sample is new.

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

    momentum: float = 0.9
    epsilon: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, epsilon=self.epsilon)

    def new(self, probs: Tensor) -> Tensor:
        """True where a prediction differs from what was kept before."""
        if self.value is None:
            return torch.ones(len(probs), dtype=torch.bool, device=probs.device)
        return signals.cosine_to(self.value.to(probs), probs).abs() < self.epsilon

    def follow(self, probs: Tensor) -> None:
        """Take note of the predictions that were kept; of none, nothing."""
        if len(probs):
            super().follow(probs.mean(dim=0))
