"""On what is the core tried out? Small nets of five kinds with the inputs they take, every number from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 5


class BatchNormCnn(nn.Module):
    """Two convolutions, each with BatchNorm: pictures [n, 3, 6, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(nn.functional.silu(self.bn1(self.conv1(x))))
        return self.fc(self.drop(x.mean(dim=(2, 3))))


class GroupNormCnn(nn.Module):
    """The same with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, 8)
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.norm1(self.conv1(x)))
        x = nn.functional.silu(self.norm2(self.conv2(x)))
        return self.classifier(x.mean(dim=(2, 3)))


class TokenNet(nn.Module):
    """Tokens [n, 7, 6] that mix and are normalised by LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.norm1 = nn.LayerNorm(8)
        self.mix = nn.Linear(7, 7)
        self.norm2 = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm1(self.embed(tokens))
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm2(x).mean(dim=1))


@dataclass
class Output:
    """What libraries for text return in place of a tensor."""

    logits: Tensor
    hidden: Tensor


class TextNet(nn.Module):
    """Word numbers and a mask, by name; an object with `.logits` comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Output:
        x = self.norm(torch.tanh(self.mix(self.words(ids))))
        weight = mask.to(x).unsqueeze(2)
        pooled = (x * weight).sum(dim=1) / weight.sum(dim=1).clamp_min(1)
        return Output(self.out(pooled), pooled)


class TabularNet(nn.Module):
    """Columns [n, 6] through BatchNorm1d."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 8), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(x)))


class FoldedNet(nn.Module):
    """Tokens folded into the batch before BatchNorm1d, so that the layer sees more rows than there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.bn = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = torch.tanh(self.bn(x.flatten(0, 1))).view_as(x)
        return self.fc(x.mean(dim=1))


class TiedNet(nn.Module):
    """Word numbers whose embedding is the head's weight too, and two LayerNorms that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, 8)
        self.mix = nn.Linear(8, 8)
        self.norm1 = nn.LayerNorm(8)
        self.norm2 = nn.LayerNorm(8)
        self.norm2.weight, self.norm2.bias = self.norm1.weight, self.norm1.bias
        self.out = nn.Linear(8, CLASSES, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm2(torch.tanh(self.mix(self.norm1(self.words(ids).mean(dim=1))))))


@dataclass(frozen=True)
class Kind:
    """A net, where its head is, and how its inputs look."""

    net: Callable[[], nn.Module]
    head: str
    draw: Callable[[int, torch.dtype, torch.Generator], Any]
    batch_norm: bool = False


def _normal(*shape: int) -> Callable[[int, torch.dtype, torch.Generator], Tensor]:
    def draw(n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return torch.randn(n, *shape, dtype=torch.float64, generator=generator).to(dtype)

    return draw


def _words(n: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    lengths = torch.randint(1, 8, (n, 1), generator=generator)
    return {"ids": torch.randint(20, (n, 7), generator=generator), "mask": torch.arange(7).unsqueeze(0) < lengths}


KINDS = {
    "batch-norm": Kind(BatchNormCnn, "fc", _normal(3, 6, 6), batch_norm=True),
    "group-norm": Kind(GroupNormCnn, "classifier", _normal(3, 6, 6)),
    "tokens": Kind(TokenNet, "head", _normal(7, 6)),
    "text": Kind(TextNet, "out", _words),
    "tabular": Kind(TabularNet, "last", _normal(6), batch_norm=True),
    "folded": Kind(FoldedNet, "fc", _normal(7, 6), batch_norm=True),
}

# What the weight of the head is multiplied by.
SURE = {"batch-norm": 16, "group-norm": 48, "tokens": 8, "text": 6, "tabular": 6, "folded": 12}


def make(kind: str = "batch-norm", *, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A net in eval mode that looks trained: no norm weight is 1, no mean 0, and many predictions are sure."""
    net = trained(KINDS[kind].net, seed=seed)
    with torch.no_grad():
        net.get_submodule(KINDS[kind].head).weight.mul_(SURE[kind])
    return net.to(dtype)


def trained(net: Callable[[], nn.Module], *, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """The net that `net` builds, every tensor drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = net().to(torch.float64)
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if name.endswith("running_var") or (tensor.dim() == 1 and name.endswith("weight")):
                    tensor.uniform_(0.5, 1.5)
                elif tensor.dim() == 1:
                    tensor.normal_(0, 0.3)
                elif tensor.is_floating_point():
                    tensor.mul_(1.5)
    return module.to(dtype).eval()


def batch(kind: str = "batch-norm", number: int = 1, n: int = 8, dtype: torch.dtype = torch.float64) -> Any:
    """Inputs number `number` of a stream whose distribution drifts away from the first."""
    inputs = KINDS[kind].draw(n, dtype, torch.Generator().manual_seed(1000 + number))
    return inputs if isinstance(inputs, dict) else inputs * (1 + 0.05 * number) + 0.1 * number


def call(net: nn.Module, inputs: Any) -> Tensor:
    """What the bare net says about such inputs."""
    out = net(**inputs) if isinstance(inputs, dict) else net(inputs)
    logits: Tensor = getattr(out, "logits", out)
    return logits


def truth(query: Any) -> int:
    """An answer that depends on the question alone."""
    return (3 * query.batch + query.index) % CLASSES
