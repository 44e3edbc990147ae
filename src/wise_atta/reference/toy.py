"""A made stream on which every reference runs within a second or two: colours fade, and ten patterns slowly change.

It shows that a program runs and what it asks for; which method is better is no question for a toy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from wise_atta.reference.common import chance

CLASSES = 10


def pictures(number: int, n: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Pictures [n, 3, 8, 8] in [0, 1] and their classes. The source has shift 0, the end of the stream 1."""
    old, new = torch.rand(2, CLASSES, 3, 8, 8, generator=chance("patterns"), dtype=torch.float64)
    patterns = old + 0.6 * shift * (new - old)
    labels = torch.randint(CLASSES, (n,), generator=chance("classes", number))
    noise = torch.rand(n, 3, 8, 8, generator=chance("noise", number), dtype=torch.float64)
    light = 1 - shift * torch.tensor([0.2, 0.9, 0.4], dtype=torch.float64).view(3, 1, 1)
    return (patterns[labels] + noise) / 2 * light, labels


def _network(width: int) -> nn.Module:
    layers = {
        "conv1": nn.Conv2d(3, width, 3),
        "bn1": nn.BatchNorm2d(width),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(width, 2 * width, 3, stride=2),
        "bn2": nn.BatchNorm2d(2 * width),
        "relu2": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "fc": nn.Linear(2 * width, CLASSES),
    }
    return nn.Sequential(OrderedDict(layers)).double()


@cache
def _trained(width: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # the numbers that layers draw for themselves are not used
        model = _network(width)
    draw = chance("weights", width)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=draw, dtype=torch.float64) * (2 / p[0].numel()) ** 0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for number in range(50):
        x, labels = pictures(-number, 64)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval()


def classifier(width: int = 8) -> nn.Module:
    """conv1, bn1, conv2, bn2, fc, trained for a moment on source pictures."""
    return deepcopy(_trained(width))


@dataclass
class Toy:
    """A model, a stream, its classes, and how many of them were asked for."""

    model: nn.Module
    stream: list[Tensor]
    labels: list[Tensor]
    asked: int = 0

    def answer(self, t: int, i: int) -> int:
        """The class of sample i of batch t."""
        self.asked += 1
        return int(self.labels[t - 1][i])

    def error(self, predictions: Iterable[Tensor]) -> str:
        """The error of what a run yields, and the labels that it took."""
        wrong = torch.cat([z.argmax(dim=1) != y for z, y in zip(predictions, self.labels, strict=True)])
        return f"{100 * wrong.double().mean().item():.0f} % wrong, {self.asked} labels"


def toy(batches: int = 40, n: int = 32) -> Toy:
    """The same model and stream every time."""
    pairs = [pictures(t, n, shift=t / batches) for t in range(1, batches + 1)]
    return Toy(classifier(), [x for x, _ in pairs], [y for _, y in pairs])


def changed(t: int, i: int, x: Tensor) -> Tensor:
    """View i of pictures of batch t: the same noise over all of them."""
    return x + 0.1 * torch.randn(x.shape[1:], generator=chance("view", t, i), dtype=torch.float64)
