"""Sharpness-aware steps: by the gradient at the point of largest loss nearby."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta import signals
from wise_atta.average import Average
from wise_atta.how.labels import Labels
from wise_atta.how.optimizer import Optimizer
from wise_atta.how.update import OneGroup, skipped
from wise_atta.model import Forward, Spec, Version, Weights
from wise_atta.part import above, at_least, running
from wise_atta.signals import confident


def climb(version: Version, gradients: Mapping[str, list[Tensor]], rho: float) -> Version:
    """θ + ρ·g/‖g‖, with the norm over all adapted tensors together. Groups without a gradient stay.

    Nobody else sees the new version: the live one is as it was.
    """
    layout = version.layout
    named = {n: g for group, own in gradients.items() for n, g in zip(layout.groups[group], own, strict=True)}
    flat = layout.flatten({name: named.get(name, torch.zeros_like(t)) for name, t in version.tensors.items()})
    # A gradient of zero climbs nowhere.
    return Version(version.flat + rho * flat / (torch.linalg.vector_norm(flat) + 1e-12), layout)


@dataclass(kw_only=True, eq=False, repr=False)
class SharpnessAware(OneGroup):
    """Entropy of reliable samples, by its gradient at θ + ρ·g/‖g‖; a collapsed model goes back to the source.

    Parameters
    ----------
    adapt
        Which tensors.
    lr
        None: 1e-3 for nets that are normalised by LayerNorm alone, such as a ViT; 2.5e-4 for others.
    momentum, nesterov, optimizer
        See `Optimizer`.
    below
        Samples with H < below·ln C are reliable, before and after the climb.
    rho
        ρ, how far to climb.
    loss_momentum, restore_below
        Where the moving average of the second loss falls below `restore_below`, tensors and optimizer return to the
        source, and the average begins anew.
    """

    runs_again = True

    lr: float | None = None  # type: ignore[assignment]  # None: by the network
    nesterov: bool = False
    adapt: Spec = ("norm", "!last-norm")
    below: float = 0.4
    rho: float = 0.05
    loss_momentum: float = 0.9
    restore_below: float = 0.2
    average: Average = running(key="average")

    def prepare(self) -> None:
        at_least(0, rho=self.rho)
        above(0, below=self.below)
        self.average = Average(self.loss_momentum)

    def make_optimizer(self, model: Weights, share: Optimizer | None = None) -> Optimizer:
        lr = _published_lr(model.model) if self.lr is None else self.lr
        return Optimizer(model, kind=self.kind, lr=lr, momentum=self.momentum, nesterov=self.nesterov, share=share)

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        model, classes = self.model, forward.logits.shape[1]
        first = signals.entropy(forward.logits)
        keep = confident(first, classes, self.below) & ~labels.mask(forward)  # S₁: H < E₀
        if not keep.any():
            return skipped()
        gradients = model.gradients(first[keep].mean(), forward.version, ["adapted"])  # g = ∂/∂θ mean of H over S₁
        higher = climb(forward.version, gradients, self.rho)  # θ + ρ·g/‖g‖
        second = signals.entropy(model.forward(forward.inputs, version=higher, grad=True, beside=forward).logits)
        keep &= confident(second, classes, self.below)  # S₂ ⊆ S₁: H < E₀ there too
        if not keep.any():
            return skipped()
        loss = second[keep].mean()
        self.average.follow(loss)  # m ← 0.9·m + 0.1·L
        assert self.average.value is not None
        if self.average.value < self.restore_below:  # m < 0.2: collapsed
            self.reset()
            return {"loss": loss.detach(), "restored": torch.ones(())}
        self.descend(loss, higher)  # θ ← θ − η·∂L/∂θ at θ + ρ·g/‖g‖
        return {"loss": loss.detach()}


def _published_lr(net: nn.Module) -> float:
    """1e-3 for nets with LayerNorm alone (a ViT), 2.5e-4 for others."""
    layer, other = (
        any(isinstance(m, kind) for m in net.modules()) for kind in (nn.LayerNorm, nn.GroupNorm | _BatchNorm)
    )
    return 1e-3 if layer and not other else 2.5e-4
