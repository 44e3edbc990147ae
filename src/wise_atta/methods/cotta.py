"""CoTTA: a student, its slow teacher, many views, and a little of the source again (Wang et al., CVPR 2022)."""

from __future__ import annotations

from wise_atta.anchor import Anchor
from wise_atta.how import Restore, TeacherStudent, Update
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published, recipe

PRESETS = imagenet_and_cifar(
    imagenet={"lr": 0.01, "optimizer": "sgd", "threshold": 0.1, "restore": 0.001, "symmetric": True},
    cifar10={"lr": 1e-3, "optimizer": "adam", "threshold": 0.92, "restore": 0.01, "symmetric": False},
)


@published(PRESETS)
def cotta(
    *,
    update: Update = recipe(TeacherStudent, returning=recipe(Restore, names={"probability": "restore"})),
    anchor: Anchor = recipe(Anchor, names={"momentum": "teacher_momentum"}, momentum=0.999),
    preset: str | None = None,
) -> Method:
    """min over all weights of CE(teacher's target, student), then θ' ← 0.999·θ' + 0.001·θ, then some θᵢ ← θ₀ᵢ.

    The target, which is also the scored prediction, is the teacher's z(x), or (1/32) Σ z(view of x) where the source
    model's mean confidence is below the threshold.

    Parameters
    ----------
    update
        `TeacherStudent`. Its options (lr, momentum, nesterov, optimizer, adapt, threshold, views, symmetric, augment,
        seed) can be given in its place, and of `Restore` `restore`, with which probability a value returns to the
        source, and `draws`.
    anchor
        The teacher, or in its place `teacher_momentum`.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: SGD at 0.01, threshold 0.1, restore
        0.001, symmetric, the defaults. ``"cifar10-c"``: Adam at 1e-3, batch 200, threshold 0.92, restore 0.01, one way.
        Both from the public configurations.
    """
    return Method("cotta", update, anchor=anchor)
