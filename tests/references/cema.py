"""What does `cema` compute? Sure, new samples go to a teacher; the student is distilled from it, with replay.

Readings
--------
- Sent: E_min < H < E_max = E₀ under the student (E_min = e_min·ln C, 0: off), and |cos(p̄, p)| < 0.05 once p̄
  exists; p̄ as in eta, over the samples sent. With `grants` only those of largest H, up to the grant, are sent (and
  enter p̄), in batch order.
- The queue is first in, first out; while it holds 32, those 32 make one round, so a batch may have several rounds
  or none.
- A round: the teacher steps on the mean over the 32 of exp(E₀ − H_T)·H_T (no filter);
  96 different stored samples `replay(batch, round, stored, 96)` join if at least 256 are stored; a fresh teacher
  forward on all of them gives z_T; the student steps once; then the 32 are stored, the oldest leaving beyond the
  buffer's size. Replayed samples get new teacher logits. Rounds count from 0 in each batch.
- Student loss, means over all samples of the round: 3·exp(E₀−H_s)·H_s + 3·exp(E₀−H_T)·KL(p_T‖p_s) +
  1·exp(E₀−H_T)·CE(argmax z_T), H_T of the new logits; weights and teacher carry no gradient.
- No sample of the batch sent and 256 stored: one student step on 128 replayed (min(128, stored)), teacher logits
  fresh, no teacher step. Fewer stored: nothing.
- Batch renormalisation (both models): y = (x−μ_B)/σ_B·r + d, r = σ_B/σ, d = (μ_B−μ)/σ, both without gradient and
  unclipped, σ_B = √(v_B + ε), σ = √(v + ε); μ, v start at the first batch that the model sees. Predicting on a stream
  batch moves the student's, a step of its own the teacher's, after they were used: μ ← μ + 0.1(μ_B−μ), v ← v +
  0.1(v_B−v). Other forwards use them and leave them.
- The teacher adapts norm tensors with its own momentum. Both optimizers plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .eta import keep, next_mean, weighted_entropy
from .plain import (
    Sgd,
    Step,
    cross_entropy,
    entropies,
    entropy,
    gradients,
    mean,
    norm_tensors,
    snapshot,
)


class Renorm(nn.Module):
    """A BatchNorm layer that normalises by slow statistics and lets gradients through those of the batch."""

    def __init__(self, layer: nn.BatchNorm2d, rate: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.rate = layer.weight, layer.bias, layer.eps, rate
        self.mean: Tensor | None = None
        self.var: Tensor | None = None
        self.moving = False

    def forward(self, x: Tensor) -> Tensor:
        def shape(v: Tensor) -> Tensor:
            return v.view(1, -1, 1, 1)

        mean_b = x.mean(dim=(0, 2, 3))
        var_b = (x - shape(mean_b)).pow(2).mean(dim=(0, 2, 3))
        std_b = (var_b + self.eps).sqrt()
        if self.mean is None or self.var is None:
            self.mean, self.var = mean_b.detach(), var_b.detach()
        std = (self.var + self.eps).sqrt()
        r = std_b.detach() / std
        d = (mean_b.detach() - self.mean) / std
        y = (x - shape(mean_b)) / shape(std_b) * shape(r) + shape(d)
        if self.moving:
            self.mean = self.mean + self.rate * (mean_b.detach() - self.mean)
            self.var = self.var + self.rate * (var_b.detach() - self.var)
        return y * shape(self.weight) + shape(self.bias)


def use_renormalisation(net: nn.Module, rate: float) -> None:
    """Replaces each BatchNorm layer; its weight and bias stay the same tensors under the same names."""
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            parent, _, child = name.rpartition(".")
            setattr(net.get_submodule(parent), child, Renorm(module, rate))
    net.eval()


def moving(net: nn.Module, x: Tensor) -> Tensor:
    """A forward that the slow statistics then follow."""
    layers = [module for module in net.modules() if isinstance(module, Renorm)]
    for layer in layers:
        layer.moving = True
    logits = net(x)
    for layer in layers:
        layer.moving = False
    return logits


def run(
    net: nn.Module,
    batches: list[Tensor],
    *,
    teacher: nn.Module,
    replay: Callable[[int, int, int, int], Tensor],
    grants: list[int] | None = None,
    lr: float = 2.5e-3,
    teacher_lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = False,
    fraction: float = 0.4,
    e_min: float = 0.0,
    redundancy: float = 0.05,
    average: float = 0.9,
    queue: int = 32,
    replayed: int = 96,
    replay_from: int = 256,
    replayed_alone: int = 128,
    buffer: int = 300,
    entropy_weight: float = 3.0,
    kl_weight: float = 3.0,
    ce_weight: float = 1.0,
    statistics_rate: float = 0.1,
) -> list[Step]:
    adapted, teacher_norm = norm_tensors(net), norm_tensors(teacher)
    use_renormalisation(net, statistics_rate)
    use_renormalisation(teacher, statistics_rate)
    student_rule = Sgd(lr, momentum, nesterov)
    teacher_rule = Sgd(teacher_lr, momentum, nesterov)
    mean_p: Tensor | None = None
    waiting: list[Tensor] = []
    stored: list[Tensor] = []

    def distil(x: Tensor, e0: float) -> float:
        with torch.no_grad():
            answers = teacher(x)
        terms = []
        for z, a in zip(net(x), answers, strict=True):
            h_s, h_t = entropy(z), entropy(a)
            log_p, log_q = a.log_softmax(dim=0), z.log_softmax(dim=0)
            kl = (log_p.exp() * (log_p - log_q)).sum()
            ce = cross_entropy(z, int(a.argmax()))
            by_teacher = torch.exp(e0 - h_t)
            terms.append(
                entropy_weight * torch.exp(e0 - h_s.detach()) * h_s
                + kl_weight * by_teacher * kl
                + ce_weight * by_teacher * ce
            )
        loss = mean(terms)
        student_rule.step(adapted, gradients(loss, adapted))
        return loss.item()

    steps = []
    for number, x in enumerate(batches, start=1):
        with torch.no_grad():
            logits = moving(net, x)
        e0 = fraction * math.log(logits.shape[1])
        floor = e_min * math.log(logits.shape[1])

        hs = entropies(logits)
        sent = [i for i in keep(logits, mean_p, e0, redundancy) if floor == 0 or hs[i].item() > floor]
        if grants is not None:
            sent = sorted(sorted(sent, key=lambda i: -hs[i].item())[: grants[number - 1]])
        mean_p = next_mean(logits, sent, mean_p, average)
        waiting += [x[i] for i in sent]
        losses: dict[str, float] = {"sent": float(len(sent)), "stored": float(len(stored))}

        rounds = 0
        while len(waiting) >= queue:
            now, waiting = waiting[:queue], waiting[queue:]
            loss = weighted_entropy(moving(teacher, torch.stack(now)), list(range(queue)), e0)
            teacher_rule.step(teacher_norm, gradients(loss, teacher_norm))
            again = replay(number, rounds, len(stored), replayed) if len(stored) >= replay_from else []
            losses["student"] = distil(torch.stack(now + [stored[int(i)] for i in again]), e0)
            losses["teacher"] = loss.item()
            stored = (stored + now)[-buffer:]
            rounds += 1
        if not sent and len(stored) >= replay_from:
            again = replay(number, 0, len(stored), min(replayed_alone, len(stored)))
            losses["student"] = distil(torch.stack([stored[int(i)] for i in again]), e0)
        losses["rounds"] = float(rounds)
        extra = {f"teacher.{name}": p for name, p in snapshot(teacher).items()}
        steps.append(Step(logits, snapshot(net), sent, losses, extra))
    return steps


# Which scenarios show a constant that the first does not.
SHOWN_BY: dict[str, tuple[str, ...]] = {"replay_from": ("small, later replay", "small")}


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    replay = nets.picks()
    many, ten = nets.cnn(classes=1000, width=8, scale=16.0), nets.cnn(scale=8.0)
    # Nobody wants the fourth batch: it repeats one picture seen before, and so the student learns from memory alone.
    long = nets.batches(n=288, size=4, kinds=100, shift=0.1)
    long = [long[0], long[1][:128], long[2][:128], long[1][1:2].repeat(8, 1, 1, 1), long[4][:96]]
    short = nets.batches(seed=359, n=48, size=4, kinds=20)
    short[3] = short[0][:1].repeat(6, 1, 1, 1)
    small = {
        "net": ten,
        "teacher": nets.relative(ten),
        "batches": short,
        "replay": replay,
        "redundancy": 0.5,
        "e_min": 0.03,
        "queue": 4,
        "replayed": 10,
        "replay_from": 20,
        "replayed_alone": 12,
        "buffer": 26,
    }
    # Default sizes on a tiny net call for smaller steps, or the run is chaotic; `small` has the default learning rates.
    gentle = {"lr": 2.5e-4, "teacher_lr": 2.5e-5}
    return [
        ("small", small),
        ("small, later replay", {**small, "replay_from": 22}),
        ("small, budgeted", {**small, "grants": [9, 0, 5, 4, 20]}),
        (
            "default sizes",
            {"net": many, "teacher": nets.relative(many, amount=0.02), "batches": long, "replay": replay, **gentle},
        ),
    ]
