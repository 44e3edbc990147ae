"""A method: a composition of when, what and how, and a name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from wise_atta import errors, when
from wise_atta.anchor import Anchor
from wise_atta.how import Update
from wise_atta.model import StatisticsMode
from wise_atta.what import Drift, Selector
from wise_atta.when import Count, Never, Policy, Utility


@dataclass(frozen=True)
class Method:
    """The parts that `wise_atta.adapt` puts around a model.

    Parameters
    ----------
    name
        What it is called in tables.
    update
        How it learns, and so which tensors adapt.
    policy, utility
        When it asks.
    selector, labels
        What it asks, and at most how many a batch (None: as many as the selector picks).
    statistics
        What its BatchNorm layers normalise with.
    anchor
        The slow copy, if a part needs one.
    restarts
        Whether anchor, history and budget begin anew at a new domain, as in the paper's published code.
    """

    name: str
    update: Update
    policy: Policy = field(default_factory=Never)
    utility: Utility = field(default_factory=Count)
    selector: Selector = field(default_factory=Drift)
    labels: int | None = 1
    statistics: StatisticsMode = "batch"
    anchor: Anchor | None = None
    restarts: bool = False


def make_policy(
    policy: str | Policy, *, ratio: float | None, seed: int, labels: int | None = 1, **options: Any
) -> Policy:
    """A policy by name, given what it takes of ratio, seed and labels; or an object as it is. None means not given.

    Without a ratio every sample may be asked about.

    >>> make_policy("uniform", ratio=0.5, seed=0)
    Uniform(ratio=0.5, total=None, per='batch')
    >>> make_policy("uniform", ratio=None, seed=0)
    Uniform(ratio=1, total=None, per='sample')
    """
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(policy, Policy):
        if options:
            raise errors.BadConfig(f"{', '.join(options)}: give these to the policy object itself")
        return policy
    if policy not in when.POLICIES:
        raise errors.unknown("policy", policy, when.POLICIES)
    if policy == "always" and labels is None:
        policy, ratio = "uniform", None
    takes = inspect.signature(when.POLICIES[policy]).parameters
    pace = {"ratio": 1, "per": "sample"} if ratio is None else {"ratio": ratio}
    shared = {name: value for name, value in {**pace, "seed": seed, "labels": labels}.items() if name in takes}
    return when.policy(policy, **(shared | options))


def asking(
    *,
    ratio: float | None,
    policy: str | Policy = "uniform",
    utility: str | Utility = "count",
    selector: Selector,
    labels: int | None,
    seed: int = 0,
    **pacing: Any,
) -> dict[str, Any]:
    """When and what to ask, as `Method` takes it; policy and utility are names or objects."""
    return {
        "policy": make_policy(policy, ratio=ratio, seed=seed, labels=labels, **pacing),
        "utility": when.utility(utility) if isinstance(utility, str) else utility,
        "selector": selector,
        "labels": labels,
    }
