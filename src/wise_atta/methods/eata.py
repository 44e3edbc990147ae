"""EATA: eta, held back where the source model would forget (Niu et al., ICML 2022). Needs source data."""

from __future__ import annotations

from wise_atta.how import Descend, ReliableEntropy, SourceData, SourcePenalty
from wise_atta.how.optimizer import Kind
from wise_atta.methods.method import Method
from wise_atta.methods.presets import presets, published
from wise_atta.model import Spec

PRESETS = published(
    imagenet={"lr": 2.5e-4, "epsilon": 0.05, "fisher_weight": 2000.0},
    cifar10={"lr": 1e-3, "optimizer": "adam", "epsilon": 0.4, "fisher_weight": 1.0},
)


@presets(PRESETS)
def eata(
    *,
    source: SourceData | None = None,
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    optimizer: Kind = "sgd",
    adapt: Spec = "norm",
    below: float = 0.4,
    epsilon: float = 0.05,
    mean_momentum: float = 0.9,
    fisher_weight: float = 2000.0,
    fisher_samples: int = 2000,
    preset: str | None = None,
) -> Method:
    """eta's loss + β·Σ F·(θ − θ₀)², F = (1/B) Σ_b g_b² over source batches; no step where eta takes none.

    Parameters
    ----------
    source
        Batches of source inputs, without labels, on the model's device; read once, when the adapter is made.
    lr, momentum, nesterov, optimizer, adapt, below, epsilon, mean_momentum
        See `eta`.
    fisher_weight, fisher_samples
        β, and how many source samples F is measured on. See `fisher`.
    preset
        As for `eta`, with β = 2000 on ImageNet's four, the default, and 1 on ``"cifar10-c"``. From the public
        configurations.
    """
    reliable = ReliableEntropy(below=below, epsilon=epsilon, mean_momentum=mean_momentum)
    objective = SourcePenalty(reliable, source, weight=fisher_weight, samples=fisher_samples)
    update = Descend(objective, adapt=adapt, lr=lr, momentum=momentum, nesterov=nesterov, optimizer=optimizer)
    return Method("eata", update)
