"""Any network seen as features and a head, with few tensors that adapt and all others shared."""

from wise_atta.model.layout import Gradients, Layout, Spec, Version, wide
from wise_atta.model.network import Forward, Network, Work
from wise_atta.model.statistics import (
    Mixture as _Mixture,  # modules that 0.1 exported and pickled name them here
    Samples as _Samples,
    Statistics,
    StatisticsMode,
)
from wise_atta.model.weights import Classifier, Published, Weights

__all__ = ["Classifier", "Forward", "Gradients", "Layout", "Network", "Published", "Spec", "Statistics"]
__all__ += ["StatisticsMode", "Version", "Weights", "Work", "_Mixture", "_Samples", "wide"]
