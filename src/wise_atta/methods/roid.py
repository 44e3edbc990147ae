"""ROID: weighted likelihood ratios, a pull to the source, a corrected prior (Marsden et al., WACV 2024)."""

from __future__ import annotations

from torch import Tensor

from wise_atta.how import Augmentation, Descend, LikelihoodRatio
from wise_atta.how.optimizer import Kind
from wise_atta.how.update import lean_to_batch
from wise_atta.methods.method import Method
from wise_atta.methods.presets import presets, published
from wise_atta.model import Forward, Spec


class PriorCorrected(Descend):
    """`Descend`, with logits that lean towards the classes that the batch holds."""

    def output(self, forward: Forward) -> Tensor:
        return lean_to_batch(super().output(forward))


@presets(published(imagenet={"lr": 2.5e-4}, cifar10={"lr": 1e-3, "optimizer": "adam"}))
def roid(
    *,
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    optimizer: Kind = "sgd",
    adapt: Spec = "norm",
    clip: float = 0.99,
    eps: float = 1e-5,
    temperature: float = 1 / 3,
    mean_momentum: float = 0.9,
    consistency: bool = True,
    pull: float = 0.01,
    correct_prior: bool = True,
    augment: Augmentation | None = None,
    seed: int = 0,
    preset: str | None = None,
) -> Method:
    """min over norm tensors of (1/n) Σ_S w·(SLR + SCE), then θ ← 0.99·θ + 0.01·θ₀, one step a batch.

    SLR = −Σ p·log(p/(1−p) + 1e-5), SCE the symmetric cross-entropy with one view of the sample, w = exp(d·c/τ) from
    diversity d and certainty c, S the samples with d at least its batch mean.

    Parameters
    ----------
    lr, momentum, nesterov, optimizer, adapt, pull
        See `Descend`.
    clip, eps, temperature, mean_momentum, consistency, augment, seed
        See `LikelihoodRatio`.
    correct_prior
        Whether the scored logits are multiplied by (q+γ)/(1+γC).
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 2.5e-4, the default.
        ``"cifar10-c"``: Adam at 1e-3, batch 200. Both from the public configurations.
    """
    objective = LikelihoodRatio(
        clip=clip,
        eps=eps,
        temperature=temperature,
        mean_momentum=mean_momentum,
        consistency=consistency,
        augment=augment,
        seed=seed,
    )
    update = (PriorCorrected if correct_prior else Descend)(
        objective, adapt=adapt, lr=lr, momentum=momentum, nesterov=nesterov, optimizer=optimizer, pull=pull
    )
    return Method("roid", update)
