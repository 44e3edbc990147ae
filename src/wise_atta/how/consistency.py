"""Cross-entropies between two predictions of the same samples, one number a sample."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """−Σ softmax(target)·log softmax(logits). Gradients flow through both.

    >>> import torch
    >>> z = torch.tensor([[0.0, 0.0]])
    >>> round(cross_entropy(z, z).item(), 4)
    0.6931
    """
    return -(target.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)


def symmetric_cross_entropy(a: Tensor, b: Tensor, back: float = 0.5) -> Tensor:
    """Half of the cross-entropy each way, or another share of the way `back`."""
    return (1 - back) * cross_entropy(a, b) + back * cross_entropy(b, a)
