"""EATTA: one label a batch, where the prediction trembles, balanced against entropy (Wang et al., CVPR 2025)."""

from __future__ import annotations

from typing import Any

from wise_atta import what, when
from wise_atta.how import Balanced
from wise_atta.how.optimizer import Kind
from wise_atta.methods.method import Method, make_policy
from wise_atta.methods.presets import Table, presets
from wise_atta.model import Spec

PRESETS: Table = {
    "imagenet-c": {"lr": 2.5e-4},
    "imagenet-r": {"lr": 1e-3},
    "imagenet-k": {"lr": 1e-3},
    "imagenet-a": {"lr": 5e-3},
    "cifar10-c": {"lr": 1e-3, "optimizer": "adam"},
}


@presets(PRESETS)
def eatta(
    *,
    ratio: float = 1.0,
    policy: str | when.Policy = "uniform",
    utility: str | when.Utility = "count",
    selector: str | what.Selector = "perturbation",
    labels: int = 1,
    sigma: float = 0.01,
    balance: bool = True,
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    optimizer: Kind = "sgd",
    adapt: Spec = "norm",
    below: float = 0.4,
    weight_momentum: float = 0.8,
    preset: str | None = None,
    seed: int = 0,
    **pacing: Any,
) -> Method:
    """min over norm tensors of w₁·mean H(pᵢ) over {H < E₀} + w₂·CE(labelled), one step a batch.

    w₁ = 2g₂/(g₁ + g₂), w₂ = 2g₁/(g₁ + g₂), averaged; g₁ and g₂ are the gradient norms of the two losses.

    Parameters
    ----------
    ratio, policy, utility, selector, labels
        When and what to ask; names or objects. One label a batch unless given. `pacing` goes to the policy.
    sigma, balance
        The noise on the features, and whether classes that were asked for just before are passed over. See
        `Perturbation`.
    lr, momentum, nesterov, optimizer, adapt, below, weight_momentum
        See `Balanced`. The published code adapts ``["norm", "layer1", "!layer4"]`` of a ResNet.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 2.5e-4, 1e-3, 1e-3, 5e-3, batch
        64, from the public configurations with which WISE-ATTA's code runs it. ``"cifar10-c"``: Adam at 1e-3, batch
        200, as the unlabelled methods have it; none was published for this one.
    """
    if selector == "perturbation":
        selector = what.Perturbation(sigma=sigma, balance=balance, seed=seed)
    return Method(
        "eatta",
        Balanced(
            adapt=adapt,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            optimizer=optimizer,
            below=below,
            weight_momentum=weight_momentum,
        ),
        policy=make_policy(policy, ratio=ratio, seed=seed, labels=labels, **pacing),
        utility=when.utility(utility) if isinstance(utility, str) else utility,
        selector=what.selector(selector, seed=seed) if isinstance(selector, str) else selector,
        labels=labels,
    )
