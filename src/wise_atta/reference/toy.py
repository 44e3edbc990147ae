"""A made stream on which every reference runs within a second: ten patterns under noise, and the light fails."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wise_atta.reference.common import chance

CLASSES = 10


def pictures(number: int, n: int, shift: float) -> tuple[Tensor, Tensor]:
    """Pictures [n, 3, 8, 8] in [0, 1] and their classes; `shift` from 0 to 1 takes contrast away and adds noise."""
    patterns = torch.rand(CLASSES, 3, 8, 8, generator=chance("patterns"), dtype=torch.float64)
    labels = torch.randint(CLASSES, (n,), generator=chance("classes", number))
    noise = torch.rand(n, 3, 8, 8, generator=chance("noise", number), dtype=torch.float64)
    share = 0.5 + 0.25 * shift
    return ((1 - share) * patterns[labels] + share * noise) * (1 - 0.6 * shift), labels


@torch.no_grad()
def classifier(width: int = 16, sharpness: float = 0.5) -> nn.Module:
    """conv, bn, fc: random features, and a head that compares them with the mean of each class. Nothing is trained."""
    conv = nn.Conv2d(3, width, 3, dtype=torch.float64)
    conv.weight.copy_(torch.randn(conv.weight.shape, generator=chance("conv", width), dtype=torch.float64) / 27**0.5)
    conv.bias.zero_()  # type: ignore[union-attr]
    bn = nn.BatchNorm2d(width, momentum=None, dtype=torch.float64)
    body = nn.Sequential(OrderedDict(conv=conv, bn=bn, relu=nn.ReLU(), pool=nn.AvgPool2d(2), flat=nn.Flatten()))
    x, labels = pictures(0, 1000, shift=0.0)
    body.train()(x)  # the running statistics are those of these pictures
    features = body.eval()(x)
    means = torch.stack([features[labels == c].mean(dim=0) for c in range(CLASSES)])
    fc = nn.Linear(features.shape[1], CLASSES, dtype=torch.float64)
    fc.weight.copy_(sharpness * means)
    fc.bias.copy_(-0.5 * sharpness * means.pow(2).sum(dim=1))
    body.add_module("fc", fc)
    return body


@dataclass
class Toy:
    """A model, a stream, its classes, and how many of them were asked for."""

    model: nn.Module
    stream: list[Tensor]
    labels: list[Tensor]
    asked: int = 0

    def answer(self, t: int, i: int) -> int:
        self.asked += 1
        return int(self.labels[t - 1][i])

    def error(self, predictions: Iterable[Tensor]) -> str:
        """The error of the predictions that a run yields, and the labels that it took."""
        wrong = torch.cat([z.argmax(dim=1) != y for z, y in zip(predictions, self.labels, strict=True)])
        return f"error {100 * wrong.double().mean().item():.0f} %, labels {self.asked}"


def toy(batches: int = 40, n: int = 32) -> Toy:
    """The same stream every time."""
    pairs = [pictures(t, n, shift=t / batches) for t in range(1, batches + 1)]
    return Toy(classifier(), [x for x, _ in pairs], [y for _, y in pairs])
