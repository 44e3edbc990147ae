"""EATA: ETA, and a penalty that holds near its source value what mattered for source data (Niu et al., ICML 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from wise_atta.reference.common import Optimizers, descend, norm_tensors, use_batch_statistics
from wise_atta.reference.eta import SGD, next_mean, sure_and_new, weighted_entropy
from wise_atta.reference.toy import pictures, toy


def fisher_information(model: nn.Module, source: list[Tensor], adapted: list[nn.Parameter]) -> list[Tensor]:
    """F = (1/B) Σ_b g_b², g_b the gradient of source batch b's mean cross-entropy on the classes that are predicted."""
    total = [torch.zeros_like(p) for p in adapted]
    for x in source:
        logits = model(x)
        loss = functional.cross_entropy(logits, logits.argmax(dim=1))
        total = [f + g**2 for f, g in zip(total, torch.autograd.grad(loss, adapted), strict=True)]
    return [f / len(source) for f in total]


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    *,
    source: list[Tensor],
    optimizer: Optimizers = SGD,
    fraction: float = 0.4,
    redundancy: float = 0.05,
    average: float = 0.9,
    penalty: float = 2000.0,
) -> Iterator[Tensor]:
    """Yields the logits of each batch, then minimises ETA's loss + β·Σ F·(θ − θ₀)² over the normalisation tensors.

    `source` holds the batches of (unlabelled) source pictures, 2,000 in all, that F is taken from, at the source
    weights and under each batch's statistics. β is `penalty`; where ETA takes no step, the penalty takes none either.
    """
    use_batch_statistics(model)
    adapted = norm_tensors(model)
    fisher = fisher_information(model, source, adapted)
    start = [p.detach().clone() for p in adapted]
    steps = optimizer(adapted)
    mean_p: Tensor | None = None
    for x in stream:
        logits = model(x)
        yield logits.detach()
        e0 = fraction * math.log(logits.shape[1])
        kept = sure_and_new(logits.detach(), mean_p, e0, redundancy)
        mean_p = next_mean(logits, kept, mean_p, average)
        if kept.any():
            away = sum((f * (p - p0) ** 2).sum() for f, p, p0 in zip(fisher, adapted, start, strict=True))
            descend(steps, weighted_entropy(logits[kept], e0) + penalty * away)


def example() -> str:
    """On the toy stream.

    >>> example()
    '13 % wrong, 0 labels'
    """
    made = toy()
    source = [pictures(-t, 100)[0] for t in range(1, 21)]
    optimizer = partial(SGD, lr=0.01)
    return made.error(run(made.model, made.stream, source=source, optimizer=optimizer, redundancy=0.4, penalty=1.0))


if __name__ == "__main__":
    print(example())
