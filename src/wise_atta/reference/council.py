"""Council: members that differ, a judge that weighs them by labels, a memory from which learners are taught."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.special import entr  # −x·log x

from wise_atta.reference.common import chance, entropy, inside
from wise_atta.reference.toy import toy

# What is known of sample i of batch t, batches counted from 1: its class, or a set of classes that it is one of.
SetAnswer = Callable[[int, int], int | Collection[int]]


@dataclass(frozen=True)
class Learner:
    """How a member learns."""

    share: float  # of the batch's statistics
    rate: float  # the length of a step as a part of each tensor's own
    diversity: float = 0.0  # weight of H(mean p) in the loss
    early: bool = False  # the first half of the tensors, otherwise all but the head's


LEARNERS = (Learner(1.0, 3e-4), Learner(0.5, 1e-4, diversity=1.0))
LIGHT = (Learner(1.0, 3e-4, early=True),)  # for little memory and time


@dataclass(frozen=True)
class Constants:
    """One setting for all networks and streams."""

    mixture: float = 0.5  # share of the batch in the statistics of the member bn
    supervised: float = 0.1  # μ, weight of the memory's cross-entropy in a learner's loss
    replay: int = 16  # samples from memory in a learner's batch
    capacity: int = 200  # samples that the memory keeps
    momentum: float = 0.9  # of a learner's step
    full: int = 16  # the smallest batch that takes a full step; a smaller one takes its share of it
    eta: float = 0.3  # the judge's temperature
    half_life: float = 100.0  # the judge's memory, in labels
    floor: float = -4.0  # the least log-probability that counts
    prior: float = 1.0  # of the source, in nats
    confidence: float = 5.0  # of what members look like without labels, in nats a nat
    certainty: float = 2.0  # how much a member's own entropy counts there, beside variety
    window: float = 128.0  # what it is taken over, in samples, as a half-life


class Mixture(nn.Module):
    """BatchNorm by a mixture of the source's statistics and the batch's, which gradients flow through.

    μ = (1−α)μ₀ + αμ_b and σ² = (1−α)σ₀² + ασ_b² + α(1−α)(μ_b−μ₀)², the moments of a draw from the batch with chance α
    and from the source otherwise. The batch is the first `own` samples: those from memory are normalised by it too.
    """

    mean: Tensor
    var: Tensor
    own: int | None = None

    def __init__(self, layer: _BatchNorm, share: float) -> None:
        super().__init__()
        assert layer.running_mean is not None and layer.running_var is not None
        self.share, self.eps = share, layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("mean", layer.running_mean.clone())
        self.register_buffer("var", layer.running_var.clone())

    def forward(self, x: Tensor) -> Tensor:
        shape = [1, -1] + [1] * (x.dim() - 2)
        var, mean = torch.var_mean(x[: self.own], [0, *range(2, x.dim())], correction=0)
        a, gap = self.share, mean - self.mean
        mean, var = self.mean + a * gap, (1 - a) * self.var + a * var + a * (1 - a) * gap**2
        x = (x - mean.view(shape)) / (var.view(shape) + self.eps).sqrt()
        return x if self.weight is None else x * self.weight.view(shape) + self.bias.view(shape)


def with_share(model: nn.Module, share: float) -> nn.Module:
    """A copy of the model in evaluation mode whose BatchNorm layers mix their statistics."""
    copy = deepcopy(model).eval()
    for name, layer in list(copy.named_modules()):
        if isinstance(layer, _BatchNorm):
            parent, _, child = name.rpartition(".")
            setattr(copy.get_submodule(parent), child, Mixture(layer, share))
    return copy


class Student:
    """A learner's network, which takes one joint step a batch."""

    def __init__(self, model: nn.Module, how: Learner, head: str, constants: Constants) -> None:
        self.model, self.how, self.c = with_share(model, how.share), how, constants
        named = list(self.model.named_parameters())
        kept = named[: math.ceil(len(named) / 2)] if how.early else named
        self.tensors = [p for name, p in kept if not inside(name, (head,))]
        self.speed = [torch.zeros_like(p) for p in self.tensors]

    def look(self, x: Tensor, remembered: Tensor) -> Tensor:
        """Logits of the batch and of the remembered samples, normalised by the statistics of the batch."""
        for module in self.model.modules():
            if isinstance(module, Mixture):
                module.own = len(x)
        return self.model(torch.cat([x, remembered]))  # type: ignore[no-any-return]

    def learn(self, logits: Tensor, n: int, labels: Tensor) -> None:
        """A step on the mean entropy − diversity·H(mean p) + μ·CE, each gradient as long as its tensor."""
        z, old, loss = logits[:n], logits[n:], entropy(logits[:n]).mean()
        if self.how.diversity:
            loss = loss - self.how.diversity * entr(z.softmax(dim=1).mean(dim=0)).sum()
        if len(old):
            loss = loss + self.c.supervised * nn.functional.cross_entropy(old, labels)
        gradients = torch.autograd.grad(loss, self.tensors, allow_unused=True)
        rate = self.how.rate * min(1.0, n / self.c.full)
        with torch.no_grad():
            for p, g, v in zip(self.tensors, gradients, self.speed, strict=True):
                if g is not None:
                    v.copy_(self.c.momentum * v + g * p.norm() / (g.norm() + 1e-12))
                    p.sub_(rate * v)


