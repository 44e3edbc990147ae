"""Any network seen as features and a head, with few tensors that adapt and all others shared."""

from wise_atta.model.batch_norms import (
    Mixture as _Mixture,  # modules that 0.1 exported and pickled name them here
    Samples as _Samples,
)
from wise_atta.model.classifier import Classifier
from wise_atta.model.forward import Forward, Work
from wise_atta.model.layout import Gradients, Layout, Version, wide
from wise_atta.model.network import Network
from wise_atta.model.published import Published
from wise_atta.model.selection import Spec
from wise_atta.model.statistics import Statistics, StatisticsMode
from wise_atta.model.weights import Weights

__all__ = [
    "Classifier",
    "Forward",
    "Gradients",
    "Layout",
    "Network",
    "Published",
    "Spec",
    "Statistics",
    "StatisticsMode",
    "Version",
    "Weights",
    "Work",
    "_Mixture",
    "_Samples",
    "wide",
]
