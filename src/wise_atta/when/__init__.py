"""When to ask: utilities score a batch, policies decide on the score, an account keeps them honest."""

from __future__ import annotations

from typing import Any

from wise_atta.part import make
from wise_atta.when.account import Account as Account
from wise_atta.when.paced import BudgetPaced as BudgetPaced
from wise_atta.when.policies import (
    Always as Always,
    Decision as Decision,
    Exhaust as Exhaust,
    Never as Never,
    Policy as Policy,
    Random as Random,
    Uniform as Uniform,
    early as early,
)
from wise_atta.when.utilities import (
    Count as Count,
    LowKEntropy as LowKEntropy,
    MeanDrift as MeanDrift,
    MeanEntropy as MeanEntropy,
    TopKDrift as TopKDrift,
    TopKEntropy as TopKEntropy,
    Utility as Utility,
)

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
