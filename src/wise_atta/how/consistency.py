"""How far apart are two predictions of the same samples? Cross-entropies between logits, one number a sample."""

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


def symmetric_cross_entropy(a: Tensor, b: Tensor) -> Tensor:
    """Half of the cross-entropy each way."""
    return 0.5 * cross_entropy(a, b) + 0.5 * cross_entropy(b, a)
