"""ETA: one step a batch on the weighted entropy of samples that are sure and not redundant (Niu et al., ICML 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from wise_atta.reference.common import Optimizers, descend, entropy, norm_tensors, use_batch_statistics
from wise_atta.reference.toy import toy

# The public configuration for ImageNet-C. For CIFAR-10-C it is Adam at 1e-3, and ε = 0.4.
SGD = partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9, nesterov=True)


def sure_and_new(logits: Tensor, mean_p: Tensor | None, e0: float, redundancy: float) -> Tensor:
    """S = {i : Hᵢ < E₀ and |cos(p̄, pᵢ)| < ε}, as a mask; without a p̄ there is no second filter."""
    kept = entropy(logits) < e0
    if mean_p is not None:
        p = logits.softmax(dim=1)
        cosine = (p @ mean_p) / (p.norm(dim=1) * mean_p.norm())
        kept = kept & (cosine.abs() < redundancy)
    return kept


def next_mean(logits: Tensor, kept: Tensor, mean_p: Tensor | None, average: float) -> Tensor | None:
    """p̄ ← 0.9·p̄ + 0.1·(mean of p over S). The first S starts it; an empty one leaves it."""
    if not kept.any():
        return mean_p
    now = logits[kept].detach().softmax(dim=1).mean(dim=0)
    return now if mean_p is None else average * mean_p + (1 - average) * now


def weighted_entropy(logits: Tensor, e0: float) -> Tensor:
    """Mean of exp(E₀ − H)·H; the weight is a constant of the loss."""
    h = entropy(logits)
    return (torch.exp(e0 - h.detach()) * h).mean()


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    *,
    optimizer: Optimizers = SGD,
    fraction: float = 0.4,
    redundancy: float = 0.05,
    average: float = 0.9,
) -> Iterator[Tensor]:
    """Yields the logits of each batch, then minimises the weighted entropy of S over the normalisation tensors.

    E₀ = fraction·ln C; ε is `redundancy`; p̄ follows with `average`.
    """
    use_batch_statistics(model)
    steps = optimizer(norm_tensors(model))
    mean_p: Tensor | None = None
    for x in stream:
        logits = model(x)
        yield logits.detach()
        e0 = fraction * math.log(logits.shape[1])
        kept = sure_and_new(logits.detach(), mean_p, e0, redundancy)
        mean_p = next_mean(logits, kept, mean_p, average)
        if kept.any():
            descend(steps, weighted_entropy(logits[kept], e0))


def example() -> str:
    """On the toy stream.

    >>> example()
    '13 % wrong, 0 labels'
    """
    made = toy()
    return made.error(run(made.model, made.stream, optimizer=partial(SGD, lr=0.01), redundancy=0.4))


if __name__ == "__main__":
    print(example())
