"""CoTTA: a student, its slow teacher, many views, and a little of the source again (Wang et al., CVPR 2022)."""

from __future__ import annotations

from wise_atta.anchor import Anchor
from wise_atta.how import Augmentation, Restore, TeacherStudent
from wise_atta.how.optimizer import Kind
from wise_atta.how.restore import Draws
from wise_atta.methods.method import Method
from wise_atta.methods.presets import presets, published
from wise_atta.model import Spec

PRESETS = published(
    imagenet={"lr": 0.01, "optimizer": "sgd", "threshold": 0.1, "restore": 0.001, "symmetric": True},
    cifar10={"lr": 1e-3, "optimizer": "adam", "threshold": 0.92, "restore": 0.01, "symmetric": False},
)


@presets(PRESETS)
def cotta(
    *,
    lr: float = 0.01,
    momentum: float = 0.9,
    nesterov: bool = True,
    optimizer: Kind = "sgd",
    adapt: Spec = "all",
    teacher_momentum: float = 0.999,
    threshold: float = 0.1,
    views: int = 32,
    symmetric: bool = True,
    restore: float = 0.001,
    augment: Augmentation | None = None,
    draws: Draws | None = None,
    seed: int = 0,
    preset: str | None = None,
) -> Method:
    """min over all weights of CE(teacher's target, student), then θ' ← 0.999·θ' + 0.001·θ, then some θᵢ ← θ₀ᵢ.

    The target, which is also the scored prediction, is the teacher's z(x), or (1/32) Σ z(view of x) where the source
    model's mean confidence is below the threshold.

    Parameters
    ----------
    lr, momentum, nesterov, optimizer, adapt, threshold, views, symmetric, augment
        See `TeacherStudent`.
    teacher_momentum
        Of the teacher, an `Anchor`.
    restore, draws
        With which probability a value returns to the source, and what is drawn for that. See `Restore`.
    seed
        Of views and restoring.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 0.01, threshold 0.1, restore
        0.001, symmetric, the defaults. ``"cifar10-c"``: Adam at 1e-3, batch 200, threshold 0.92, restore 0.01, one way.
        Both from the public configurations.
    """
    update = TeacherStudent(
        adapt=adapt,
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        optimizer=optimizer,
        threshold=threshold,
        views=views,
        symmetric=symmetric,
        restore=Restore(restore, draws=draws, seed=seed),
        augment=augment,
        seed=seed,
    )
    return Method("cotta", update, anchor=Anchor(teacher_momentum))
