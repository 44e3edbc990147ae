"""WISE-ATTA: ask when the batch is worth it, about the sample that still drifts (paper, section 3 and Algorithm 1)."""

from __future__ import annotations

from typing import Any, Literal

from wise_atta import errors, what, when
from wise_atta.anchor import Anchor
from wise_atta.how import Entropy, Objective, PublishedTwoStep, TwoStep, Update
from wise_atta.how.two_step import Head
from wise_atta.methods.method import Method, make_policy
from wise_atta.model import Spec


def wise(
    *,
    ratio: float = 0.2,
    policy: str | when.Policy = "paced",
    utility: str | when.Utility = "count",
    selector: str | what.Selector = "drift",
    labels: int = 1,
    preset: Literal["paper", "authors"] | None = None,
    lr: float = 1e-3,
    head_lr: float | None = None,
    lambda_sup: float = 0.9,
    lambda_ent: float = 0.1,
    lambda_head: float = 1.0,
    objective: Objective | None = None,
    entropy: Literal["filtered", "all"] = "filtered",
    norm: Spec = "norm",
    supervise_norm: bool = True,
    train_head: Head = "full",
    block: Spec | None = None,
    only_selected: bool = False,
    momentum: float = 0.9,
    nesterov: bool = True,
    anchor_momentum: float = 0.9,
    length: int | None = None,
    seed: int = 0,
    **pacing: Any,
) -> Method:
    """WISE-ATTA under a budget of `ratio` labels a batch.

    Parameters
    ----------
    ratio, policy, utility, selector, labels
        When and what to ask; names or objects. `pacing` goes to the policy (window, warmup, horizon, slack, credit, …).
    preset
        ``"paper"``: Algorithm 1 as printed, which may overspend. ``"authors"``: the published code's policy, selector,
        losses and restarts; needs `length`, the number of batches between restarts.
    lr, head_lr, lambda_sup, lambda_ent, lambda_head, supervise_norm, train_head, block, only_selected
        See `TwoStep`.
    entropy
        L_ent over the confident unlabelled samples (``"filtered"``) or over ``"all"`` n.
    norm
        Which tensors the first step moves.
    """
    authors = preset == "authors"
    if isinstance(selector, str):
        published = {"first": 4, "balance": True} if authors and selector == "drift" else {}
        selector = what.selector(selector, seed=seed, **published)
    update: Update
    if authors:
        update = PublishedTwoStep(
            lr=lr,
            second_lr=lr if head_lr is None else head_lr,
            norm=norm,
            only_selected=only_selected,
            momentum=momentum,
            nesterov=nesterov,
        )
    else:
        if entropy not in ("filtered", "all"):
            raise errors.unknown("entropy", entropy, ("filtered", "all"))
        if objective is None:
            objective = Entropy(below=0.4 if entropy == "filtered" else None)
        update = TwoStep(
            lr=lr,
            head_lr=head_lr,
            lambda_sup=lambda_sup,
            lambda_ent=lambda_ent,
            lambda_head=lambda_head,
            objective=objective,
            norm=norm,
            supervise_norm=supervise_norm,
            train_head=train_head,
            block=block,
            only_selected=only_selected,
            momentum=momentum,
            nesterov=nesterov,
        )
    return Method(
        "wise",
        update,
        policy=make_policy(policy, ratio=ratio, seed=seed, length=length, preset=preset, **pacing),
        utility=when.utility(utility) if isinstance(utility, str) else utility,
        selector=selector,
        labels=labels,
        anchor=Anchor(anchor_momentum),
        restarts=authors,
    )
