"""SAR: sharpness-aware entropy of reliable samples, with a way back from collapse (Niu et al., ICLR 2023)."""

from __future__ import annotations

from wise_atta.how import SharpnessAware
from wise_atta.methods.method import Method
from wise_atta.methods.presets import presets, published
from wise_atta.model import Spec


@presets(published(imagenet={"lr": None}, cifar10={"lr": 1e-3}))
def sar(
    *,
    lr: float | None = None,
    momentum: float = 0.9,
    nesterov: bool = False,
    adapt: Spec = ("norm", "!last-norm"),
    below: float = 0.4,
    rho: float = 0.05,
    loss_momentum: float = 0.9,
    restore_below: float = 0.2,
    preset: str | None = None,
) -> Method:
    """min over early norm tensors of max over ‖ε‖ ≤ ρ of the mean H(θ + ε) over {H < E₀}, one step a batch.

    The inner maximum is at ε = ρ·g/‖g‖ to first order. Where the moving average of the loss falls below
    `restore_below`, tensors and optimizer return to the source.

    Parameters
    ----------
    lr
        None: 1e-3 for a net that is normalised by LayerNorm alone (a ViT), 2.5e-4 for others.
    momentum, nesterov, below, rho, loss_momentum, restore_below
        See `SharpnessAware`.
    adapt
        Norm tensors without those of the last stage: `layer4` of a ResNet; in other nets the last quarter of the norm
        layers in the order in which the model lists them, rounded up. In a ViT-B/16 these are the norms of blocks 9 to
        11 and the final one, whatever the library calls them.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 2.5e-4, on a ViT at 1e-3, the
        defaults. ``"cifar10-c"``: SGD at 1e-3, batch 200. Both from the public configurations.
    """
    update = SharpnessAware(
        adapt=adapt,
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        below=below,
        rho=rho,
        loss_momentum=loss_momentum,
        restore_below=restore_below,
    )
    return Method("sar", update)
