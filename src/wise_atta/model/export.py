"""Hooks of exported modules: they mix statistics as ``statistics="mixed"`` does, and can be pickled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wise_atta.model.batch_norms import batch_moments
from wise_atta.stream import size


class Samples:
    """Notes how many samples an exported module is called with: a layer inside may see more rows than that."""

    count = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.count = size([*args, *kwargs.values()])


class Mixture:
    """Normalise a layer of an exported module by the source's statistics and those of the batch."""

    def __init__(self, mean: Tensor, var: Tensor, prior: int, samples: Samples) -> None:
        self.mean, self.var, self.prior, self.samples = mean.clone(), var.clone(), prior, samples

    def __call__(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        mean, var = batch_moments(args[0])
        weight = self.samples.count / (self.samples.count + self.prior)
        assert isinstance(norm.running_mean, Tensor)
        kind = norm.running_mean  # device and precision are the module's, wherever it was moved
        norm.running_mean = torch.lerp(self.mean.to(kind), mean.to(kind), weight)
        norm.running_var = torch.lerp(self.var.to(kind), var.to(kind), weight)
