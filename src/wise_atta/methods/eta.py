"""ETA: entropy of the samples that are reliable and not redundant (Niu et al., ICML 2022)."""

from __future__ import annotations

from wise_atta.how import Descend, ReliableEntropy
from wise_atta.how.optimizer import Kind
from wise_atta.methods.method import Method
from wise_atta.methods.presets import presets, published
from wise_atta.model import Spec

PRESETS = published(
    imagenet={"lr": 2.5e-4, "epsilon": 0.05},
    cifar10={"lr": 1e-3, "optimizer": "adam", "epsilon": 0.4},
)


@presets(PRESETS)
def eta(
    *,
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    optimizer: Kind = "sgd",
    adapt: Spec = "norm",
    below: float = 0.4,
    epsilon: float = 0.05,
    mean_momentum: float = 0.9,
    preset: str | None = None,
) -> Method:
    """min over norm tensors of (1/|S|) Σ_S exp(E₀ − H)·H, S = {H < E₀, |cos(p̄, p)| < ε}, one step a batch.

    p̄ follows the mean p of S. Where S is empty there is no step.

    Parameters
    ----------
    lr, momentum, nesterov, optimizer, adapt
        See `Descend`.
    below
        E₀ as a share of ln C.
    epsilon, mean_momentum
        ε, and the momentum of p̄. See `Redundancy`.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 2.5e-4, ε = 0.05, the defaults.
        ``"cifar10-c"``: Adam at 1e-3, batch 200, ε = 0.4. Both from the public configurations.
    """
    objective = ReliableEntropy(below=below, epsilon=epsilon, mean_momentum=mean_momentum)
    update = Descend(objective, adapt=adapt, lr=lr, momentum=momentum, nesterov=nesterov, optimizer=optimizer)
    return Method("eta", update)
