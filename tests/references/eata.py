"""What does `eata` compute? eta plus a penalty that holds what mattered for the source data near its source value.

Readings
--------
- Fisher F = (1/B) Σ_b (∂/∂θ mean CE(z, argmax z) on source batch b)², at the source weights, under the statistics
  of batch b.
- L = eta's loss + weight·Σ F·(θ − θ_source)², summed over all adapted numbers, weight not halved.
- No sample kept: no step, so no penalty step either.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .eta import keep, next_mean, weighted_entropy
from .plain import (
    Step,
    Tensors,
    cross_entropy,
    gradients,
    mean,
    norm_tensors,
    optimizer_of,
    snapshot,
    use_batch_statistics,
)


def fisher_of(net: nn.Module, source: list[Tensor], adapted: Tensors) -> Tensors:
    total = {name: torch.zeros_like(p) for name, p in adapted.items()}
    for x in source:
        logits = net(x)
        loss = mean(cross_entropy(z, int(z.argmax())) for z in logits)
        for name, g in gradients(loss, adapted).items():
            total[name] += g * g
    return {name: t / len(source) for name, t in total.items()}


def run(
    net: nn.Module,
    batches: list[Tensor],
    *,
    source: list[Tensor],
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    fraction: float = 0.4,
    redundancy: float = 0.05,
    average: float = 0.9,
    penalty: float = 2000.0,
    optimizer: str = "sgd",
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> list[Step]:
    """`source` holds the batches of source pictures that the Fisher information is taken from."""
    use_batch_statistics(net)
    adapted = norm_tensors(net)
    fisher = fisher_of(net, source, adapted)
    start = {name: p.detach().clone() for name, p in adapted.items()}
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
            pull = torch.zeros((), dtype=torch.float64)
            for name, p in adapted.items():
                pull = pull + (fisher[name] * (p - start[name]) ** 2).sum()
            rule.step(adapted, gradients(loss + penalty * pull, adapted))
            losses |= {"entropy": loss.item(), "penalty": penalty * pull.item()}
        steps.append(Step(logits.detach(), snapshot(net), losses=losses))
    return steps


# Which scenarios show a constant that the first does not.
SHOWN_BY: dict[str, tuple[str, ...]] = {"beta1": ("adam",), "beta2": ("adam",), "eps": ("adam",)}


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    source = nets.batches(seed=1000, count=3, n=16, shift=0.0)
    ten = {"net": nets.cnn(), "batches": nets.batches(seed=1), "source": source, "redundancy": 0.4}
    return [
        ("defaults", {"net": nets.cnn(classes=1000, scale=10.0), "batches": nets.batches(n=64), "source": source}),
        ("ten classes", ten),
        ("adam", {**ten, "optimizer": "adam", "lr": 1e-3, "eps": 1e-3, "penalty": 1.0}),
    ]
