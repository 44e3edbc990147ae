"""WISE-ATTA as its authors' code has it, where that differs from the paper (`wise`).

- The budget needs the length T: at most round(rT) labels, at the rate round(rT)/T; H_c is 40; the warm-up draws at r̃_t.
- What to ask: eatta's perturbation score in the first four batches, then drift, under eatta's class rule.
- How to learn: an unlabelled batch takes a step on 0.1·L_ent, a labelled one a step on 1.7·L_ent + 0.15·L_sup, then
  one on 0.15·L_sup of a fresh forward. The bias of the head moves with the norm tensors except in that first step, its
  weight never. One momentum buffer a tensor serves all steps.
- The anchor follows after every step. Anchor, budget and history begin anew at a domain change, which is the caller's.

Left out of that code: on an unlabelled batch its anchor follows a second time, its class rule remembers one class and
two in turn, and on ImageNet-C it steps the norm tensors of `layer1` twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from wise_atta.reference.common import Answer, Optimizers, follow, look, norm_tensors, use_batch_statistics
from wise_atta.reference.eatta import ClassRule, normal, sensitivity
from wise_atta.reference.toy import toy
from wise_atta.reference.wise import BudgetPaced, any_of, drift, l_ent, l_sup, largest, quantile, uniform, utility

# Both rates are those for a ResNet-50 on ImageNet-C: this one is of the first step of a labelled batch.
SGD = partial(torch.optim.SGD, lr=5e-4, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class Constants:
    second_lr: float = 2e-4  # of all other steps
    unlabelled: float = 0.1  # weight of L_ent on an unlabelled batch
    ent: float = 1.7  # weights of L_ent and L_sup in the first step of a labelled one
    sup: float = 0.15
    sup_second: float = 0.15  # weight of L_sup in its second step
    fraction: float = 0.4  # τ_ent = fraction·ln C
    mu: float = 0.9  # momentum of the anchor
    first: int = 4  # batches that are asked by perturbation
    sigma: float = 0.01  # of that


PUBLISHED = Constants()


class PublishedPaced(BudgetPaced):
    """Algorithm 1 with the budget of the published code: `length` is T."""

    def __init__(self, r: float, length: int, *, draw: Callable[[int], float] = uniform) -> None:
        self.total = round(r * length)
        super().__init__(self.total / length, horizon=40, draw=draw)

    def select(self, s: float) -> int:
        if self.used == self.total:
            return 0
        target = self.r * self.t
        if self.used + self.slack < target:
            return 1
        debt = target - self.used
        rate = min(max(self.r + debt / self.horizon, 0.0), 1.0)
        if len(self.history) < self.warmup:
            return int(self.draw(self.t) < rate)
        return int(s >= quantile(self.history, 1 - rate))


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    answer: Answer,
    decide: Callable[[float], int],
    *,
    head: str = "fc",
    adapt: Callable[[nn.Module], list[nn.Parameter]] = norm_tensors,
    optimizer: Optimizers = SGD,
    constants: Constants = PUBLISHED,
    noise: Callable[[int, torch.Size], Tensor] = normal,
    ties: Callable[[int, int], Tensor] = any_of,
) -> Iterator[Tensor]:
    """Yields the logits of each batch. For a ResNet on ImageNet-C `adapt` is `eatta.published_tensors`."""
    use_batch_statistics(model)
    c = constants
    anchor = deepcopy(model)
    classifier = model.get_submodule(head)
    norm, bias = adapt(model), [classifier.get_parameter("bias")]
    steps = optimizer([*norm, *bias])
    first_lr = steps.param_groups[0]["lr"]
    rule = ClassRule()

    def step(loss: Tensor, tensors: list[nn.Parameter], lr: float) -> None:
        """A step on some of the tensors; the others keep their momentum."""
        if not loss.requires_grad:
            return
        steps.zero_grad()
        for p, g in zip(tensors, torch.autograd.grad(loss, tensors), strict=True):
            p.grad = g
        steps.param_groups[0]["lr"] = lr
        steps.step()
        follow(anchor, model, c.mu)

    for t, x in enumerate(stream, start=1):
        features, logits = look(model, x, head)
        yield logits.detach()
        tau_ent = c.fraction * math.log(logits.shape[1])

        k = decide(utility(logits, tau_ent))
        asked: list[int] = []
        if k:
            with torch.no_grad():
                if t <= c.first:
                    scores = sensitivity(features, logits, classifier, noise(t, features.shape), c.sigma)
                else:
                    scores = drift(logits, anchor(x))
            ranking = largest(scores, ties(t, len(x)), len(x))
            asked = rule.pick(ranking, scores.tolist(), logits.argmax(dim=1).tolist(), k)
        labels = {i: answer(t, i) for i in asked}

        if labels:
            step(c.ent * l_ent(logits, asked, tau_ent) + c.sup * l_sup(logits, labels), norm, first_lr)
            step(c.sup_second * l_sup(model(x), labels), [*norm, *bias], c.second_lr)
        else:
            step(c.unlabelled * l_ent(logits, asked, tau_ent), [*norm, *bias], c.second_lr)


def example() -> str:
    """On the toy stream.

    >>> example()
    '14 % wrong, 19 labels'
    """
    made = toy()
    decide = PublishedPaced(r=0.5, length=len(made.stream))
    return made.error(run(made.model, made.stream, made.answer, decide))


if __name__ == "__main__":
    print(example())
