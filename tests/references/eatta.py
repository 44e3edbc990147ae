"""What does `eatta` compute? It asks for the sample whose prediction noise moves most, and balances two gradients.

Readings
--------
- score = |softmax(h(f + σ·ε))_ŷ − p_ŷ|, ŷ = argmax p, ε = `noise(batch, shape)` standard normal, one draw a batch.
- Class rule: R = predicted classes asked for in the last batch that asked (all of them, when it asked for several),
  s_c = the score with which c was last asked for. Going down the scores, sample i is passed over if ŷᵢ ∈ R and
  scoreᵢ ≤ s_{ŷᵢ}; if fewer than the granted remain, the passed-over ones follow in order of score. Equal scores:
  lower index first.
- L_ent = mean of H over {H < E₀, not labelled}; L_sup = mean CE over the labelled; g₁, g₂ norms over all adapted
  tensors of the two unweighted gradients, at the same forward.
- w ← 0.8·w + 0.2·(new), the first labelled batch sets w = new. Weights before that are 1.
- Only one of the two terms present (nothing labelled, or nothing under E₀): w₁, w₂ unchanged, the loss is that term
  with its present weight. Neither present: no step.
- SGD with Nesterov (the description names eatta in neither list).
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    length,
    look,
    mean,
    norm_tensors,
    snapshot,
    use_batch_statistics,
)


def sensitivity(features: Tensor, logits: Tensor, head: nn.Module, noise: Tensor, sigma: float) -> list[float]:
    """How far noise on the features moves the probability of the predicted class."""
    moved = head(features.detach() + sigma * noise)
    scores = []
    for z, other in zip(logits.detach(), moved.detach(), strict=True):
        guess = int(z.argmax())
        scores.append(abs(float(other.softmax(dim=0)[guess] - z.softmax(dim=0)[guess])))
    return scores


class ClassRule:
    """Passes over the predicted classes that were asked for just before, unless the score beats that class's last."""

    def __init__(self) -> None:
        self.recent: set[int] = set()
        self.last: dict[int, float] = {}

    def order(self, ranking: list[int], scores: list[float], guesses: list[int]) -> list[int]:
        passed_over = [i for i in ranking if guesses[i] in self.recent and scores[i] <= self.last[guesses[i]]]
        return [i for i in ranking if i not in passed_over] + passed_over

    def note(self, asked: list[int], scores: list[float], guesses: list[int]) -> None:
        if asked:
            self.recent = {guesses[i] for i in asked}
            self.last |= {guesses[i]: scores[i] for i in asked}


def run(
    net: nn.Module,
    batches: list[Tensor],
    *,
    head: str = "fc",
    labels: Truth,
    grants: list[int],
    noise: Callable[[int, torch.Size], Tensor],
    frozen: tuple[str, ...] = (),
    whole: tuple[str, ...] = (),
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    fraction: float = 0.4,
    sigma: float = 0.01,
    average: float = 0.8,
    balance: float = 2.0,
    class_rule: bool = True,
) -> list[Step]:
    use_batch_statistics(net)
    adapted = norm_tensors(net, frozen, whole)
    rule = Sgd(lr, momentum, nesterov)
    classes_asked = ClassRule()
    weights: tuple[float, float] | None = None
    steps = []
    for number, (x, granted) in enumerate(zip(batches, grants, strict=True), start=1):
        features, logits = look(net, x, head)
        e0 = fraction * math.log(logits.shape[1])

        eps = noise(number, features.shape)
        scores = sensitivity(features, logits, net.get_submodule(head), eps, sigma)
        guesses = [int(z.argmax()) for z in logits]
        ranking = sorted(range(len(x)), key=lambda i: (-scores[i], i))
        if class_rule:
            ranking = classes_asked.order(ranking, scores, guesses)
        asked = ranking[:granted]
        classes_asked.note(asked, scores, guesses)

        hs = entropies(logits)
        sure = [i for i, h in enumerate(hs) if h.item() < e0 and i not in asked]
        ent = mean(hs[i] for i in sure) if sure else None
        sup = mean(cross_entropy(logits[i], labels(number, i)) for i in asked) if asked else None

        if ent is not None and sup is not None:
            g1 = length(gradients(ent, adapted, keep_graph=True))
            g2 = length(gradients(sup, adapted, keep_graph=True))
            new = (balance * g2 / (g1 + g2), balance * g1 / (g1 + g2))
            weights = (
                new
                if weights is None
                else (
                    average * weights[0] + (1 - average) * new[0],
                    average * weights[1] + (1 - average) * new[1],
                )
            )
        w1, w2 = weights or (1.0, 1.0)
        terms = [w1 * ent] if ent is not None else []
        terms += [w2 * sup] if sup is not None else []
        losses = {"w1": w1, "w2": w2}
        if terms:
            loss = torch.stack(terms).sum()
            rule.step(adapted, gradients(loss, adapted))
            losses["loss"] = loss.item()
        extra = {"scores": torch.tensor(scores, dtype=torch.float64)}
        steps.append(Step(logits.detach(), snapshot(net), asked, losses, extra))
    return steps


# Which scenarios show a constant that the first does not.
SHOWN_BY: dict[str, tuple[str, ...]] = {"sigma": ("sharp head",)}


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    common = {"labels": nets.truth(), "noise": nets.normals(), "batches": nets.batches(seed=1), "grants": [1] * 5}
    return [
        ("defaults", {**common, "net": nets.cnn()}),
        ("vit", {**common, "net": nets.vit(), "head": "head"}),
        ("budgeted", {**common, "net": nets.cnn(), "grants": [0, 3, 0, 1, 2]}),
        ("published tensors", {**common, "net": nets.cnn(), "frozen": ("layer4",), "whole": ("layer1",)}),
        # Only a sharp head makes the order of the scores depend on how strong the noise is.
        ("sharp head", {**common, "net": nets.cnn(scale=100.0), "batches": nets.batches(seed=5)}),
        ("nothing sure", {**common, "net": nets.cnn(), "grants": [0, 1, 0, 1, 1], "fraction": 1e-9}),
    ]
