"""EATA: eta, held back where the source model would forget (Niu et al., ICML 2022). Needs source data."""

from __future__ import annotations

from wise_atta.how import Descend, ReliableEntropy, SourcePenalty, Update
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published, recipe

PRESETS = imagenet_and_cifar(
    imagenet={"lr": 2.5e-4, "epsilon": 0.05, "fisher_weight": 2000.0},
    cifar10={"lr": 1e-3, "optimizer": "adam", "epsilon": 0.4, "fisher_weight": 1.0},
)
PENALTY = recipe(
    SourcePenalty,
    names={"weight": "fisher_weight", "samples": "fisher_samples"},
    objective=recipe(ReliableEntropy),
    source=None,
)


@published(PRESETS)
def eata(*, update: Update = recipe(Descend, objective=PENALTY, lr=2.5e-4), preset: str | None = None) -> Method:
    """eta's loss + β·Σ F·(θ − θ₀)², F = (1/B) Σ_b g_b² over source batches; no step where eta takes none.

    Parameters
    ----------
    update
        `Descend` on a `SourcePenalty` around eta's objective. Options can be given in its place: `source` (batches of
        source inputs, without labels, on the model's device; read once, when the adapter is made), `fisher_weight` (β),
        `fisher_samples` (how many source samples F is measured on), and those of `eta`.
    preset
        As for `eta`, with β = 2000 on ImageNet's four, the default, and 1 on ``"cifar10-c"``. From the public
        configurations.
    """
    return Method("eata", update)
