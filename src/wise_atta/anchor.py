"""Anchor: an exponential moving average of the adapted tensors, where the model was a while ago."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wise_atta import errors
from wise_atta.model import Layout, Version, wide


class Anchor:
    """θ̄ ← μ·θ̄ + (1 − μ)·θ (eq. 3 and 4), one vector; every frozen weight is the live model's own.

    Parameters
    ----------
    momentum
        μ. The paper uses 0.9.
    """

    _flat: Tensor
    _layout: Layout
    _dtype: torch.dtype

    def __init__(self, momentum: float = 0.9) -> None:
        if not 0 <= momentum <= 1:
            raise errors.BadConfig(f"the anchor's momentum must be in [0, 1], not {momentum}")
        self.momentum = momentum

    def start(self, version: Version) -> None:
        """Begin at a version's values."""
        self._layout, self._dtype = version.layout, version.flat.dtype
        self._flat = wide(version.flat.detach().clone())

    def follow(self, version: Version) -> None:
        """Move towards a version's values."""
        # A new vector, not a write to the old one: whoever still looks at an earlier batch sees that batch's anchor.
        self._flat = self._flat.lerp(version.flat.to(self._flat), 1 - self.momentum)

    @property
    def version(self) -> Version:
        """The anchor's values, to run a forward with."""
        return self.now()()

    def now(self) -> Callable[[], Version]:
        """The values of this moment, to be taken up later, if at all."""
        flat, layout, dtype = self._flat, self._layout, self._dtype
        return lambda: Version(flat.to(dtype), layout, grad=False)

    def state_dict(self) -> dict[str, Any]:
        return {"flat": self._flat.detach().cpu().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        flat = state["flat"]
        if flat.shape != self._flat.shape:
            raise errors.StateMismatch(f"the anchor has {self._flat.numel()} values, the state {flat.numel()}")
        self._flat = flat.to(self._flat, copy=True)

    def __repr__(self) -> str:
        return f"Anchor(momentum={self.momentum})"
