"""EATTA: one label a batch, where the prediction trembles, balanced against entropy (Wang et al., CVPR 2025)."""

from __future__ import annotations

from typing import Any

from wise_atta.how import Balanced, Update
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import Table, published, recipe

PRESETS: Table = {
    "imagenet-c": {"lr": 2.5e-4},
    "imagenet-r": {"lr": 1e-3},
    "imagenet-k": {"lr": 1e-3},
    "imagenet-a": {"lr": 5e-3},
    "cifar10-c": {"lr": 1e-3, "optimizer": "adam"},
}


@published(PRESETS, ratio=1.0, labels=1, selector=recipe("perturbation", balance=True))
def eatta(*, update: Update = recipe(Balanced), preset: str | None = None, **asks: Any) -> Method:
    """min over norm tensors of w₁·mean H(pᵢ) over {H < E₀} + w₂·CE(labelled), one step a batch.

    w₁ = 2g₂/(g₁ + g₂), w₂ = 2g₁/(g₁ + g₂), averaged; g₁ and g₂ are the gradient norms of the two losses.

    Parameters
    ----------
    update
        `Balanced`, or in its place its options (lr, momentum, nesterov, optimizer, adapt, below, weight_momentum). The
        published code adapts ``["norm", "layer1", "!layer4"]`` of a ResNet.
    ratio, policy, utility, selector, labels
        When and what to ask; names or objects. One label a batch unless given. `pacing` goes to the policy; `sigma` and
        `balance`, options of `Perturbation`, can be given in the selector's place.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 2.5e-4, 1e-3, 1e-3, 5e-3, batch
        64, from the public configurations with which WISE-ATTA's code runs it. ``"cifar10-c"``: Adam at 1e-3, batch
        200, as the unlabelled methods have it; none was published for this one.
    """
    return Method("eatta", update, **asks)
