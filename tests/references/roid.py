"""What does `roid` compute? A weighted likelihood-ratio loss, agreement with one view, a pull to the source, a prior.

Readings
--------
- d and c are scaled over the batch; d below its batch mean (strictly) is left out; p̄ before this batch is used for
  d.
- Every pⱼ is clipped from above at 0.99 before the ratio; no gradient flows through a clipped one or through the
  weights.
- Agreement: −½Σ p·log q − ½Σ q·log p, p of the sample in the first forward, q of its view; the view's forward sees
  the kept samples only, so its batch statistics are theirs.
- L = (Σ_kept w·slr + Σ_kept w·agreement)/n. After the step θ ← 0.99·θ + 0.01·θ_source; momentum is untouched.
- The prior uses q and max q of the same forward; C is the number of logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .cotta import disagreement
from .plain import (
    Step,
    cosine,
    entropy,
    follow,
    gradients,
    mean,
    norm_tensors,
    optimizer_of,
    scaled,
    snapshot,
    use_batch_statistics,
)


def likelihood_ratio(z: Tensor, clip: float, floor: float) -> Tensor:
    p = z.softmax(dim=0).clamp(max=clip)
    return -(p * torch.log(p / (1 - p) + floor)).sum()


def run(
    net: nn.Module,
    batches: list[Tensor],
    *,
    view: Callable[[int, Tensor], Tensor],
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    clip: float = 0.99,
    floor: float = 1e-5,
    temperature: float = 1 / 3,
    average: float = 0.9,
    pull: float = 0.01,
    back: float = 0.5,
    optimizer: str = "sgd",
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> list[Step]:
    """`view(batch, x)` is one augmented view of the kept samples x."""
    use_batch_statistics(net)
    adapted = norm_tensors(net)
    source = {name: p.detach().clone() for name, p in adapted.items()}
    rule = optimizer_of(optimizer, lr, momentum, nesterov, beta1, beta2, eps)
    mean_p: Tensor | None = None
    steps = []
    for number, x in enumerate(batches, start=1):
        logits = net(x)
        n, classes = logits.shape
        p = [z.detach().softmax(dim=0) for z in logits]
        if mean_p is None:
            mean_p = torch.full((classes,), 1 / classes, dtype=torch.float64)
        d = scaled([1 - cosine(mean_p, row) for row in p])
        c = scaled([-float(entropy(z.detach())) for z in logits])
        kept = [i for i in range(n) if d[i] >= sum(d) / n]
        weights = {i: math.exp(d[i] * c[i] / temperature) for i in kept}
        q = mean(p)
        mean_p = average * mean_p + (1 - average) * q

        seen = net(view(number, x[kept]))
        ratio = mean(weights[i] * likelihood_ratio(logits[i], clip, floor) for i in kept) * len(kept) / n
        agreement = (
            mean(weights[i] * disagreement(z, logits[i], back) for z, i in zip(seen, kept, strict=True)) * len(kept) / n
        )
        rule.step(adapted, gradients(ratio + agreement, adapted))
        follow(adapted, source, 1 - pull)

        gamma = max(1 / n, 1 / classes) / float(q.max())
        prior = (q + gamma) / (1 + gamma * classes)
        losses = {"ratio": ratio.item(), "agreement": agreement.item(), "kept": float(len(kept))}
        steps.append(Step(logits.detach() * prior, snapshot(net), losses=losses))
    return steps


# Which scenarios show a constant that the first does not.
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "floor": ("large steps",),
    "beta1": ("adam",),
    "beta2": ("adam",),
    "eps": ("adam",),
}


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    augment = nets.view()
    common = {"net": nets.cnn(), "batches": nets.batches(), "view": lambda number, x: augment(number, 1, x)}
    return [
        ("defaults", common),
        ("vit", {**common, "net": nets.vit()}),
        ("large steps", {**common, "lr": 2.5e-3}),
        # Fewer samples than classes: the prior is smoothed by 1/n.
        ("few samples", {**common, "batches": nets.batches(n=6)}),
        ("adam", {**common, "optimizer": "adam", "lr": 1e-3, "eps": 1e-3}),
    ]