class Memory:
    """Samples with labels, at most `capacity`: when it is full the oldest of the most frequent class leaves."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.samples, self.labels = capacity, list[Tensor](), list[int]()

    def add(self, sample: Tensor, label: int) -> None:
        if len(self.samples) == self.capacity:
            oldest = self.labels.index(max(self.labels, key=self.labels.count))
            del self.samples[oldest], self.labels[oldest]
        self.samples.append(sample)
        self.labels.append(label)

    def draw(self, like: Tensor, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """That many samples, each as often as any other but for one, and flipped half of the time; none if empty."""
        if not self.samples:
            return like[:0], torch.zeros(0, dtype=torch.long)
        size = len(self.samples)
        rounds = [torch.randperm(size, generator=draw) for _ in range(math.ceil(count / size))]
        order = torch.cat(rounds)[:count].tolist()
        x = torch.stack([self.samples[i] for i in order])
        if x.dim() == 4:
            x = torch.where(torch.rand(count, 1, 1, 1, generator=draw) < 0.5, x.flip(-1), x)
        return x, torch.tensor([self.labels[i] for i in order])


class Judge:
    """A tempered posterior: log w = log π + η·Σ_j 2^(−age_j/half-life)·max(log p(y_j), floor), age in labels."""

    def __init__(self, prior: Tensor, c: Constants) -> None:
        self.prior, self.c, self.score = prior, c, torch.zeros_like(prior)

    def add(self, log_p: Tensor) -> None:
        """Log-probability that each member gave to the answer when it was asked."""
        self.score = 2 ** (-1 / self.c.half_life) * self.score + log_p.clamp(min=self.c.floor)

    def weights(self, appearance: Tensor) -> Tensor:
        return (self.prior + appearance + self.c.eta * self.score).softmax(dim=0)


class Appearance:
    """What may be known without a label: confidence·(H(mean p) − certainty·mean H(p)) of members that never learn.

    Entropy teaches certainty, so learners take over the last one's.
    """

    def __init__(self, c: Constants) -> None:
        self.c, self.mean, self.entropies, self.count = c, torch.zeros(()), torch.zeros(()), 0.0

    def see(self, log_p: Tensor) -> None:
        """Log-probabilities [members that never learn, n, C] of a batch."""
        keep = 2 ** (-log_p.shape[1] / self.c.window)
        self.mean = keep * self.mean + log_p.exp().sum(dim=1)
        self.entropies = keep * self.entropies + entr(log_p.exp()).sum(dim=(1, 2))
        self.count = keep * self.count + log_p.shape[1]

    def of(self, learners: int) -> Tensor:
        variety = entr(self.mean / self.count).sum(dim=1)
        value = self.c.confidence * (variety - self.c.certainty * self.entropies / self.count)
        return torch.cat([value, value[-1:].expand(learners)])


def disagreement(log_p: Tensor) -> Tensor:
    """H(mean of the members' p) − mean of their H, of each sample; log_p is [M, n, C]."""
    p = log_p.exp()
    gain: Tensor = entr(p.mean(dim=0)).sum(dim=1) - entr(p).sum(dim=2).mean(dim=0)
    return gain


def log_mass(log_p: Tensor, classes: Collection[int]) -> Tensor:
    """Log of the probability that each member [M, C] gave to a set of classes."""
    return log_p[:, sorted(classes)].logsumexp(dim=1)


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    answer: SetAnswer,
    ratio: float = 0.1,
    *,
    credit: int = 1,
    delay: int = 0,
    head: str = "fc",
    learners: Sequence[Learner] = LEARNERS,
    constants: Constants = Constants(),
) -> Iterator[Tensor]:
    """Yields log Σ_k w_k p_k of each batch, then asks where members disagree, judges, remembers and teaches.

    By batch t it has asked for ⌊ratio·t⌋ + credit labels; an answer comes `delay` batches later.
    """
    mixes = any(isinstance(module, _BatchNorm) for module in model.modules())
    still = [with_share(model, share) for share in ((0.0, constants.mixture) if mixes else (0.0,))]
    students = [Student(model, how, head, constants) for how in learners]
    prior = torch.tensor([constants.prior] + [0.0] * (len(still) + len(students) - 1), dtype=torch.float64)
    judge, memory, appearance = Judge(prior, constants), Memory(constants.capacity), Appearance(constants)
    waiting: list[tuple[int, Tensor, Tensor, set[int]]] = []  # when it comes, sample, log p then, classes
    asked = 0
    for t, x in enumerate(stream, start=1):
        with torch.no_grad():
            logits = [member(x) for member in still]
        drawn = [memory.draw(x, constants.replay, chance("memory", t, k)) for k in range(len(students))]
        seen = [student.look(x, old) for student, (old, _) in zip(students, drawn, strict=True)]
        log_p = torch.stack([*logits, *(z[: len(x)].detach() for z in seen)]).log_softmax(dim=2).double()
        appearance.see(log_p[: len(still)])
        weights = judge.weights(appearance.of(len(students)))
        yield (weights.view(-1, 1, 1) * log_p.exp()).sum(dim=0).log()

        count = min(math.floor(ratio * t + 1e-9) + credit - asked, len(x))
        for i in disagreement(log_p).sort(descending=True, stable=True).indices[:count].tolist():
            known = answer(t, i)
            waiting.append((t + delay, x[i], log_p[:, i], {known} if isinstance(known, int) else set(known)))
            asked += 1
        while waiting and waiting[0][0] <= t:
            _, sample, then, classes = waiting.pop(0)
            judge.add(log_mass(then, classes))
            if len(classes) == 1:
                memory.add(sample, *classes)
        for student, z, (_, labels) in zip(students, seen, drawn, strict=True):
            student.learn(z, len(x), labels)


def example() -> str:
    """On the toy stream.

    >>> example()
    '17 % wrong, 5 labels'
    """
    made = toy()
    return made.error(run(made.model, made.stream, made.answer))


if __name__ == "__main__":
    print(example())
