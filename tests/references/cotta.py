"""What does `cotta` compute? A student follows a slow teacher's prediction over views, and now and then its source.

Readings
--------
- Student, teacher and source copy all use the statistics of the batch (or view) that they are given.
- Confidence = mean over the batch of max p under the source copy; strictly below the threshold: target = mean of
  the teacher's logits over the views. The target is constant in the loss; both sides of the symmetric form use
  softmax(target).
- L = mean over the batch of −(1−b)Σ q·log p − bΣ p·log q (q target, p student), b = ½ (ImageNet) or 0 (CIFAR-10).
- All weights: every parameter. Teacher: θ' ← 0.999·θ' + 0.001·θ with θ after the step and before the restore.
- Restore: number j of tensor `name` returns when `uniforms(batch, name, shape)`ⱼ < probability; momentum is kept.
- SGD with Nesterov (the description names cotta in neither list).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .plain import (
    Step,
    follow,
    gradients,
    mean,
    optimizer_of,
    snapshot,
    use_batch_statistics,
)


def disagreement(student: Tensor, target: Tensor, back: float) -> Tensor:
    """Cross-entropy of one row of logits against another's softmax, and with the share `back` the other way round."""
    one_way = -(target.softmax(dim=0) * student.log_softmax(dim=0)).sum()
    other_way = -(student.softmax(dim=0) * target.log_softmax(dim=0)).sum()
    return (1 - back) * one_way + back * other_way


def run(
    net: nn.Module,
    batches: list[Tensor],
    *,
    views: Callable[[int, int, Tensor], Tensor],
    uniforms: Callable[[int, str, torch.Size], Tensor],
    lr: float = 0.01,
    momentum: float = 0.9,
    nesterov: bool = True,
    count: int = 32,
    threshold: float = 0.1,
    teacher: float = 0.999,
    restore: float = 0.001,
    back: float = 0.5,
    optimizer: str = "sgd",
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> list[Step]:
    """`views(batch, i, x)` is the i-th view, i from 0; `uniforms(batch, name, shape)` decides what is restored."""
    use_batch_statistics(net)
    source, slow = deepcopy(net), deepcopy(net)
    student = dict(net.named_parameters())
    slow_tensors = dict(slow.named_parameters())
    rule = optimizer_of(optimizer, lr, momentum, nesterov, beta1, beta2, eps)
    steps = []
    for number, x in enumerate(batches, start=1):
        logits = net(x)
        with torch.no_grad():
            confidence = float(mean(z.softmax(dim=0).max() for z in source(x)))
            unsure = confidence < threshold
            target = mean(slow(views(number, i, x)) for i in range(count)) if unsure else slow(x)
        loss = mean(disagreement(z, q, back) for z, q in zip(logits, target, strict=True))
        rule.step(student, gradients(loss, student))
        follow(slow_tensors, student, teacher)
        with torch.no_grad():
            for name, p in student.items():
                returned = uniforms(number, name, p.shape) < restore
                p.copy_(torch.where(returned, source.get_parameter(name), p))
        steps.append(
            Step(
                target,
                snapshot(net),
                losses={"consistency": loss.item(), "confidence": confidence},
                extra={f"teacher.{name}": p for name, p in snapshot(slow).items()},
            )
        )
    return steps


# Which scenarios show a constant that the first does not.
SHOWN_BY: dict[str, tuple[str, ...]] = dict.fromkeys(("beta1", "beta2", "eps"), ("ten classes, adam",))


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    random = {"views": nets.view(), "uniforms": nets.uniforms()}
    cifar = {"threshold": 0.92, "restore": 0.01, "back": 0.0, "optimizer": "adam", "lr": 1e-3, "eps": 1e-3}
    # Both begin on a batch that needs views: a student that is its own teacher has no gradient but rounding.
    return [
        (
            "defaults",
            {"net": nets.cnn(classes=1000, scale=2.7), "batches": nets.batches(seed=9, n=12, size=4), **random},
        ),
        (
            "ten classes, adam",
            {"net": nets.cnn(scale=30.0), "batches": nets.batches(seed=2, n=12, size=4), **random, **cifar},
        ),
        ("vit", {"net": nets.vit(), "batches": nets.batches(n=4), **random, "threshold": 0.92, "count": 8}),
    ]
