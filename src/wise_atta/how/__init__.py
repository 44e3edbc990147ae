"""How does the model learn? Losses and update rules, and which tensors they touch."""

from wise_atta.how.descend import Descend
from wise_atta.how.labels import Labels, Late
from wise_atta.how.objective import Entropy, Objective
from wise_atta.how.optimizer import Optimizer
from wise_atta.how.two_step import PublishedTwoStep, TwoStep
from wise_atta.how.update import NoUpdate, Update

__all__ = [
    "Descend",
    "Entropy",
    "Labels",
    "Late",
    "NoUpdate",
    "Objective",
    "Optimizer",
    "PublishedTwoStep",
    "TwoStep",
    "Update",
]
