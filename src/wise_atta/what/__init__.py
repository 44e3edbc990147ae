"""What is asked? Which samples of a selected batch a person is shown."""

from __future__ import annotations

import inspect
from typing import Any

from wise_atta import errors
from wise_atta.what.band import Band
from wise_atta.what.clusters import Clusters
from wise_atta.what.k_margin import KMargin
from wise_atta.what.selector import Drift, Margin, MaxEntropy, Perturbation, RandomSample, Selector

__all__ = [
    "Band",
    "Clusters",
    "Drift",
    "KMargin",
    "Margin",
    "MaxEntropy",
    "Perturbation",
    "RandomSample",
    "Selector",
    "selector",
]

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
    Drift(first=0, balance=True, seed=0)
    """
    if name not in SELECTORS:
        raise errors.unknown("selector", name, SELECTORS)
    takes = inspect.signature(SELECTORS[name])
    try:
        takes.bind(**options)
    except TypeError as error:
        raise errors.BadConfig(f"selector {name!r}: {error}. It takes: {', '.join(takes.parameters)}") from None
    return SELECTORS[name](**options)
