"""CoTTA: a student follows a slow teacher's prediction, and returns a little to its source (Wang et al., CVPR 2022)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from wise_atta.reference.common import Optimizers, chance, descend, follow, use_batch_statistics
from wise_atta.reference.toy import changed, toy

# The public configuration for ImageNet-C. For CIFAR-10-C it is Adam at 1e-3, threshold 0.92, restore 0.01, back 0.
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)


def chosen(t: int, name: str, shape: torch.Size) -> Tensor:
    """Numbers in [0, 1) that decide which values of a tensor return to the source after batch t."""
    return torch.rand(shape, generator=chance("restore", t, name))


def disagreement(student: Tensor, target: Tensor, back: float) -> Tensor:
    """−(1−b)·Σ q·log p − b·Σ p·log q of each row, p of the student, q of the target."""
    p, q = student.softmax(dim=1), target.softmax(dim=1)
    log_p, log_q = student.log_softmax(dim=1), target.log_softmax(dim=1)
    return -(1 - back) * (q * log_p).sum(dim=1) - back * (p * log_q).sum(dim=1)


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    *,
    views: Callable[[int, int, Tensor], Tensor],
    optimizer: Optimizers = SGD,
    count: int = 32,
    threshold: float = 0.1,
    teacher_momentum: float = 0.999,
    restore: float = 0.001,
    back: float = 0.5,
    uniforms: Callable[[int, str, torch.Size], Tensor] = chosen,
) -> Iterator[Tensor]:
    """Yields the teacher's logits of each batch, which are the target, then steps on all weights of the student.

    `views(t, i, x)` is the i-th changed view of batch t, one draw for all its pictures. The views are used where the
    mean confidence of the source model lies below `threshold`. Student, teacher and source use the statistics of what
    they are given.
    """
    use_batch_statistics(model)
    source, teacher = deepcopy(model), deepcopy(model)
    steps = optimizer(list(model.parameters()))
    for t, x in enumerate(stream, start=1):
        with torch.no_grad():
            confidence = source(x).softmax(dim=1).amax(dim=1).mean()
            if confidence < threshold:
                target = torch.stack([teacher(views(t, i, x)) for i in range(count)]).mean(dim=0)
            else:
                target = teacher(x)
        yield target
        descend(steps, disagreement(model(x), target, back).mean())
        follow(teacher, model, teacher_momentum)
        with torch.no_grad():
            for name, p in model.named_parameters():
                returned = uniforms(t, name, p.shape) < restore
                p.copy_(torch.where(returned, source.get_parameter(name), p))


def example() -> str:
    """On the toy stream.

    >>> example()
    '15 % wrong, 0 labels'
    """
    made = toy()
    return made.error(run(made.model, made.stream, views=changed, count=8, threshold=0.92))


if __name__ == "__main__":
    print(example())
