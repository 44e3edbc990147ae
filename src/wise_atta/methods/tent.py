"""Tent: minimise the mean entropy of the batch (Wang et al., ICLR 2021)."""

from __future__ import annotations

from wise_atta.how import Descend, Entropy
from wise_atta.how.optimizer import Kind
from wise_atta.methods.method import Method
from wise_atta.model import Spec


def tent(
    *, lr: float = 1e-3, momentum: float = 0.9, nesterov: bool = True, optimizer: Kind = "sgd", adapt: Spec = "norm"
) -> Method:
    """min over norm tensors of (1/n) Σ H(pᵢ), one step a batch."""
    update = Descend(Entropy(), adapt=adapt, lr=lr, momentum=momentum, nesterov=nesterov, optimizer=optimizer)
    return Method("tent", update)
