"""SAR: sharpness-aware entropy of reliable samples, with a way back from collapse (Niu et al., ICLR 2023)."""

from __future__ import annotations

from wise_atta.how import SharpnessAware, Update
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published, recipe


@published(imagenet_and_cifar(imagenet={"lr": None}, cifar10={"lr": 1e-3}))
def sar(*, update: Update = recipe(SharpnessAware), preset: str | None = None) -> Method:
    """min over early norm tensors of max over ‖ε‖ ≤ ρ of the mean H(θ + ε) over {H < E₀}, one step a batch.

    The inner maximum is at ε = ρ·g/‖g‖ to first order. Where the moving average of the loss falls below
    `restore_below`, tensors and optimizer return to the source.

    Parameters
    ----------
    update
        `SharpnessAware`, or in its place its options (lr, momentum, nesterov, adapt, below, rho, loss_momentum,
        restore_below). Unless `adapt` says otherwise, norm tensors without those of the last stage adapt: `layer4` of a
        ResNet; in other nets the last quarter of the norm layers in the order in which the model lists them, rounded
        up. In a ViT-B/16 these are the norms of blocks 9 to 11 and the final one, whatever the library calls them.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 2.5e-4, on a ViT at 1e-3, the
        defaults. ``"cifar10-c"``: SGD at 1e-3, batch 200. Both from the public configurations.
    """
    return Method("sar", update)
