"""WISE-ATTA: ask when the batch is worth it, about the sample that still drifts (paper, section 3 and Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from wise_atta import errors
from wise_atta.anchor import Anchor
from wise_atta.how import Entropy, LikelihoodRatio, Objective, PublishedTwoStep, TwoStep, Update
from wise_atta.how.two_step import Head
from wise_atta.methods.method import Method, asking
from wise_atta.methods.recipes import Table, published, recipe
from wise_atta.model import StatisticsMode
from wise_atta.what import Selector
from wise_atta.when import BudgetPaced, Policy, Utility

PAPER: Table = {
    "imagenet-c": {"lr": 2.5e-4},
    "imagenet-r": {"lr": 1e-3},
    "imagenet-k": {"lr": 1e-3},
    "imagenet-a": {"lr": 5e-3},
}
RATES: Table = {
    "authors": {"lr": 5e-4, "head_lr": 2e-4},
    "authors/imagenet-c": {"lr": 5e-4, "head_lr": 2e-4, "norm": ("norm", "layer1", "!layer4")},
    "authors/imagenet-r": {"lr": 1e-3, "head_lr": 1e-3},
    "authors/imagenet-k": {"lr": 6e-4, "head_lr": 3e-4},
    "authors/imagenet-a": {"lr": 1e-3, "head_lr": 4e-3},
}
AUTHORS = {"algorithm": "authors", "rule": "published", "first": 4, "balance": True}
PRESETS: Table = {
    **PAPER,
    "cifar10-c": {"lr": 1e-3},
    "paper": {"algorithm": "paper"},
    **{f"paper/{name}": {"algorithm": "paper", **values} for name, values in PAPER.items()},
    **{name: {**AUTHORS, **values} for name, values in RATES.items()},
}


def loss(
    *,
    objective: Literal["entropy", "roid"] | Objective = "entropy",
    entropy: Literal["filtered", "all"] = "filtered",
    seed: int = 0,
) -> Objective:
    """What an unlabelled sample teaches.

    Parameters
    ----------
    objective
        Its ``"entropy"``, or the weighted likelihood ratio and consistency of ``"roid"``, the strongest unlabelled loss
        here, or an object.
    entropy
        L_ent over the confident unlabelled samples (``"filtered"``) or over ``"all"`` n.
    """
    if entropy not in ("filtered", "all"):
        raise errors.unknown("entropy", entropy, ("filtered", "all"))
    if not isinstance(objective, str):
        return objective
    if objective not in ("entropy", "roid"):
        raise errors.unknown("objective", objective, ("entropy", "roid"))
    return LikelihoodRatio(seed=seed) if objective == "roid" else Entropy(below=0.4 if entropy == "filtered" else None)


def two_steps(
    *,
    rule: Literal["paper", "published"] | None = None,
    published: Mapping[str, Any] | None = None,
    train_head: Head | None = None,
    **options: Any,
) -> Update:
    """The update rule: the paper's, or that of the published code with the same options.

    Parameters
    ----------
    rule, published
        `TwoStep`, or for ``"published"`` `PublishedTwoStep`, with other weights (`unlabelled`, `ent`, `sup`) in place
        of the λ.
    train_head
        All of it unless given, under the published rule its bias.
    """
    if rule not in (None, "paper", "published"):
        raise errors.unknown("rule", rule, ("paper", "published"))
    if train_head is not None:
        options["train_head"] = train_head
    if rule != "published":
        return TwoStep(**options)
    if options.pop("block", None) is not None:
        raise errors.BadConfig("the published rule trains the head, not a block: give rule='paper', or no block")
    if options.pop("pull", 0.0) or options.pop("correct_prior", False):
        raise errors.BadConfig("the published rule has no pull and no corrected prior: give rule='paper'")
    head_lr = options.pop("head_lr", None)
    options = {name: value for name, value in options.items() if not name.startswith("lambda_")}
    return PublishedTwoStep(second_lr=options["lr"] if head_lr is None else head_lr, **options, **(published or {}))


@published(PRESETS)
def wise(
    *,
    update: Update = recipe(two_steps, rest=TwoStep, objective=recipe(loss), lr=2.5e-4),
    ratio: float = 0.2,
    policy: str | Policy = "paced",
    utility: str | Utility = "count",
    selector: Selector = recipe("drift"),
    labels: int = 1,
    anchor: Anchor = recipe(Anchor, names={"momentum": "anchor_momentum"}),
    statistics: StatisticsMode | None = None,
    algorithm: Literal["paper", "authors"] | None = None,
    preset: str | None = None,
    seed: int = 0,
    **pacing: Any,
) -> Method:
    """WISE-ATTA under a budget of `ratio` labels a batch.

    Parameters
    ----------
    update
        `TwoStep`, or in its place its options (lr, head_lr, lambda_sup, lambda_ent, lambda_head, norm, supervise_norm,
        train_head, block, only_selected, pull, correct_prior, momentum, nesterov), and by name: `objective`, the
        ``"entropy"`` of ``entropy="filtered"`` samples or of ``"all"``, or the loss of ``"roid"``; `rule`, the
        ``"paper"``'s or the ``"published"`` code's `PublishedTwoStep`, with weights `published`. With
        ``objective="roid"``, ``lambda_ent=1``, ``pull=0.01`` and ``correct_prior=True`` the rule is that of `roid`
        wherever nobody is asked.
    ratio, policy, utility, selector, labels
        When and what to ask; names or objects. `pacing` goes to the policy (window, warmup, horizon, slack, credit, …).
    anchor
        The slow copy that drift is measured from, or in its place `anchor_momentum`.
    statistics
        What BatchNorm layers normalise with. The presets use the batch, as the paper does. Without one the source's
        statistics count for 256 samples beside the batch (``"mixed"``): that loses little on clean and on sorted
        streams, takes single samples, and keeps much of what batch statistics gain (`wise-atta no-harm`).
    algorithm
        How the pacing policy goes: see `preset` of `BudgetPaced`. Under ``"authors"`` anchor, history and budget also
        begin anew at a new domain.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: the paper's learning rates 2.5e-4, 1e-3,
        1e-3 and 5e-3 (appendix, hyper-parameters). ``"cifar10-c"``: 1e-3, which `wise-atta tune` chose (results,
        methods side by side); none was published. ``"paper"``: Algorithm 1 as printed, which may overspend.
        ``"authors"``: the published code's policy, selector, losses and restarts; needs `length`, the number of batches
        between restarts. ``"paper/imagenet-c"`` and so on are both, ``"authors/imagenet-c"`` and so on have the two
        rates of the published code for a ResNet-50, on ImageNet-C with all of `layer1` and without `layer4`. Another
        `policy` wins over theirs.
    """
    paced = policy == "paced" or isinstance(policy, BudgetPaced)
    if algorithm == "authors" and not paced and not pacing.get("exact"):
        pacing.pop("length", None)  # of the algorithm's own policy, over which another wins
    if paced:
        pacing["preset"] = algorithm
    return Method(
        "wise",
        update,
        statistics=statistics or ("mixed" if preset is None else "batch"),
        anchor=anchor,
        restarts=algorithm == "authors",
        **asking(ratio=ratio, policy=policy, utility=utility, selector=selector, labels=labels, seed=seed, **pacing),
    )
