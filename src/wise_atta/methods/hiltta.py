"""HILTTA: labels that choose the learning rate, and teach (Li et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wise_atta import what, when
from wise_atta.how import Candidates, Objective
from wise_atta.how.candidates import RATES
from wise_atta.how.optimizer import Kind
from wise_atta.methods.method import Method, make_policy
from wise_atta.methods.presets import presets, published
from wise_atta.model import Spec


@presets(published(imagenet={}, cifar10={"optimizer": "adam"}))
def hiltta(
    *,
    ratio: float = 3.0,
    policy: str | when.Policy = "uniform",
    utility: str | when.Utility = "count",
    selector: str | what.Selector = "k-margin",
    labels: int = 3,
    objective: Objective | None = None,
    rates: Sequence[float] = RATES,
    score_momentum: float = 0.5,
    supervised_lr: float = 1e-5,
    norm: Spec = "norm",
    momentum: float = 0.9,
    nesterov: bool = True,
    optimizer: Kind = "sgd",
    preset: str | None = None,
    seed: int = 0,
    **pacing: Any,
) -> Method:
    """θ_η = θ − η·∂L/∂θ on the unlabelled for every rate η; keep arg min_η s_η; then Adam on CE(labelled).

    s_η ← ½·s_η + ½·(scaled MSE(p_η, p_source) on the unlabelled + scaled CE_η on the labelled).

    Parameters
    ----------
    ratio, policy, utility, selector, labels
        When and what to ask; names or objects. Three labels a batch unless given. `pacing` goes to the policy.
    objective, rates, score_momentum, supervised_lr, norm, momentum, nesterov, optimizer
        See `Candidates`. L is tent's, the mean entropy, unless given.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD, batch 64, the defaults, as in the
        public configurations of tent. ``"cifar10-c"``: Adam, batch 200, as in tent's there. The rates are the same.
    """
    return Method(
        "hiltta",
        Candidates(
            objective,
            rates=rates,
            score_momentum=score_momentum,
            supervised_lr=supervised_lr,
            norm=norm,
            momentum=momentum,
            nesterov=nesterov,
            optimizer=optimizer,
        ),
        policy=make_policy(policy, ratio=ratio, seed=seed, labels=labels, **pacing),
        utility=when.utility(utility) if isinstance(utility, str) else utility,
        selector=what.selector(selector, seed=seed) if isinstance(selector, str) else selector,
        labels=labels,
    )
