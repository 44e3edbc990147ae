"""What does `source` compute? The model as trained, its own running statistics; nothing adapts.

Readings
--------
None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .plain import Step, snapshot


@torch.no_grad()
def run(net: nn.Module, batches: list[Tensor]) -> list[Step]:
    net.eval()
    return [Step(net(x), snapshot(net)) for x in batches]


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("cnn", {"net": nets.cnn(), "batches": nets.batches()}),
        ("vit", {"net": nets.vit(), "batches": nets.batches()}),
    ]
