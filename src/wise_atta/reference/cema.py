"""CEMA: sure and new samples go to a teacher, who distils the student, with replay (Chen et al., ICLR 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from wise_atta.reference.common import Optimizers, chance, descend, entropy, norm_tensors
from wise_atta.reference.eta import next_mean, sure_and_new, weighted_entropy
from wise_atta.reference.toy import classifier, toy

STUDENT = partial(torch.optim.SGD, lr=2.5e-3, momentum=0.9)
TEACHER = partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9)


@dataclass(frozen=True)
class Constants:
    fraction: float = 0.4  # E_max = E₀ = fraction·ln C
    e_min: float = 0.0  # E_min = e_min·ln C; 0: none
    redundancy: float = 0.05  # ε
    average: float = 0.9  # of p̄
    queue: int = 32  # samples that make a round
    replayed: int = 96  # samples that join a round,
    replay_from: int = 256  # once so many are stored
    replayed_alone: int = 128  # samples of a step where nothing was sent
    buffer: int = 300  # samples that are stored; 10,000 in the public configuration
    entropy_weight: float = 3.0
    kl_weight: float = 3.0
    ce_weight: float = 1.0
    statistics_rate: float = 0.1  # by which the statistics follow


PAPER = Constants()


def any_stored(t: int, round_: int, stored: int, n: int) -> list[int]:
    """Which n of the stored samples are replayed in this round (from 0) of batch t."""
    return torch.randperm(stored, generator=chance("replay", t, round_))[:n].tolist()


class Renorm(nn.Module):
    """Batch renormalisation in place of a BatchNorm layer: slow statistics decide, gradients go through the batch's.

    y = (x − μ_B)/σ_B·r + d, r = σ_B/σ and d = (μ_B − μ)/σ without gradient and unclipped. μ and σ² start at the first
    batch that the layer sees. Where the layer is `moving`, they follow it after they were used.
    """

    def __init__(self, layer: nn.BatchNorm2d, rate: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.rate = layer.weight, layer.bias, layer.eps, rate
        self.mean: Tensor | None = None
        self.var: Tensor | None = None
        self.moving = False

    def forward(self, x: Tensor) -> Tensor:
        mean_b = x.mean(dim=(0, 2, 3), keepdim=True)
        var_b = (x - mean_b).pow(2).mean(dim=(0, 2, 3), keepdim=True)
        if self.mean is None or self.var is None:
            self.mean, self.var = mean_b.detach(), var_b.detach()
        std_b, std = (var_b + self.eps).sqrt(), (self.var + self.eps).sqrt()
        r, d = std_b.detach() / std, (mean_b.detach() - self.mean) / std
        y = (x - mean_b) / std_b * r + d
        if self.moving:
            self.mean = self.mean + self.rate * (mean_b.detach() - self.mean)
            self.var = self.var + self.rate * (var_b.detach() - self.var)
        return y * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def use_renormalisation(model: nn.Module, rate: float) -> None:
    """Replaces each BatchNorm layer; its weight and bias stay the same tensors under the same names."""
    model.eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Renorm(module, rate))


def moving(model: nn.Module, x: Tensor) -> Tensor:
    """A forward that the slow statistics then follow."""
    layers = [module for module in model.modules() if isinstance(module, Renorm)]
    for layer in layers:
        layer.moving = True
    logits: Tensor = model(x)
    for layer in layers:
        layer.moving = False
    return logits


def distillation(student: Tensor, teacher: Tensor, e0: float, c: Constants) -> Tensor:
    """Mean of 3·exp(E₀ − H)·H + exp(E₀ − H′)·(3·KL(p′‖p) + 1·CE(p, arg max p′)), ′ the teacher's, which is constant."""
    h, h_teacher = entropy(student), entropy(teacher)
    log_p, log_q = teacher.log_softmax(dim=1), student.log_softmax(dim=1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    ce = functional.cross_entropy(student, teacher.argmax(dim=1), reduction="none")
    by_student, by_teacher = torch.exp(e0 - h.detach()), torch.exp(e0 - h_teacher)
    return (c.entropy_weight * by_student * h + by_teacher * (c.kl_weight * kl + c.ce_weight * ce)).mean()


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    teacher: nn.Module,
    *,
    grants: Callable[[int], int | None] = lambda t: None,
    optimizer: Optimizers = STUDENT,
    teacher_optimizer: Optimizers = TEACHER,
    constants: Constants = PAPER,
    replay: Callable[[int, int, int, int], list[int]] = any_stored,
) -> Iterator[Tensor]:
    """Yields the student's logits of each batch, sends what is worth it, and distils whenever the queue is full.

    Sent: E_min < H < E_max under the student and |cos(p̄, p)| < ε, p̄ the moving average over what was sent; where
    `grants(t)` is a number, only so many, of the largest H. Every full queue is one round: a step of the teacher, then
    one of the student, on the queue and on replayed samples, by what the teacher then says of them. A batch of which
    nothing was sent takes one step of the student on replayed samples alone.
    """
    c = constants
    student_steps, teacher_steps = optimizer(norm_tensors(model)), teacher_optimizer(norm_tensors(teacher))
    use_renormalisation(model, c.statistics_rate)
    use_renormalisation(teacher, c.statistics_rate)
    mean_p: Tensor | None = None
    waiting: list[Tensor] = []
    stored: list[Tensor] = []

    def distil(samples: list[Tensor], e0: float) -> None:
        x = torch.stack(samples)
        with torch.no_grad():
            target = teacher(x)
        descend(student_steps, distillation(model(x), target, e0, c))

    for t, x in enumerate(stream, start=1):
        with torch.no_grad():
            logits = moving(model, x)
        yield logits
        e0 = c.fraction * math.log(logits.shape[1])
        h = entropy(logits)
        sent = sure_and_new(logits, mean_p, e0, c.redundancy)
        if c.e_min:
            sent = sent & (h > c.e_min * math.log(logits.shape[1]))
        most = grants(t)
        if most is not None:
            surest_last = h.where(sent, -torch.inf).sort(descending=True, stable=True).indices
            allowed = torch.zeros_like(sent)
            allowed[surest_last[:most]] = True
            sent = sent & allowed
        mean_p = next_mean(logits, sent, mean_p, c.average)
        waiting += list(x[sent])

        round_ = 0
        while len(waiting) >= c.queue:
            now, waiting = waiting[: c.queue], waiting[c.queue :]
            descend(teacher_steps, weighted_entropy(moving(teacher, torch.stack(now)), e0))
            again = replay(t, round_, len(stored), c.replayed) if len(stored) >= c.replay_from else []
            distil(now + [stored[i] for i in again], e0)
            stored = (stored + now)[-c.buffer :]
            round_ += 1
        if not sent.any() and len(stored) >= c.replay_from:
            distil([stored[i] for i in replay(t, 0, len(stored), min(c.replayed_alone, len(stored)))], e0)


def example() -> str:
    """On the toy stream.

    >>> example()
    '15 % wrong, 0 labels'
    """
    made = toy()
    return made.error(run(made.model, made.stream, classifier(width=16), constants=Constants(redundancy=0.4)))


if __name__ == "__main__":
    print(example())
