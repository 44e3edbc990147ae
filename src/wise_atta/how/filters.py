"""Which samples of a batch are worth learning from? Confident ones, and among them those that bring something new."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wise_atta import errors, signals
from wise_atta.how.average import Average


def confident(entropy: Tensor, classes: int, below: float = 0.4) -> Tensor:
    """True where H < E₀ = below·ln C.

    >>> confident(torch.tensor([0.0, 0.9, 1.0]), classes=10).tolist()
    [True, True, False]
    """
    return entropy.detach() < signals.entropy_threshold(classes, below)


def trust(entropy: Tensor, classes: int, below: float = 0.4) -> Tensor:
    """exp(E₀ − H) with E₀ = below·ln C: the surer, the more a sample counts. A constant to autograd.

    >>> trust(torch.tensor([0.0, signals.entropy_threshold(10)]), classes=10)
    tensor([2.5119, 1.0000])
    """
    return (signals.entropy_threshold(classes, below) - entropy.detach()).exp()


class Redundancy:
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

    def __init__(self, epsilon: float = 0.05, momentum: float = 0.9) -> None:
        if epsilon <= 0:
            raise errors.BadConfig(f"epsilon is a cosine above 0, not {epsilon}")
        self.epsilon = epsilon
        self.mean = Average(momentum)

    def new(self, probs: Tensor) -> Tensor:
        """True where a prediction differs from what was kept before."""
        if self.mean.value is None:
            return torch.ones(len(probs), dtype=torch.bool, device=probs.device)
        return signals.cosine_to(self.mean.value.to(probs), probs).abs() < self.epsilon

    def follow(self, probs: Tensor) -> None:
        """Take note of the predictions that were kept; of none, nothing."""
        if len(probs):
            self.mean.follow(probs.mean(dim=0))

    def reset(self) -> None:
        self.mean.reset()

    def state_dict(self) -> dict[str, Any]:
        return self.mean.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean.load_state_dict(state)

    def __repr__(self) -> str:
        return f"Redundancy(epsilon={self.epsilon}, momentum={self.mean.momentum})"
