"""CEMA: few samples go to a stronger teacher, whose answers are distilled and replayed (Chen et al., ICLR 2024)."""

from __future__ import annotations

from typing import Any

from wise_atta.how import Distillation, Tutor, Update
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published, recipe

TUTOR = recipe(Tutor, names={"lr": "teacher_lr"}, teacher=None)


@published(imagenet_and_cifar(imagenet={}, cifar10={"epsilon": 0.4}), ratio=None, labels=None, selector=recipe("band"))
def cema(*, update: Update = recipe(Distillation, tutor=TUTOR), preset: str | None = None, **asks: Any) -> Method:
    """min over norm tensors of mean 3·w·H + w′·(3·KL(p′‖p) + CE(p, arg max p′)), w = exp(E₀ − H), w′ = exp(E₀ − H′).

    p′ and H′ are the teacher's, after a step of its own on mean w′·H′. Over every 32 samples with E_min < H < E_max and
    |cos(p̄, p)| < ε that were sent to it, and replayed ones.

    Parameters
    ----------
    update
        `Distillation` by a `Tutor`. In its place can be given `teacher`, a stronger module or a `Classifier` of the
        student's classes, `teacher_lr`, and the other options of the two (cost, lr, momentum, adapt, below, entropy,
        kl, ce, queue, replayed, alone, ready, size, draw). The public configuration has a buffer of 10,000, WISE-ATTA's
        tables one of 300.
    ratio, policy, utility, labels
        When to send, and how many of a batch at most. Without a ratio every sample may be sent; with one, say how many
        a batch takes (`labels`). `pacing` goes to the policy.
    selector
        Which samples to send: `Band`, or in its place its options (above, below, lower, epsilon, mean_momentum). E_min
        and E_max are `above` and `below` as shares of ln C.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: the defaults, from the public
        configuration but for the size of the buffer. ``"cifar10-c"``: ε = 0.4 as eta has it there; none was published.
    """
    return Method("cema", update, statistics="renorm", **asks)
