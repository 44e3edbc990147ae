"""What was it lately? A moving average of a small quantity: a mean prediction, a loss, a weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wise_atta import errors


class Average:
    """v ← μ·v + (1 − μ)·x. The first x is taken as it is, unless `value` was set before.

    Parameters
    ----------
    momentum
        μ.

    Examples
    --------
    >>> import torch
    >>> loss = Average(0.9)
    >>> for x in (1.0, 2.0):
    ...     loss.follow(torch.tensor(x))
    >>> round(loss.value.item(), 6)
    1.1
    """

    def __init__(self, momentum: float = 0.9) -> None:
        if not 0 <= momentum <= 1:
            raise errors.BadConfig(f"the momentum of a moving average must be in [0, 1], not {momentum}")
        self.momentum = momentum
        self.value: Tensor | None = None

    def follow(self, x: Tensor) -> None:
        """Move towards a new value."""
        x = x.detach()
        self.value = x if self.value is None else self.momentum * self.value.to(x) + (1 - self.momentum) * x

    def reset(self) -> None:
        self.value = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": None if self.value is None else self.value.cpu().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = None if state["value"] is None else state["value"].clone()

    def __repr__(self) -> str:
        return f"Average(momentum={self.momentum})"
