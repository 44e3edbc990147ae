"""The diagonal of the source model's Fisher information, and a penalty that spares what mattered to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from wise_atta import errors
from wise_atta.how.labels import Labels
from wise_atta.how.objective import Objective
from wise_atta.model import Forward, Weights
from wise_atta.part import SAVED_AS, at_least
from wise_atta.stream import Batch, Inputs, size, tree_map

SourceData: TypeAlias = Iterable[Inputs | Batch]


def check_source(source: SourceData | None) -> SourceData:
    """Source data, or an error that says what it must be."""
    if source is None or isinstance(source, Tensor | Batch | Mapping | str):
        instead = "nothing was given" if source is None else f"not one {type(source).__name__}"
        raise errors.BadConfig(
            f"source data is needed: an iterable of batches of inputs as `predict` takes them, {instead}. "
            "For example source=[x for x, _ in loader]"
        )
    return source


def fisher(model: Weights, source: SourceData, samples: int = 2000) -> Tensor:
    """F = (1/B) Σ_b g_b², with g_b the gradient of batch b's mean cross-entropy on its own argmax labels.

    One number for each adapted value, tensor after tensor. The last batch is cut so that there are `samples` in all;
    shorter data is used as it is.
    """
    total, batches, seen = torch.zeros((), dtype=model.dtype, device=model.device), 0, 0
    for batch in source:
        room = samples - seen
        inputs = tree_map(lambda leaf, n=room: leaf[:n], batch.inputs if isinstance(batch, Batch) else batch)
        model.check(inputs)
        with torch.inference_mode(False), torch.enable_grad():
            forward = model.forward(inputs, version=model.live, grad=True)
            loss = functional.cross_entropy(forward.logits, forward.logits.detach().argmax(dim=1))
            gradients = model.gradients(loss, forward.version, list(model.layout.groups))
        total = total + _join(tensor for group in gradients.values() for tensor in group).square()
        batches += 1
        seen += size(inputs)
        if seen >= samples:
            break
    if not batches:
        raise errors.BadConfig("the source data holds no batch: give at least one (a generator can be read only once)")
    if not total.isfinite().all():
        raise errors.NotFinite("the source data gives gradients with NaN or Inf: clean it first")
    return total / batches


@dataclass(eq=False)
class SourcePenalty(Objective):
    """An objective plus weight·Σ F·(θ − θ₀)², which keeps what mattered to the source model where it was.

    Parameters
    ----------
    objective
        What to minimise otherwise. None from it (no step) stays None.
    source
        Source data for the Fisher information, read once, before the stream starts.
    weight, samples
        Of the penalty, and how many source samples it is measured on.
    """

    objective: Objective = field(metadata={SAVED_AS: "objective"})
    source: SourceData | None = field(repr=False)
    _: KW_ONLY
    weight: float = 2000.0
    samples: int = 2000

    def __post_init__(self) -> None:
        at_least(0, weight=self.weight)
        at_least(1, samples=self.samples)
        self.needs_statistics = self.objective.needs_statistics
        self.source = check_source(self.source)

    def start(self, model: Weights) -> None:
        self.objective.start(model)
        self._fisher = fisher(model, check_source(self.source), self.samples)
        self._origin = _join(model.source().tensors.values())

    def __call__(self, model: Weights, forward: Forward, labels: Labels) -> Tensor | None:
        loss = self.objective(model, forward, labels)
        if loss is None:
            return None
        moved = _join(forward.version.tensors.values()) - self._origin
        return loss + self.weight * (self._fisher * moved.square()).sum()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"fisher": self._fisher.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["fisher"].shape != self._fisher.shape:
            raise errors.StateMismatch(
                f"the state holds the Fisher information of {state['fisher'].numel()} values, "
                f"this model adapts {self._fisher.numel()}"
            )
        super().load_state_dict(state)
        self._fisher = state["fisher"].to(self._fisher, copy=True)


def _join(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
