"""On what are the references played? Tiny float64 nets, seeded batches, and seeded stand-ins for everything random."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn


def generator(*key: object) -> torch.Generator:
    """A generator that depends on the key alone."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


class Stage(nn.Module):
    """Two strided or plain convolutions with BatchNorm and a short cut around the second."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.bn1(self.conv1(x)))
        return nn.functional.silu(x + self.bn2(self.conv2(x)))


class Cnn(nn.Module):
    """conv1, bn1, layer1 … layer4, fc: a residual network's names at a thousandth of its size."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = Stage(width, width, 1)
        self.layer2 = Stage(width, 2 * width, 2)
        self.layer3 = Stage(2 * width, 2 * width, 1)
        self.layer4 = Stage(2 * width, 4 * width, 2)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


class Block(nn.Module):
    """Self-attention with one head, then a small perceptron, each behind a LayerNorm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=2)
        weights = (q @ k.transpose(1, 2) / q.shape[2] ** 0.5).softmax(dim=2)
        x = x + self.proj(weights @ v)
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class Vit(nn.Module):
    """patch, blocks.0 … blocks.11, norm, head: four tokens, mean pooled."""

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(12)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(6 * x - 2).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


@torch.no_grad()
def _fill(net: nn.Module, head: nn.Linear, seed: int, scale: float) -> nn.Module:
    """Seeded weights; `scale` says how sharp the head is, and so how far entropies spread."""
    draw = generator("net", seed)
    for module in net.modules():
        normalises = isinstance(module, nn.BatchNorm2d | nn.LayerNorm)
        for kind, p in module.named_parameters(recurse=False):
            noise = torch.randn(p.shape, generator=draw, dtype=torch.float64)
            p.data = noise / p[0].numel() ** 0.5 if p.dim() > 1 else 0.1 * noise
            if kind == "weight" and normalises:
                p += 1
    head.weight.mul_(scale)
    return net.double()


def cnn(seed: int = 0, classes: int = 10, width: int = 4, scale: float = 6.0) -> nn.Module:
    """A BatchNorm net whose running statistics are those of eight seeded batches."""
    with torch.random.fork_rng(devices=[]):
        net = Cnn(classes, width)
    _fill(net, net.fc, seed, scale)
    net.train()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None
        for x in batches(seed=1000 + seed, count=8, n=16, shift=0.0):
            net(x)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return net.eval()


def vit(seed: int = 0, classes: int = 10, dim: int = 8, scale: float = 3.0) -> nn.Module:
    """A LayerNorm net with twelve blocks."""
    with torch.random.fork_rng(devices=[]):
        net = Vit(classes, dim)
    return _fill(net, net.head, seed, scale).eval()


@torch.no_grad()
def relative(net: nn.Module, seed: int = 0, amount: float = 0.05) -> nn.Module:
    """A copy whose weights differ by a little: two models that mostly agree."""
    other = deepcopy(net)
    draw = generator("relative", seed)
    for p in other.parameters():
        p *= 1 + amount * torch.randn(p.shape, generator=draw, dtype=torch.float64)
    return other


def batches(
    seed: int = 0, count: int = 5, n: int = 24, shift: float = 0.3, size: int = 8, kinds: int = 6
) -> list[Tensor]:
    """Pictures in [0, 1]: one of `kinds` patterns plus noise, darker by up to `shift` from batch to batch."""
    patterns = torch.rand(kinds, 3, size, size, generator=generator("patterns"), dtype=torch.float64)
    out = []
    for number in range(1, count + 1):
        draw = generator("batch", seed, number)
        kind = torch.randint(kinds, (n,), generator=draw)
        noise = torch.rand(n, 3, size, size, generator=draw, dtype=torch.float64)
        contrast = 1 - shift * number / count
        out.append(((0.6 * patterns[kind] + 0.4 * noise) * contrast).clamp(0, 1))
    return out


def truth(seed: int = 0, classes: int = 10) -> Callable[[int, int], int]:
    """A label for each (batch number, index)."""
    return lambda number, index: int(torch.randint(classes, (), generator=generator("truth", seed, number, index)))


def view(seed: int = 0) -> Callable[[int, int, Tensor], Tensor]:
    """The i-th augmented view of batch `number`: one draw for all samples, so any subset of a batch is seen alike."""

    def augment(number: int, i: int, x: Tensor) -> Tensor:
        draw = generator("view", seed, number, i)
        gain, gamma = 0.6 + 0.8 * torch.rand(2, generator=draw, dtype=torch.float64)
        rows, columns = torch.randint(-1, 2, (2,), generator=draw).tolist()
        x = (x * gain).clamp(0, 1).pow(gamma).roll((rows, columns), dims=(2, 3))
        return x.flip(3) if i % 2 else x

    return augment


def uniforms(seed: int = 0) -> Callable[..., Tensor]:
    """`uniforms(*key, shape)`: numbers in [0, 1) that depend on the key alone."""
    return lambda *key: torch.rand(key[-1], generator=generator("uniform", seed, *key[:-1]), dtype=torch.float64)


def normals(seed: int = 0) -> Callable[..., Tensor]:
    """`normals(*key, shape)`: standard normal numbers that depend on the key alone."""
    return lambda *key: torch.randn(key[-1], generator=generator("normal", seed, *key[:-1]), dtype=torch.float64)


def picks(seed: int = 0) -> Callable[..., Tensor]:
    """`picks(*key, size, count)`: `count` different indices below `size`."""
    return lambda *key: torch.randperm(key[-2], generator=generator("pick", seed, *key[:-2]))[: key[-1]]
