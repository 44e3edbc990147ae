"""What does `tent` compute? One step a batch on the mean entropy of the batch.

Readings
--------
- L = (1/n) Σᵢ H(pᵢ) over all n; the scored logits are those of the same forward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from . import nets
from .plain import (
    Step,
    entropies,
    gradients,
    mean,
    norm_tensors,
    optimizer_of,
    snapshot,
    use_batch_statistics,
)


def run(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    optimizer: str = "sgd",
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> list[Step]:
    use_batch_statistics(net)
    adapted = norm_tensors(net)
    rule = optimizer_of(optimizer, lr, momentum, nesterov, beta1, beta2, eps)
    steps = []
    for x in batches:
        logits = net(x)
        loss = mean(entropies(logits))
        rule.step(adapted, gradients(loss, adapted))
        steps.append(Step(logits.detach(), snapshot(net), losses={"entropy": loss.item()}))
    return steps


# Which scenarios show a constant that the first does not.
SHOWN_BY: dict[str, tuple[str, ...]] = {"beta1": ("adam",), "beta2": ("adam",), "eps": ("adam",)}


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("defaults", {"net": nets.cnn(), "batches": nets.batches()}),
        ("vit", {"net": nets.vit(), "batches": nets.batches()}),
        ("adam", {"net": nets.cnn(), "batches": nets.batches(), "optimizer": "adam", "lr": 1e-3, "eps": 1e-3}),
    ]
