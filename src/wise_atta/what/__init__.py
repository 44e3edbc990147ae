"""What to ask: which samples of a selected batch a person is shown."""

from __future__ import annotations

from typing import Any

from wise_atta.part import make
from wise_atta.what.band import Band as Band
from wise_atta.what.clusters import Clusters as Clusters
from wise_atta.what.k_margin import KMargin as KMargin
from wise_atta.what.selector import (
    Drift as Drift,
    Margin as Margin,
    MaxEntropy as MaxEntropy,
    Perturbation as Perturbation,
    RandomSample as RandomSample,
    Selector as Selector,
)

SELECTORS: dict[str, type[Selector]] = {
    "drift": Drift,
    "perturbation": Perturbation,
    "max-entropy": MaxEntropy,
    "margin": Margin,
    "random": RandomSample,
    "k-margin": KMargin,
    "clusters": Clusters,
    "band": Band,
}


def selector(name: str, **options: Any) -> Selector:
    """A selector by its short name.

    >>> selector("drift", balance=True)
    Drift(balance=True, seed=0, sigma=0.01, first=0)
    """
    return make("selector", SELECTORS, name, options)
