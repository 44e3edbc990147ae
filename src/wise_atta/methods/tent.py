"""Tent: minimise the mean entropy of the batch (Wang et al., ICLR 2021)."""

from __future__ import annotations

from wise_atta.how import Descend, Entropy
from wise_atta.how.optimizer import Kind
from wise_atta.methods.method import Method
from wise_atta.methods.presets import presets, published
from wise_atta.model import Spec


@presets(published(imagenet={"lr": 2.5e-4}, cifar10={"lr": 1e-3, "optimizer": "adam"}))
def tent(
    *,
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    optimizer: Kind = "sgd",
    adapt: Spec = "norm",
    preset: str | None = None,
) -> Method:
    """min over norm tensors of (1/n) Σ H(pᵢ), one step a batch.

    Parameters
    ----------
    lr, momentum, nesterov, optimizer
        See `Optimizer`.
    adapt
        Which tensors.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 2.5e-4, the default.
        ``"cifar10-c"``: Adam at 1e-3, batch 200. Both from the public configurations.
    """
    update = Descend(Entropy(), adapt=adapt, lr=lr, momentum=momentum, nesterov=nesterov, optimizer=optimizer)
    return Method("tent", update)
