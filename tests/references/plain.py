"""What do the references share? Entropy, normalisation tensors, two optimizers and the record of a step.

Readings
--------
- Batches are numbered from 1: `labels(number, index)`, `noise(number, …)` and so on.
- SGD: b ← m·b + g (b = 0 before the first gradient), d = b, or g + m·b with Nesterov, θ ← θ − lr·d. A tensor that
  is not part of a step keeps its b.
- Adam: m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², θ ← θ − lr·(m/(1−β₁ᵏ)) / (√(v/(1−β₂ᵏ)) + ε), k = steps so far.
- Batch statistics: mean and biased variance over the batch that the forward was given.
- A filter passes a sample when the inequality is strict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Truth = Callable[[int, int], int]
Tensors = dict[str, Tensor]


@dataclass
class Step:
    """What one batch did: the logits that are scored, every parameter afterwards, who was asked for, the losses."""

    logits: Tensor
    params: Tensors
    asked: list[int] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    extra: Tensors = field(default_factory=dict)


def entropy(z: Tensor) -> Tensor:
    """H of softmax(z) for one row of logits."""
    log_p = z.log_softmax(dim=0)
    return -(log_p.exp() * log_p).sum()


def entropies(logits: Tensor) -> list[Tensor]:
    return [entropy(z) for z in logits]


def cross_entropy(z: Tensor, label: int) -> Tensor:
    return -z.log_softmax(dim=0)[label]


def mean(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).mean(dim=0)


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def scaled(values: list[float]) -> list[float]:
    """Moved and stretched to [0, 1]; equal values all become 0."""
    low, high = min(values), max(values)
    return [0.0 if high == low else (v - low) / (high - low) for v in values]


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a tensor's name lies in one of the modules: blocks.1 holds blocks.1.weight, not blocks.10.weight."""
    return any(name == m or name.startswith(m + ".") for m in modules)


def norm_tensors(net: nn.Module, frozen: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Tensors:
    """Weights and biases of the normalisation layers, less what lies in `frozen`, plus all that lies in `whole`."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
    layers = [name for name, module in net.named_modules() if isinstance(module, kinds)]
    return {
        name: p
        for name, p in net.named_parameters()
        if (name.rpartition(".")[0] in layers and not inside(name, frozen)) or inside(name, whole)
    }


def use_batch_statistics(net: nn.Module) -> nn.Module:
    """Eval mode, but each BatchNorm normalises by the batch that it is given."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean = module.running_var = None
    return net.eval()


def look(net: nn.Module, x: Tensor, head: str) -> tuple[Tensor, Tensor]:
    """Features (what the head is given) and logits of one forward."""
    seen: list[Tensor] = []
    hook = net.get_submodule(head).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = net(x)
    hook.remove()
    return seen[0], logits


def snapshot(net: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def gradients(loss: Tensor, tensors: Tensors, keep_graph: bool = False) -> Tensors:
    grads = torch.autograd.grad(loss, list(tensors.values()), retain_graph=keep_graph)
    return dict(zip(tensors, grads, strict=True))


def length(grads: Tensors) -> float:
    """The Euclidean norm over all tensors together."""
    return float(sum(float((g * g).sum()) for g in grads.values())) ** 0.5


@torch.no_grad()
def assign(tensors: Tensors, values: Tensors) -> None:
    for name, p in tensors.items():
        p.copy_(values[name])


@torch.no_grad()
def follow(average: Tensors, tensors: Tensors, factor: float) -> None:
    """θ̄ ← factor·θ̄ + (1 − factor)·θ."""
    for name, p in tensors.items():
        average[name].copy_(factor * average[name] + (1 - factor) * p)


class Sgd:
    """Stochastic gradient descent with momentum, one buffer a tensor."""

    def __init__(self, lr: float, momentum: float, nesterov: bool) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.buffers: Tensors = {}

    @torch.no_grad()
    def step(self, tensors: Tensors, grads: Tensors, lr: float | None = None) -> None:
        for name, p in tensors.items():
            g = grads[name]
            b = self.momentum * self.buffers.get(name, torch.zeros_like(g)) + g
            self.buffers[name] = b
            d = g + self.momentum * b if self.nesterov else b
            p -= (self.lr if lr is None else lr) * d


class Adam:
    """Adam without weight decay."""

    def __init__(self, lr: float, beta1: float, beta2: float, eps: float) -> None:
        self.lr, self.beta1, self.beta2, self.eps = lr, beta1, beta2, eps
        self.first: Tensors = {}
        self.second: Tensors = {}
        self.steps = 0

    @torch.no_grad()
    def step(self, tensors: Tensors, grads: Tensors) -> None:
        self.steps += 1
        for name, p in tensors.items():
            g = grads[name]
            m = self.beta1 * self.first.get(name, torch.zeros_like(g)) + (1 - self.beta1) * g
            v = self.beta2 * self.second.get(name, torch.zeros_like(g)) + (1 - self.beta2) * g * g
            self.first[name], self.second[name] = m, v
            m_hat = m / (1 - self.beta1**self.steps)
            v_hat = v / (1 - self.beta2**self.steps)
            p -= self.lr * m_hat / (v_hat.sqrt() + self.eps)


def optimizer_of(
    kind: str, lr: float, momentum: float, nesterov: bool, beta1: float, beta2: float, eps: float
) -> Sgd | Adam:
    return Sgd(lr, momentum, nesterov) if kind == "sgd" else Adam(lr, beta1, beta2, eps)
