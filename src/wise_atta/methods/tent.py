"""Tent: minimise the mean entropy of the batch (Wang et al., ICLR 2021)."""

from __future__ import annotations

from wise_atta.how import Descend, Update
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published, recipe

PRESETS = imagenet_and_cifar(imagenet={"lr": 2.5e-4}, cifar10={"lr": 1e-3, "optimizer": "adam"})


@published(PRESETS)
def tent(*, update: Update = recipe(Descend, lr=2.5e-4), preset: str | None = None) -> Method:
    """min over norm tensors of (1/n) Σ H(pᵢ), one step a batch.

    Parameters
    ----------
    update
        `Descend` on `Entropy`. Its options (lr, momentum, nesterov, optimizer, adapt) can be given in its place.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 2.5e-4, the default.
        ``"cifar10-c"``: Adam at 1e-3, batch 200. Both from the public configurations.
    """
    return Method("tent", update)
