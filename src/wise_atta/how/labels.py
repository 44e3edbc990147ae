"""The labels that are learned now: those of this batch, read off its forward, and late ones, each by its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from wise_atta.model import Forward, Statistics, Weights
from wise_atta.stream import Inputs


@dataclass(frozen=True)
class Late:
    """A sample whose label came after its batch: its input as a batch of one, and what to normalise it with."""

    inputs: Inputs
    label: int
    weight: float = 1.0
    statistics: Statistics | Literal["source"] | None = None


@dataclass(eq=False)
class Labels:
    """The labelled samples of one call of `learn`, prompt ones first.

    Parameters
    ----------
    rows, labels, weights
        Samples of the batch itself: their places, classes and weights, 1 unless given. The late ones' are added.
    late
        Samples of earlier batches.
    places
        Batch number and row of every sample, late ones included.
    """

    rows: Sequence[int] = ()
    labels: Sequence[int] = ()
    weights: Sequence[float] = ()
    late: Sequence[Late] = ()
    places: Sequence[tuple[int, int]] = ()
    _ready: tuple[Tensor, Tensor, Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.rows = [*self.rows]
        self.labels = [*self.labels, *(item.label for item in self.late)]
        self.weights = [*(self.weights or [1.0] * len(self.rows)), *(item.weight for item in self.late)]

    def on(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, classes and weights beside the logits, copied there once: a rule asks for them several times."""
        if self._ready is None or self._ready[2].device != logits.device or self._ready[2].dtype != logits.dtype:
            rows, targets = (torch.tensor(own, dtype=torch.long, device="cpu") for own in (self.rows, self.labels))
            weights = torch.tensor(self.weights, dtype=logits.dtype, device="cpu")
            # A handful of numbers is on its way when the call returns: nothing has to wait for it.
            rows, targets, weights = (own.to(logits.device, non_blocking=True) for own in (rows, targets, weights))
            self._ready = rows, targets, weights
        return self._ready

    def __len__(self) -> int:
        return len(self.labels)

    def mask(self, forward: Forward) -> Tensor:
        """True at the rows of the batch that are labelled."""
        mask = torch.zeros(len(forward.logits), dtype=torch.bool, device=forward.logits.device)
        if self.rows:
            mask[self.on(forward.logits)[0]] = True
        return mask

    def outputs(self, model: Weights, forward: Forward, *, grad: bool = True) -> tuple[Tensor, Tensor]:
        """Logits with their graph, and features, of all labelled samples under the forward's version."""
        rows = self.on(forward.logits)[0]
        logits, features = [forward.logits[rows]], [forward.features[rows]]
        if not self.late:
            return logits[0], features[0]
        for item in self.late:
            own = model.forward(item.inputs, version=forward.version, statistics=item.statistics, grad=grad)
            logits.append(own.logits)
            features.append(own.features)
        return torch.cat(logits), torch.cat(features)

    def loss(self, logits: Tensor) -> Tensor:
        """L_sup = (1/|Q|) Σ w·(−log p_y), with w = 1 unless an answer says otherwise."""
        _, targets, weights = self.on(logits)
        return (functional.cross_entropy(logits, targets, reduction="none") * weights).sum() / len(self)
