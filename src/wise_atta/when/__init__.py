"""When to ask? A utility scores the batch, a policy decides on the score, an account keeps the policy honest."""

from __future__ import annotations

from typing import Any

from wise_atta.part import make
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


def policy(name: str, **options: Any) -> Policy:
    """The policy of that name.

    >>> policy("uniform", ratio=0.5)
    Uniform(ratio=0.5, total=None, per='batch')
    """
    return make("policy", POLICIES, name, options)


def utility(name: str, **options: Any) -> Utility:
    """The utility of that name.

    >>> utility("topk-drift", k=4)
    TopKDrift(k=4, sign=1)
    """
    return make("utility", UTILITIES, name, options)
