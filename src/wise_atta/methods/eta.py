"""ETA: entropy of the samples that are reliable and not redundant (Niu et al., ICML 2022)."""

from __future__ import annotations

from wise_atta.how import Descend, ReliableEntropy, Update
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published, recipe

PRESETS = imagenet_and_cifar(
    imagenet={"lr": 2.5e-4, "epsilon": 0.05},
    cifar10={"lr": 1e-3, "optimizer": "adam", "epsilon": 0.4},
)


@published(PRESETS)
def eta(
    *, update: Update = recipe(Descend, objective=recipe(ReliableEntropy), lr=2.5e-4), preset: str | None = None
) -> Method:
    """min over norm tensors of (1/|S|) Σ_S exp(E₀ − H)·H, S = {H < E₀, |cos(p̄, p)| < ε}, one step a batch.

    p̄ follows the mean p of S. Where S is empty there is no step.

    Parameters
    ----------
    update
        `Descend` on `ReliableEntropy`. Options of the two (lr, momentum, nesterov, optimizer, adapt; below, epsilon,
        mean_momentum) can be given in its place.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 2.5e-4, ε = 0.05, the defaults.
        ``"cifar10-c"``: Adam at 1e-3, batch 200, ε = 0.4. Both from the public configurations.
    """
    return Method("eta", update)
