"""What does `eta` compute? One step a batch on the weighted entropy of samples that are sure and not redundant.

Readings
--------
- "First batch: no second filter" holds until p̄ exists, that is, until a first sample was kept; then p̄ is its
  batch mean.
- p̄ ← 0.9·p̄ + 0.1·(mean of p over the samples that passed both filters). The filter uses p̄ before this batch.
- L = Σ_kept exp(E₀ − H)·H / |kept|.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .plain import (
    Step,
    cosine,
    entropies,
    entropy,
    gradients,
    mean,
    norm_tensors,
    optimizer_of,
    snapshot,
    use_batch_statistics,
)


def keep(logits: Tensor, mean_p: Tensor | None, e0: float, redundancy: float) -> list[int]:
    """The samples with H < E₀ and, once there is a p̄, |cos(p̄, p)| < ε."""
    kept = []
    for i, z in enumerate(logits.detach()):
        sure = float(entropy(z)) < e0
        new = mean_p is None or abs(cosine(mean_p, z.softmax(dim=0))) < redundancy
        if sure and new:
            kept.append(i)
    return kept


def next_mean(logits: Tensor, kept: list[int], mean_p: Tensor | None, average: float) -> Tensor | None:
    if not kept:
        return mean_p
    now = mean(logits.detach()[i].softmax(dim=0) for i in kept)
    return now if mean_p is None else average * mean_p + (1 - average) * now


def weighted_entropy(logits: Tensor, kept: list[int], e0: float) -> Tensor:
    """Mean over the kept of exp(E₀ − H)·H, no gradient through the weight."""
    hs = entropies(logits)
    return mean(torch.exp(e0 - hs[i].detach()) * hs[i] for i in kept)


def run(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    fraction: float = 0.4,
    redundancy: float = 0.05,
    average: float = 0.9,
    optimizer: str = "sgd",
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> list[Step]:
    use_batch_statistics(net)
    adapted = norm_tensors(net)
    rule = optimizer_of(optimizer, lr, momentum, nesterov, beta1, beta2, eps)
    mean_p = None
    steps = []
    for x in batches:
        logits = net(x)
        e0 = fraction * math.log(logits.shape[1])
        kept = keep(logits, mean_p, e0, redundancy)
        mean_p = next_mean(logits, kept, mean_p, average)
        losses = {"kept": float(len(kept))}
        if kept:
            loss = weighted_entropy(logits, kept, e0)
            rule.step(adapted, gradients(loss, adapted))
            losses["entropy"] = loss.item()
        steps.append(Step(logits.detach(), snapshot(net), losses=losses))
    return steps


# Which scenarios show a constant that the first does not.
SHOWN_BY: dict[str, tuple[str, ...]] = {"beta1": ("adam",), "beta2": ("adam",), "eps": ("adam",)}


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    ten = {"net": nets.cnn(), "batches": nets.batches(seed=1), "redundancy": 0.4}
    return [
        ("defaults", {"net": nets.cnn(classes=1000, scale=10.0), "batches": nets.batches(n=64)}),
        ("ten classes", ten),
        ("vit", {"net": nets.vit(seed=19), "batches": nets.batches(seed=19), "redundancy": 0.4}),
        ("adam", {**ten, "optimizer": "adam", "lr": 1e-3, "eps": 1e-3}),
    ]
