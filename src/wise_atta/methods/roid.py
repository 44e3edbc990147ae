"""ROID: weighted likelihood ratios, a pull to the source, a corrected prior (Marsden et al., WACV 2024)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wise_atta.how import Descend, LikelihoodRatio, Update
from wise_atta.how.update import lean_to_batch
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published, recipe
from wise_atta.model import Forward

PRESETS = imagenet_and_cifar(imagenet={"lr": 2.5e-4}, cifar10={"lr": 1e-3, "optimizer": "adam"})


class PriorCorrected(Descend):
    """`Descend`, with logits that lean towards the classes that the batch holds."""

    def output(self, forward: Forward) -> Tensor:
        return lean_to_batch(super().output(forward))


def descend(*, correct_prior: bool = True, **options: Any) -> Descend:
    """The rule, with scored logits multiplied by (q+γ)/(1+γC) or not."""
    return (PriorCorrected if correct_prior else Descend)(**options)


@published(PRESETS)
def roid(
    *,
    update: Update = recipe(descend, rest=Descend, objective=recipe(LikelihoodRatio), lr=2.5e-4, pull=0.01),
    preset: str | None = None,
) -> Method:
    """min over norm tensors of (1/n) Σ_S w·(SLR + SCE), then θ ← 0.99·θ + 0.01·θ₀, one step a batch.

    SLR = −Σ p·log(p/(1−p) + 1e-5), SCE the symmetric cross-entropy with one view of the sample, w = exp(d·c/τ) from
    diversity d and certainty c, S the samples with d at least its batch mean.

    Parameters
    ----------
    update
        `PriorCorrected` on `LikelihoodRatio`. Options of the two (lr, momentum, nesterov, optimizer, adapt, pull; clip,
        eps, temperature, mean_momentum, consistency, augment, seed) can be given in its place, and `correct_prior`:
        whether the scored logits are multiplied by (q+γ)/(1+γC).
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 2.5e-4, the default.
        ``"cifar10-c"``: Adam at 1e-3, batch 200. Both from the public configurations.
    """
    return Method("roid", update)
