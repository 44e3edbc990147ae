"""A label and many predictions in one step: each loss is weighted by the other's gradient norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wise_atta.average import Average
from wise_atta.how.labels import Labels
from wise_atta.how.objective import Entropy
from wise_atta.how.sums import Loss
from wise_atta.how.update import OneGroup, record, skipped
from wise_atta.model import Forward
from wise_atta.part import running

# What the two weights add up to: two losses that are already balanced keep a weight of 1 each.
_SUM = 2.0


@dataclass(kw_only=True, eq=False, repr=False)
class Balanced(OneGroup):
    """One step on w₁·L_ent + w₂·L_ce, with w₁ = 2g₂/(g₁ + g₂) and w₂ = 2g₁/(g₁ + g₂) by their gradient norms (EATTA).

    Both weights are moving averages. A batch without a label takes a step on w₁·L_ent with w₁ as it stands, one without
    a confident sample on w₂·L_ce alone; 1 before there was a batch with both.

    Parameters
    ----------
    adapt
        Which tensors.
    lr, momentum, nesterov, optimizer
        See `Optimizer`.
    below
        L_ent is the mean entropy over samples with H < below·ln C that are not labelled.
    weight_momentum
        Of the moving averages of w₁ and w₂.
    """

    lr: float = 2.5e-4
    below: float = 0.4
    weight_momentum: float = 0.8
    weights: Average = running(key="weights")

    def prepare(self) -> None:
        self.objective = Entropy(below=self.below)
        self.weights = Average(self.weight_momentum)

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        sums = self.sums(forward, labels)
        ent, ce = sums.unlabelled(), sums.supervised()  # mean H over {H < E₀}, labelled ones left out; CE
        if ent is None and ce is None:
            return skipped()
        by_ent = self._gradient(ent, forward, retain_graph=ce is not None)
        by_ce = self._gradient(ce, forward)
        if ent is not None and ce is not None:
            norms = torch.stack([_norm(by_ent), _norm(by_ce)])  # g₁, g₂
            weights = _SUM * norms.flip(0) / norms.sum()  # w₁ = 2g₂/(g₁ + g₂), w₂ = 2g₁/(g₁ + g₂)
            self.weights.follow(torch.where(weights.isfinite(), weights, 1.0))
        w1, w2 = (1.0, 1.0) if self.weights.value is None else self.weights.value.to(forward.logits)
        self.optimizer.step({"adapted": [w1 * a + w2 * b for a, b in zip(by_ent, by_ce, strict=True)]})
        return record(ent=ent, sup=ce)

    def _gradient(self, loss: Loss | None, forward: Forward, retain_graph: bool = False) -> list[Tensor]:
        if loss is None:
            return [torch.zeros_like(forward.version.tensors[name]) for name in self.model.layout.groups["adapted"]]
        return self.model.gradients(loss.graph, forward.version, ["adapted"], retain_graph=retain_graph)["adapted"]


def _norm(gradients: list[Tensor]) -> Tensor:
    """The norm over all tensors together."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    return norm
