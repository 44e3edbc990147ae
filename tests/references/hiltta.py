"""What does `hiltta` compute? Labels choose among candidate learning rates for tent, then train all weights a little.

Readings
--------
- The base loss is that of a forward of the unlabelled samples alone, under their own batch statistics (published);
  all other forwards see the whole batch, and losses take their rows of it. The source model's p also comes from
  batch statistics.
- K-margin: vᵢ = (1 − (p₁ − p₂))·fᵢ; the origin counts as chosen and stays so; ask repeatedly for the sample
  farthest from its nearest chosen point (lower index at a tie).
- Base loss: mean H over the samples not labelled. Candidate j: θⱼ = θ − lrⱼ·d with d from the same gradient and
  momentum; the momentum after the batch is that one step's, whichever j is kept.
- MSE = mean over unlabelled samples and classes of (pⱼ − p_source)², CE = mean over the labelled, both at θⱼ; each
  scaled to [0, 1] over candidates (all equal: 0), then added; score ← 0.5·score + 0.5·new (first: new). Least score
  wins, first at a tie.
- The supervised step: CE at a fresh forward of the kept θⱼ, Adam on every parameter, its moments carried from batch
  to batch.
- No label in a batch: scores stay, the candidate with the least score adapts; before any label the first one (as
  published). If all samples of a batch are labelled there is no base step, and scores stay.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .plain import (
    Adam,
    Sgd,
    Step,
    Truth,
    assign,
    cross_entropy,
    entropies,
    gradients,
    look,
    mean,
    norm_tensors,
    scaled,
    snapshot,
    use_batch_statistics,
)

CANDIDATES = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3)


def k_margin(features: Tensor, logits: Tensor, granted: int) -> list[int]:
    points = []
    for f, z in zip(features.detach(), logits.detach(), strict=True):
        best, second = z.softmax(dim=0).sort(descending=True).values[:2]
        points.append((1 - (best - second)) * f)
    chosen = [torch.zeros_like(points[0])]
    asked: list[int] = []
    while len(asked) < min(granted, len(points)):
        gaps = [min(float((v - c).norm()) for c in chosen) for v in points]
        pick = max((i for i in range(len(points)) if i not in asked), key=lambda i: (gaps[i], -i))
        asked.append(pick)
        chosen.append(points[pick])
    return asked


def run(
    net: nn.Module,
    batches: list[Tensor],
    *,
    head: str = "fc",
    labels: Truth,
    grants: list[int],
    candidates: tuple[float, ...] = CANDIDATES,
    momentum: float = 0.9,
    nesterov: bool = True,
    average: float = 0.5,
    supervised_lr: float = 1e-5,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> list[Step]:
    use_batch_statistics(net)
    source = deepcopy(net)
    norm = norm_tensors(net)
    everything = dict(net.named_parameters())
    base = Sgd(candidates[0], momentum, nesterov)
    adam = Adam(supervised_lr, beta1, beta2, eps)
    scores: list[float] | None = None
    steps = []
    for number, (x, granted) in enumerate(zip(batches, grants, strict=True), start=1):
        features, logits = look(net, x, head)
        asked = k_margin(features, logits, granted)
        rest = [i for i in range(len(x)) if i not in asked]
        answers = {i: labels(number, i) for i in asked}
        losses = {}

        if rest:
            alone = net(x[rest]) if asked else logits
            grads = gradients(mean(entropies(alone)), norm)
            start = {name: p.detach().clone() for name, p in norm.items()}
            before = base.buffers
            if asked:
                with torch.no_grad():
                    then = source(x)
                mse, ce = [], []
                for rate in candidates:
                    assign(norm, start)
                    base.buffers = dict(before)
                    base.step(norm, grads, rate)
                    with torch.no_grad():
                        now = net(x)
                    mse.append(
                        float(mean((now[i].softmax(dim=0) - then[i].softmax(dim=0)).pow(2).mean() for i in rest))
                    )
                    ce.append(float(mean(cross_entropy(now[i], y) for i, y in answers.items())))
                new = [a + b for a, b in zip(scaled(mse), scaled(ce), strict=True)]
                scores = (
                    new
                    if scores is None
                    else [average * s + (1 - average) * v for s, v in zip(scores, new, strict=True)]
                )
            rate = candidates[0 if scores is None else scores.index(min(scores))]
            assign(norm, start)
            base.buffers = dict(before)
            base.step(norm, grads, rate)
            losses["rate"] = rate
        if asked:
            again = net(x)
            loss = mean(cross_entropy(again[i], y) for i, y in answers.items())
            adam.step(everything, gradients(loss, everything))
            losses["supervised"] = loss.item()
        extra = {"scores": torch.tensor(scores or [], dtype=torch.float64)}
        steps.append(Step(logits.detach(), snapshot(net), asked, losses, extra))
    return steps


# Which scenarios show a constant that the first does not.
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "candidates": ("sharp", "sharper"),
    "average": ("sharp",),
    "eps": ("large eps",),
}


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    common = {"batches": nets.batches(), "labels": nets.truth(), "grants": [3] * 5}
    sharp = {**common, "labels": nets.truth(2)}
    return [
        ("defaults", {**common, "net": nets.cnn()}),
        ("vit", {**common, "net": nets.vit(), "head": "head"}),
        ("budgeted", {**common, "net": nets.cnn(), "grants": [0, 2, 0, 3, 0]}),
        # Between them these two keep each candidate once.
        ("sharp", {**sharp, "net": nets.cnn(scale=48.0), "batches": nets.batches(seed=131)}),
        ("sharper", {**sharp, "net": nets.cnn(scale=96.0), "batches": nets.batches(seed=65)}),
        ("large eps", {**common, "net": nets.cnn(), "eps": 1e-3}),
    ]
