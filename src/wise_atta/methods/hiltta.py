"""HILTTA: labels that choose the learning rate, and teach (Li et al., 2024)."""

from __future__ import annotations

from typing import Any

from wise_atta.how import Candidates, Update
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published, recipe


@published(
    imagenet_and_cifar(imagenet={}, cifar10={"optimizer": "adam"}), ratio=3.0, labels=3, selector=recipe("k-margin")
)
def hiltta(*, update: Update = recipe(Candidates), preset: str | None = None, **asks: Any) -> Method:
    """θ_η = θ − η·∂L/∂θ on the unlabelled for every rate η; keep arg min_η s_η; then Adam on CE(labelled).

    s_η ← ½·s_η + ½·(scaled MSE(p_η, p_source) on the unlabelled + scaled CE_η on the labelled).

    Parameters
    ----------
    update
        `Candidates`, or in its place its options (objective, rates, score_momentum, supervised_lr, norm, momentum,
        nesterov, optimizer). L is tent's, the mean entropy, unless given.
    ratio, policy, utility, selector, labels
        When and what to ask; names or objects. Three labels a batch unless given. `pacing` goes to the policy.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD, batch 64, the defaults, as in the
        public configurations of tent. ``"cifar10-c"``: Adam, batch 200, as in tent's there. The rates are the same.
    """
    return Method("hiltta", update, **asks)
