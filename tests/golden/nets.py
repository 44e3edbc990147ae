"""Small networks of every kind that the golden test runs, with their inputs; all values come from numpy's raw bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLASSES = 6


class Convolutions(nn.Module):
    """Two convolutions with BatchNorm: pictures [n, 3, 10, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 12, 3, 2, 1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
        )
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


class Groups(nn.Module):
    """Two convolutions with GroupNorm: pictures [n, 3, 10, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8)
        self.conv2, self.norm2 = nn.Conv2d(8, 12, 3, 2, 1), nn.GroupNorm(3, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        return self.head(torch.relu(self.norm2(self.conv2(x))).mean(dim=(2, 3)))


class Tokens(nn.Module):
    """Tokens [n, 7, 6] that mix and are normalised by LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm1 = nn.Linear(6, 12), nn.LayerNorm(12)
        self.mix, self.norm2 = nn.Linear(7, 7), nn.LayerNorm(12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm1(self.embed(tokens))
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm2(x).mean(dim=1))


class _Block(nn.Module):
    """A residual block."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + self.short(x))


class Residual(nn.Module):
    """A ResNet with one block a stage, its stages named as torchvision names them: pictures [n, 3, 10, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6)
        self.layer1, self.layer2 = _Block(6, 6, 1), _Block(6, 8, 2)
        self.layer3, self.layer4 = _Block(8, 8, 1), _Block(8, 12, 2)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


@dataclass
class Output:
    """What libraries for text return in place of a tensor."""

    logits: Tensor
    hidden: Tensor


class Text(nn.Module):
    """Word numbers and a mask, by name; an object with `.logits` comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.mix, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Output:
        x = self.norm(torch.tanh(self.mix(self.words(ids))))
        weight = mask.to(x).unsqueeze(2)
        pooled = (x * weight).sum(dim=1) / weight.sum(dim=1).clamp_min(1)
        return Output(self.out(pooled), pooled)


class Pair(nn.Module):
    """A picture and columns, two positional arguments; BatchNorm of either kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6)
        self.columns, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, picture: Tensor, columns: Tensor) -> Tensor:
        seen = torch.relu(self.bn(self.conv(picture))).mean(dim=(2, 3))
        return self.head(torch.cat([seen, torch.tanh(self.norm(self.columns(columns)))], dim=1))


class Tabular(nn.Module):
    """Columns [n, 6] through BatchNorm1d."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 8), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(x)))


class Folded(nn.Module):
    """Tokens folded into the batch before BatchNorm1d, so that the layer sees more rows than there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bn, self.fc = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.fc(torch.tanh(self.bn(x.flatten(0, 1))).view_as(x).mean(dim=1))


class Tied(nn.Module):
    """Word numbers whose embedding is the head's weight too, and two LayerNorms that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(CLASSES, 8), nn.Linear(8, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.norm2.weight, self.norm2.bias = self.norm1.weight, self.norm1.bias
        self.out = nn.Linear(8, CLASSES, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm2(torch.tanh(self.mix(self.norm1(self.words(ids).mean(dim=1))))))


class Wide(nn.Module):
    """Convolutions large enough that several threads share them: pictures [n, 3, 24, 24]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 1, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


Draw = Callable[[int, np.random.Generator], Any]


def _uniform(*shape: int) -> Draw:
    return lambda n, generator: torch.from_numpy(generator.random((n, *shape))).float()


def _words(n: int, generator: np.random.Generator) -> dict[str, Tensor]:
    lengths = torch.from_numpy(generator.integers(1, 8, (n, 1)))
    return {"ids": torch.from_numpy(generator.integers(0, 20, (n, 7))), "mask": torch.arange(7).unsqueeze(0) < lengths}


def _pair(n: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    return _uniform(3, 10, 10)(n, generator), _uniform(4)(n, generator)


@dataclass(frozen=True)
class Kind:
    """A network, its inputs, and the name of its head."""

    net: Callable[[], nn.Module]
    draw: Draw
    head: str


KINDS = {
    "batch-norm": Kind(Convolutions, _uniform(3, 10, 10), "head"),
    "group-norm": Kind(Groups, _uniform(3, 10, 10), "head"),
    "layer-norm": Kind(Tokens, _uniform(7, 6), "head"),
    "residual": Kind(Residual, _uniform(3, 10, 10), "fc"),
    "text": Kind(Text, _words, "out"),
    "pair": Kind(Pair, _pair, "head"),
    "tabular": Kind(Tabular, _uniform(6), "last"),
    "folded": Kind(Folded, _uniform(7, 6), "fc"),
    "tied": Kind(Tied, lambda n, generator: torch.from_numpy(generator.integers(0, CLASSES, (n, 5))), "out"),
    "wide": Kind(Wide, _uniform(3, 24, 24), "head"),
}
# Standard deviation of a network's logits: about half of the predictions are then sure.
_SPREAD = 4.5


def make(kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A network in eval mode that looks trained: statistics of its data, and a head that is centred and scaled."""
    generator = np.random.default_rng([seed, len(kind)])
    with torch.random.fork_rng(devices=[]):
        net = KINDS[kind].net().double().eval()
    for _, tensor in net.named_parameters():
        values = torch.from_numpy(generator.random(tuple(tensor.shape)))
        if tensor.dim() > 1:
            tensor.data = (values - 0.5) * (12 / tensor[0].numel()) ** 0.5
        else:
            tensor.data = 0.6 * (values - 0.5)
    norms = [
        module
        for module in net.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm)
    ]
    with torch.no_grad():
        for norm in {id(norm.weight): norm for norm in norms}.values():
            norm.weight.add_(1)
        source = double(batch(kind, 0, 64))
        for norm in norms:
            norm.momentum = 1.0
            norm.train()
        call(net, source)
        for norm in norms:
            norm.momentum = 0.1
        net.eval()
        head, logits = net.get_submodule(KINDS[kind].head), call(net, source)
        head.weight.mul_(_SPREAD / (logits - logits.mean(dim=0)).std())
        if getattr(head, "bias", None) is not None:
            head.bias.sub_(call(net, source).mean(dim=0))
    return net.to(dtype)


def batch(kind: str, number: int, n: int = 8) -> Any:
    """Batch `number` of a stream that slowly becomes brighter."""
    inputs = KINDS[kind].draw(n, np.random.default_rng([7, number]))
    return inputs * (1 + 0.03 * number) if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs


def double(inputs: Any) -> Any:
    """The same inputs in float64 where they are no whole numbers."""
    if isinstance(inputs, Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {name: double(value) for name, value in inputs.items()}
    return tuple(double(value) for value in inputs)


def call(net: nn.Module, inputs: Any) -> Tensor:
    """The logits of the bare network."""
    named, placed = (
        (inputs, ()) if isinstance(inputs, dict) else ({}, inputs if isinstance(inputs, tuple) else (inputs,))
    )
    out = net(*placed, **named)
    logits: Tensor = getattr(out, "logits", out)
    return logits


def truth(query: Any) -> int:
    """A label that depends on the question's id alone."""
    number, row = query.id.split("-")
    return (5 * int(number) + int(row) // 2) % CLASSES
