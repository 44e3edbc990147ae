"""When to ask? A utility scores the batch, a policy decides on the score, an account keeps the policy honest."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from wise_atta import errors
from wise_atta.when.account import Account
from wise_atta.when.paced import BudgetPaced
from wise_atta.when.policies import Always, Decision, Exhaust, Never, Policy, Random, Uniform, early
from wise_atta.when.utilities import Count, LowKEntropy, MeanDrift, MeanEntropy, TopKDrift, TopKEntropy, Utility

__all__ = [
    "POLICIES",
    "UTILITIES",
    "Account",
    "Always",
    "BudgetPaced",
    "Count",
    "Decision",
    "Exhaust",
    "LowKEntropy",
    "MeanDrift",
    "MeanEntropy",
    "Never",
    "Policy",
    "Random",
    "TopKDrift",
    "TopKEntropy",
    "Uniform",
    "Utility",
    "early",
    "policy",
    "utility",
]

POLICIES: dict[str, type[Policy]] = {
    "paced": BudgetPaced,
    "uniform": Uniform,
    "random": Random,
    "always": Always,
    "never": Never,
}

UTILITIES: dict[str, type[Utility]] = {
    "count": Count,
    "mean-entropy": MeanEntropy,
    "topk-entropy": TopKEntropy,
    "lowk-entropy": LowKEntropy,
    "mean-drift": MeanDrift,
    "topk-drift": TopKDrift,
}

_T = TypeVar("_T")


def policy(name: str, **options: Any) -> Policy:
    """The policy of that name.

    >>> policy("uniform", ratio=0.5)
    Uniform(ratio=0.5, total=None, per='batch')
    """
    return _build("policy", POLICIES, name, options)


def utility(name: str, **options: Any) -> Utility:
    """The utility of that name.

    >>> utility("topk-drift", k=4)
    TopKDrift(k=4, sign=1)
    """
    return _build("utility", UTILITIES, name, options)


def _build(kind: str, registry: Mapping[str, type[_T]], name: str, options: Mapping[str, Any]) -> _T:
    if name not in registry:
        raise errors.unknown(kind, name, registry)
    signature = inspect.signature(registry[name])
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "no options"
        raise errors.BadConfig(f"{kind} {name!r}: {error}. It takes {takes}") from error
    return registry[name](**options)
