"""Entropy, margin, drift and what else can be read off a prediction: pure functions of tensors.

`logits` and `probs` are [n, C]; results are [n] unless said otherwise. All are differentiable and device-agnostic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """H(softmax(z)) in nats, computed from logits so that confident rows do not produce 0·log 0.

    >>> math.isclose(entropy(torch.zeros(1, 4)).item(), math.log(4), rel_tol=1e-6)
    True
    """
    log_p = logits.log_softmax(dim=1)
    return mean_surprise(log_p.exp(), log_p)


def mean_surprise(p: Tensor, log_p: Tensor) -> Tensor:
    """H = −Σ p·log p."""
    return -(p * log_p).sum(dim=1)


def entropy_threshold(classes: int, fraction: float = 0.4) -> float:
    """E₀ = 0.4·ln C, the threshold between confident and unsure (τ_ent in the paper)."""
    return fraction * math.log(classes)


def margin(logits: Tensor) -> Tensor:
    """p₁ − p₂, the lead of the best class over the second."""
    top = logits.softmax(dim=1).topk(2, dim=1).values
    return top[:, 0] - top[:, 1]


def drift(logits: Tensor, anchor_logits: Tensor) -> Tensor:
    """‖p − p̄‖₂ between the current model and the anchor (section 3.2)."""
    distance: Tensor = torch.linalg.vector_norm(logits.softmax(dim=1) - anchor_logits.softmax(dim=1), dim=1)
    return distance


def all_finite(values: Tensor) -> Tensor:
    """Whether there is neither NaN nor Inf among the values, in one pass over them.

    >>> all_finite(torch.tensor([1.0, torch.nan])), all_finite(torch.tensor([1.0, 3e38, 3e38]))
    (tensor(False), tensor(True))
    """
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    if values.device.type == "cpu":
        # A norm over a whole tensor is not vectorised there, and takes many times as long.
        low, high = torch.aminmax(values)  # NaN if there is one
        return (low > -math.inf) & (high < math.inf)
    largest: Tensor = torch.linalg.vector_norm(values, ord=math.inf)  # NaN if there is one
    return largest < math.inf


def cosine_to(mean_probs: Tensor, probs: Tensor) -> Tensor:
    """cos(p̄, p) of every row with one mean prediction [C]."""
    return torch.nn.functional.cosine_similarity(mean_probs.unsqueeze(0), probs, dim=1)


def confident(entropy: Tensor, classes: int, below: float = 0.4) -> Tensor:
    """True where H < E₀ = below·ln C.

    >>> confident(torch.tensor([0.0, 0.9, 1.0]), classes=10).tolist()
    [True, True, False]
    """
    return entropy.detach() < entropy_threshold(classes, below)


def trust(entropy: Tensor, classes: int, below: float = 0.4) -> Tensor:
    """exp(E₀ − H) with E₀ = below·ln C: the surer, the more a sample counts. A constant to autograd.

    >>> trust(torch.tensor([0.0, entropy_threshold(10)]), classes=10)
    tensor([2.5119, 1.0000])
    """
    return (entropy_threshold(classes, below) - entropy.detach()).exp()


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """−Σ softmax(target)·log softmax(logits). Gradients flow through both.

    >>> z = torch.tensor([[0.0, 0.0]])
    >>> round(cross_entropy(z, z).item(), 4)
    0.6931
    """
    return -(target.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)


def symmetric_cross_entropy(a: Tensor, b: Tensor, back: float = 0.5) -> Tensor:
    """Half of the cross-entropy each way, or another share of the way `back`."""
    return (1 - back) * cross_entropy(a, b) + back * cross_entropy(b, a)
