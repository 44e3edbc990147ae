"""What does `bn` compute? The model as trained under the statistics of each batch; nothing adapts.

Readings
--------
None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .plain import Step, snapshot, use_batch_statistics


@torch.no_grad()
def run(net: nn.Module, batches: list[Tensor]) -> list[Step]:
    use_batch_statistics(net)
    return [Step(net(x), snapshot(net)) for x in batches]


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    return [("cnn", {"net": nets.cnn(), "batches": nets.batches()})]
