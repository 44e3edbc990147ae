"""What does `simatta` compute? Clusters decide what to ask; all weights train on pseudo-labelled and queried anchors.

Readings
--------
- BatchNorm normalises by the source's running statistics throughout, and never moves them; its weights and biases
  train.
- Pseudo anchors P: samples with H < e_l under the source model, at most 100 a batch, least H first, class argmax of
  the source.
- Candidates: H ≥ e_h under the current model, before training; their features, and those of the queried anchors Q,
  come from the current model (Q's were recomputed after the last training, which is the same).
- Points: Q (weight w), then candidates (weight 1), in order. K = |Q| + min(granted, candidates). Centres start at
  points[`centres(batch, points, weights, K)`]; weighted Lloyd steps until no assignment changes (at most 300):
  nearest centre in Euclidean distance, lower index at a tie; a centre without points stays.
- A cluster without a point of Q is new, be it empty. Going through the new ones by size, largest first, lower index
  at a tie, each asks for the candidate closest to its centre among all that are not asked for yet, until
  min(granted, candidates) are.
- Distances within a factor 1 + 1e-9 are equal, and the lower index wins: two candidates are always equally far from
  their mean.
- New anchor: w = points in its cluster, at least 1. Old anchor: w ← w + (points in its cluster, those of Q
  included)/(points of Q in it), as published.
- Asked for nothing when there is no candidate or nothing is granted; then weights stay.
- The buffer holds |P| ≤ 300 and |Q| ≤ 300, the oldest leaving first. Age: batches, then order of arrival (P: least H
  first, Q: as asked). None: no cap.
- α = |Q|/(|P|+|Q|). A step draws 32 of each set, uniformly and with replacement: index ⌊u·|set|⌋, u =
  `uniforms(batch, step, "pseudo" | "queried", 32)`, steps from 0. CE means; an empty set has no term; both empty: no
  training. P and Q of this batch take part. SGD's momentum starts anew each batch.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .plain import (
    Sgd,
    Step,
    Truth,
    cross_entropy,
    entropies,
    gradients,
    look,
    mean,
    snapshot,
)


@dataclass
class AnchorPoint:
    """A remembered sample: its picture, its class, and how many samples it stands for."""

    x: Tensor
    label: int
    weight: float = 1.0


def least(values: list[float]) -> int:
    """Where the least value stands, the first of those equal up to rounding."""
    return next(i for i, v in enumerate(values) if v <= min(values) * (1 + 1e-9))


def k_means(points: list[Tensor], weights: list[float], first: list[int]) -> tuple[list[Tensor], list[int]]:
    """Weighted Lloyd steps: centres, and the cluster of each point."""
    centres = [points[i].clone() for i in first]
    clusters: list[int] = []
    for _ in range(300):
        nearest = [least([float((v - c).norm()) for c in centres]) for v in points]
        if nearest == clusters:
            break
        clusters = nearest
        for k in range(len(centres)):
            members = [i for i, c in enumerate(clusters) if c == k]
            if members:
                total = sum(weights[i] for i in members)
                centres[k] = torch.stack([weights[i] * points[i] for i in members]).sum(dim=0) / total
    return centres, clusters


def run(
    net: nn.Module,
    batches: list[Tensor],
    *,
    head: str = "fc",
    labels: Truth,
    grants: list[int],
    centres: Callable[[int, Tensor, Tensor, int], list[int]],
    uniforms: Callable[[int, int, str, int], Tensor],
    low: float = 0.1,
    high: float = 0.1,
    most: int = 100,
    training_steps: int = 10,
    size: int = 32,
    lr: float = 1e-4,
    momentum: float = 0.9,
    nesterov: bool = False,
    buffer: int | None = 300,
) -> list[Step]:
    net.eval()
    source = deepcopy(net)
    everything = dict(net.named_parameters())
    pseudo: list[AnchorPoint] = []
    queried: list[AnchorPoint] = []
    steps = []
    for number, (x, granted) in enumerate(zip(batches, grants, strict=True), start=1):
        with torch.no_grad():
            features, logits = look(net, x, head)
            source_logits = source(x)

        hs = [float(h) for h in entropies(source_logits)]
        sure = sorted((i for i in range(len(x)) if hs[i] < low), key=lambda i: (hs[i], i))[:most]
        pseudo += [AnchorPoint(x[i], int(source_logits[i].argmax())) for i in sure]

        candidates = [i for i, h in enumerate(entropies(logits)) if h.item() >= high]
        asked: list[int] = []
        if candidates and granted:
            old = len(queried)
            points = list(look(net, torch.stack([a.x for a in queried]), head)[0].detach()) if queried else []
            points += [features[i] for i in candidates]
            weights = [a.weight for a in queried] + [1.0] * len(candidates)
            k = old + min(granted, len(candidates))
            first = centres(number, torch.stack(points), torch.tensor(weights, dtype=torch.float64), k)
            middle, clusters = k_means(points, weights, [int(i) for i in first])
            olds = {c: [j for j in range(old) if clusters[j] == c] for c in range(k)}
            sizes = {c: sum(other == c for other in clusters) for c in range(k)}
            new_clusters = [c for c in range(k) if not olds[c]]
            for c in range(k):
                for j in olds[c]:
                    queried[j].weight += sizes[c] / len(olds[c])
            for c in sorted(new_clusters, key=lambda c: (-sizes[c], c))[: k - old]:
                left = [i for i in candidates if i not in asked]
                i = left[least([float((features[i] - middle[c]).norm()) for i in left])]
                asked.append(i)
                queried.append(AnchorPoint(x[i], labels(number, i), float(max(sizes[c], 1))))

        if buffer is not None:
            pseudo, queried = pseudo[-buffer:], queried[-buffer:]

        losses = {"pseudo": float(len(pseudo)), "queried": float(len(queried))}
        if pseudo or queried:
            alpha = len(queried) / (len(pseudo) + len(queried))
            rule = Sgd(lr, momentum, nesterov)
            for step in range(training_steps):
                loss = torch.zeros((), dtype=torch.float64)
                for name, anchors, share in (("pseudo", pseudo, 1 - alpha), ("queried", queried, alpha)):
                    if anchors:
                        u = uniforms(number, step, name, size)
                        drawn = [anchors[int(v * len(anchors))] for v in u.tolist()]
                        loss = loss + share * cross_entropies(net, drawn)
                rule.step(everything, gradients(loss, everything))
            losses |= {"alpha": alpha, "last": loss.item()}
        extra = {"weights": torch.tensor([a.weight for a in queried], dtype=torch.float64)}
        steps.append(Step(logits, snapshot(net), asked, losses, extra))
    return steps


def cross_entropies(net: nn.Module, drawn: list[AnchorPoint]) -> Tensor:
    logits = net(torch.stack([a.x for a in drawn]))
    return mean(cross_entropy(z, a.label) for z, a in zip(logits, drawn, strict=True))


# Which scenarios show a constant that the first does not.
SHOWN_BY: dict[str, tuple[str, ...]] = {"high": ("defaults",), "most": ("defaults",), "buffer": ("defaults",)}


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    pick = nets.picks()
    common = {
        "labels": nets.truth(),
        "uniforms": nets.uniforms(),
        "centres": lambda number, points, weights, k: pick(number, len(points), k).tolist(),
        "grants": [3] * 5,
    }
    small = {**common, "net": nets.cnn(width=3, scale=40.0), "batches": nets.batches(seed=6, n=24, size=4), "size": 10}
    return [
        ("small", small),
        ("defaults", {**common, "net": nets.cnn(width=2, scale=150.0), "batches": nets.batches(n=130, size=4)}),
        # Here it decides what is asked for that a candidate weighs 1 beside the anchors, and not less.
        ("light candidates", {**small, "batches": nets.batches(seed=1, n=24, size=4)}),
        ("budgeted", {**small, "grants": [0, 10, 0, 1, 2]}),
        ("small buffer", {**small, "buffer": 10}),
        (
            "vit",
            {
                **common,
                "net": nets.vit(scale=6.0),
                "head": "head",
                "batches": nets.batches(n=8),
                "size": 4,
                "training_steps": 2,
            },
        ),
    ]
