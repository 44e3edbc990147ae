"""CEMA: few samples go to a stronger teacher, whose answers are distilled and replayed (Chen et al., ICLR 2024)."""

from __future__ import annotations

from typing import Any

from torch import nn

from wise_atta import errors, what, when
from wise_atta.how import Distillation, Tutor
from wise_atta.how.replay import Draw
from wise_atta.methods.method import Method, make_policy
from wise_atta.methods.presets import presets, published
from wise_atta.model import Classifier, Spec


@presets(published(imagenet={}, cifar10={"epsilon": 0.4}))
def cema(
    teacher: nn.Module | Classifier | None = None,
    *,
    cost: int = 1,
    ratio: float | None = None,
    policy: str | when.Policy = "uniform",
    utility: str | when.Utility = "count",
    selector: str | what.Selector = "band",
    labels: int | None = None,
    above: float | None = None,
    below: float = 0.4,
    lower: bool = False,
    epsilon: float = 0.05,
    mean_momentum: float = 0.9,
    lr: float = 2.5e-3,
    teacher_lr: float = 2.5e-4,
    momentum: float = 0.9,
    adapt: Spec = "norm",
    entropy: float = 3.0,
    kl: float = 3.0,
    ce: float = 1.0,
    queue: int = 32,
    replayed: int = 96,
    alone: int = 128,
    ready: int = 256,
    size: int | None = 300,
    draw: Draw | None = None,
    preset: str | None = None,
    seed: int = 0,
    **pacing: Any,
) -> Method:
    """min over norm tensors of mean 3·w·H + w′·(3·KL(p′‖p) + CE(p, arg max p′)), w = exp(E₀ − H), w′ = exp(E₀ − H′).

    p′ and H′ are the teacher's, after a step of its own on mean w′·H′. Over every 32 samples with E_min < H < E_max and
    |cos(p̄, p)| < ε that were sent to it, and replayed ones.

    Parameters
    ----------
    teacher
        A stronger module, or a `Classifier`, of the student's classes. See `Tutor`.
    cost
        What one of its labels costs: 1, or 0, and then the budget is out of play.
    ratio, policy, utility, labels
        When to send, and how many of a batch at most. Without a ratio every sample may be sent; with one, say how many
        a batch takes (`labels`). `pacing` goes to the policy.
    selector, above, below, lower, epsilon, mean_momentum
        Which samples to send. E_min and E_max are `above` and `below` as shares of ln C. See `Band`.
    lr, teacher_lr, momentum, adapt
        Of student and teacher.
    entropy, kl, ce, queue, replayed, alone, ready, size, draw
        See `Distillation`. The public configuration has a buffer of 10,000, WISE-ATTA's tables one of 300.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``: the defaults, from the public
        configuration but for the size of the buffer. ``"cifar10-c"``: ε = 0.4 as eta has it there; none was published.
    """
    if teacher is None:
        raise errors.BadConfig("cema learns from a teacher: give teacher=, a stronger model of the same classes")
    if selector == "band":
        selector = what.Band(
            above=above, below=below, epsilon=epsilon, mean_momentum=mean_momentum, lower=lower, seed=seed
        )
    return Method(
        "cema",
        Distillation(
            Tutor(teacher, lr=teacher_lr, momentum=momentum, below=below),
            cost=cost,
            adapt=adapt,
            lr=lr,
            momentum=momentum,
            entropy=entropy,
            kl=kl,
            ce=ce,
            below=below,
            queue=queue,
            replayed=replayed,
            alone=alone,
            ready=ready,
            size=size,
            draw=draw,
            seed=seed,
        ),
        policy=make_policy(policy, ratio=ratio, seed=seed, labels=labels, **pacing),
        utility=when.utility(utility) if isinstance(utility, str) else utility,
        selector=what.selector(selector, seed=seed) if isinstance(selector, str) else selector,
        labels=labels,
        statistics="renorm",
    )
