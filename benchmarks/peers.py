"""What would one write by hand? Plain inference and tent in ordinary PyTorch, as peers to be timed against."""

from __future__ import annotations

import contextlib
import copy

import torch
from authors import Clock, entropy, norm_tensors, use_batch_statistics
from torch import Tensor, nn


class Inference:
    """Predictions with batch statistics, nothing else."""

    def __init__(self, model: nn.Module, *, clock: Clock = contextlib.nullcontext, compiled: bool = False) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        use_batch_statistics(self.model)
        if compiled:
            self.model.compile()
        self.clock = clock
        self.forwards = self.backwards = 0

    def step(self, x: Tensor, truth: list[int]) -> Tensor:
        self.forwards += 1
        with self.clock("forward"), torch.no_grad():
            logits: Tensor = self.model(x)
        return logits


class Tent:
    """One forward, the mean entropy, one backward to the norm tensors, one step; the forward's logits are scored."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 2.5e-4,
        clock: Clock = contextlib.nullcontext,
        compiled: bool = False,
    ) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        use_batch_statistics(self.model)
        tensors = norm_tensors(self.model)
        for tensor in tensors:
            tensor.requires_grad_(True)
        self.optimizer = torch.optim.SGD(tensors, lr=lr, momentum=0.9, nesterov=True)
        if compiled:
            self.model.compile()
        self.clock = clock
        self.forwards = self.backwards = 0

    def step(self, x: Tensor, truth: list[int]) -> Tensor:
        self.forwards += 1
        self.backwards += 1
        with self.clock("forward"):
            logits: Tensor = self.model(x)
        with self.clock("loss"):
            loss = entropy(logits).mean()
        with self.clock("backward"):
            loss.backward()
        with self.clock("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return logits.detach()
