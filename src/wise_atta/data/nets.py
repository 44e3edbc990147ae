"""Small networks that this project trains itself: one for digits, one family for 32-pixel pictures.

Their names are part of a checkpoint's card (`wise_atta/resnet18_w32`), so a name keeps its meaning: a changed network
gets a new name.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from wise_atta import errors


class DigitsCNN(nn.Module):
    """Four convolutions with BatchNorm for grey pictures of 32×32, small enough to train in seconds on a CPU.

    >>> import torch
    >>> DigitsCNN()(torch.zeros(2, 1, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((1, 16, 2), (16, 32, 2), (32, 64, 2), (64, 64, 1)):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class _Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU()
        self.around = (
            nn.Identity()
            if before == after and stride == 1
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.around(x))


class ResNet18(nn.Module):
    """ResNet-18 for 32-pixel pictures: a 3×3 stem at full resolution and no pooling after it.

    Parameters
    ----------
    classes
        How many logits.
    width
        Channels of the first stage; each of the three next ones doubles them. 64 is the usual network of 11.2 million
        parameters, 32 a quarter of it.

    Examples
    --------
    >>> import torch
    >>> ResNet18(width=8)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        before = width
        for stage in range(4):
            after = width << stage
            blocks += [_Block(before, after, stride=2 if stage else 1), _Block(after, after, stride=1)]
            before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def build(name: str, classes: int = 10) -> nn.Module:
    """A network of this project by name: `digits_cnn`, `resnet18` or `resnet18_w32` for another width.

    >>> sum(p.numel() for p in build("resnet18_w32").parameters())
    2797610
    """
    if name == "digits_cnn":
        return DigitsCNN(classes)
    match = re.fullmatch(r"resnet18(?:_w([1-9]\d*))?", name)
    if match is None:
        raise errors.unknown("network", name, ["digits_cnn", "resnet18", "resnet18_w32"])
    return ResNet18(classes, width=int(match[1] or 64))
