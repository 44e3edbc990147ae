"""Published: what requests are answered from, swapped by one reference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wise_atta.model.layout import Version


@dataclass(frozen=True, eq=False)
class Published:
    """One moment of a set of weights: the values of its tensors, and its moving statistics, if any."""

    version: Version
    running: Tensor | None = None
