"""The same sooner: what can be known before the host has read a batch's score is computed while it waits.

Grants that are certain are foreseen; the backward of a batch that nobody can ask about begins at once; slopes of losses
in the logits are taken in closed form, so that a device need not wait for values; one copy goes to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wise_atta import signals
from wise_atta.engine.direct import Direct, Seen
from wise_atta.how import Entropy, Labels, Loss, Objective, Sums, confident
from wise_atta.model import Forward, Gradients, Weights
from wise_atta.model.checks import all_finite
from wise_atta.stream import Inputs
from wise_atta.what import Selector


@dataclass(eq=False)
class Notes:
    """What is known of a forward before its batch is learned.

    Attributes
    ----------
    prepared
        The objective with its slope.
    early
        The gradients of an update that was begun; the graph is used up.
    """

    prepared: Prepared
    early: Gradients | None = None

    def __call__(self, model: Weights, objective: Objective, forward: Forward, labels: Labels) -> Sums:
        return Slopes(model, objective, forward, labels)


class Ahead(Direct):
    """Runs what the loop asks for as soon as it can be known."""

    def look(self, inputs: Inputs, number: int, age: int, *, want: int, count: int, learn: bool) -> Seen:
        parts, model = self.parts, self.parts.classifier
        least, most = self._foresee(want, count)
        graph = learn and self._needs_graph(most)
        # It is certain that nothing but the batch itself will be learned, if it is.
        alone = most == 0 and parts.questions.clear
        forward = model.forward(inputs, grad=graph, keep=not alone or parts.update.needs_statistics)
        view = self._view(forward, number, age)
        # The one copy to the host of this batch: whether all is finite, the score, and what is worth learning from.
        numbers = [all_finite(inputs, forward.logits).double()]
        if want:
            numbers.append(parts.utility(view).double())
        notes = forward.notes = self._notes(forward) if graph else None
        sent = torch.stack(numbers)
        if notes is not None:
            sent = torch.cat([sent, notes.prepared.keep.to(sent)])
        # It is certain that questions will be asked: the scores of the samples go along.
        ranked = least > 0 and type(parts.selector).pick is Selector.pick
        if ranked:
            sent = torch.cat([sent, parts.selector.scores(view).to(sent)])
        arrived = model.send(sent)
        if notes is not None and alone:
            # The device need not wait for the host.
            self._begin(forward, notes)
            forward.first = None
        read = arrived()
        rest = read[len(numbers) :]
        if notes is not None:
            notes.prepared.kept, rest = rest[: len(view)], rest[len(view) :]
        score, used_up = read[1] if want else float("nan"), notes is not None and notes.early is not None
        return Seen(forward, view, score, bool(read[0]), rest if ranked else None, used_up)

    def pick(self, seen: Seen, k: int) -> list[int]:
        return super().pick(seen, k) if seen.scores is None else self.parts.selector.best(seen.view, k, seen.scores)

    def again(self, inputs: Inputs, redo: bool | None) -> Forward:
        forward = super().again(inputs, redo)
        if redo is not None:
            # Its sums are taken in the order of the forward that failed.
            with torch.no_grad():
                notes = forward.notes = self._notes(forward)
                assert notes is not None
                if redo:
                    self._begin(forward, notes)
            notes.prepared.kept = notes.prepared.keep.double().tolist()
        return forward

    def failed(self, forward: Forward | None) -> Any:
        """Whether the update of a forward whose objective was prepared was begun early; None if it was not prepared."""
        return None if forward is None or forward.notes is None else forward.notes.early is not None

    def _foresee(self, want: int, count: int) -> tuple[int, int]:
        """The fewest and the most questions that this batch can bring, as far as it pays to know."""
        if want == 0:
            return 0, 0
        return (want, want) if self.parts.questions.free else self.parts.policy.foresee(want, samples=count)

    def _notes(self, forward: Forward) -> Notes | None:
        objective = self.parts.update.objective
        prepared = None if objective is None else prepare(objective, forward.logits.detach())
        return None if prepared is None else Notes(prepared)

    def _begin(self, forward: Forward, notes: Notes) -> None:
        """Take the gradients of an update without labels."""
        step = self.parts.update.unlabelled_step
        if step is not None:
            group, weight = step
            notes.early = self.parts.classifier.pull(forward, notes.prepared.slope(weight), [group])


class Prepared:
    """The mean of an objective over the samples it keeps, with its slope in the logits: nothing waits for the device.

    The value is that of the plain way but for the order of its sums.

    Parameters
    ----------
    each, keep, rise
        The objective of each sample, 1 where it counts and 0 where not, and what it rises with in each logit.
    with_labelled
        Whether labelled samples count too.

    Attributes
    ----------
    kept
        `keep` on the host, as soon as it has been read; before that, None.
    """

    def __init__(self, each: Tensor, keep: Tensor, rise: Tensor, with_labelled: bool) -> None:
        self.each, self.keep, self.rise, self.with_labelled = each, keep, rise, with_labelled
        self.kept: Sequence[float] | None = None

    def empty(self, labels: Labels | None = None) -> bool:
        """Whether it is known that the mean is over no sample."""
        rows = self._left_out(labels)
        return self.kept is not None and not any(kept for row, kept in enumerate(self.kept) if row not in rows)

    def slope(self, weight: float = 1.0, labels: Labels | None = None) -> Tensor:
        """weight·∂mean/∂logits, a tensor of the caller's own; zero where nothing is kept."""
        rows = self._left_out(labels)
        slope = self.rise * (weight / self._among(rows))
        for row in rows:
            slope[row].zero_()
        return slope

    def value(self, labels: Labels | None = None) -> Tensor:
        """The mean; zero where nothing is kept."""
        rows = self._left_out(labels)
        total = (self.each * self.keep).sum()
        for row in rows:
            total = total - self.each[row] * self.keep[row]
        return total / self._among(rows)

    def _left_out(self, labels: Labels | None) -> Sequence[int]:
        return () if labels is None or self.with_labelled else labels.rows

    def _among(self, rows: Sequence[int]) -> Tensor | float:
        """How many samples the mean is over; 1 where there is none."""
        if self.kept is None:
            return (self.keep.sum() - sum(self.keep[row] for row in rows)).clamp_min(1)
        return max(sum(self.kept) - sum(self.kept[row] for row in rows), 1.0)


def prepare(objective: Objective, logits: Tensor) -> Prepared | None:
    """An objective with its slope in closed form; None where that is not known."""
    if type(objective) is not Entropy:
        return None
    log_p = logits.log_softmax(dim=1)
    p = log_p.exp()
    entropy = signals.mean_surprise(p, log_p)
    keep = (
        torch.ones_like(entropy) if objective.below is None else confident(entropy, logits.shape[1], objective.below)
    ).to(entropy.dtype)
    rise = -p * (log_p + entropy.unsqueeze(1)) * keep.unsqueeze(1)  # ∂H/∂z = −p·(log p + H)
    return Prepared(entropy, keep, rise, with_labelled=objective.below is None)


class _Sloped(torch.autograd.Function):
    """A number that is known, and its slope."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None


class _Unlabelled(Loss):
    """An objective whose slope is known."""

    def __init__(self, forward: Forward, labels: Labels, prepared: Prepared) -> None:
        self.forward, self.labels, self.prepared = forward, labels, prepared

    @cached_property
    def graph(self) -> Tensor:  # type: ignore[override]  # made only where somebody wants it
        graph: Tensor = _Sloped.apply(self.forward.logits, self.value, self.prepared.slope(labels=self.labels))
        return graph

    @cached_property
    def value(self) -> Tensor:
        return self.prepared.value(self.labels)


class _Supervised(Loss):
    """L_sup over labelled rows of the batch."""

    def __init__(self, logits: Tensor, labels: Labels) -> None:
        self.logits, self.labels = logits, labels

    @cached_property
    def graph(self) -> Tensor:  # type: ignore[override]
        return self.labels.loss(self.logits)

    @cached_property
    def value(self) -> Tensor:
        return self.graph.detach() if "graph" in vars(self) else self.labels.loss(self.logits.detach())


class Slopes(Sums):
    """The losses of a forward by their slopes in the logits, where these are known: values are for later."""

    @property
    def prepared(self) -> Prepared:
        prepared: Prepared = self.forward.notes.prepared
        return prepared

    def unlabelled(self) -> Loss | None:
        return None if self.prepared.empty(self.labels) else _Unlabelled(self.forward, self.labels, self.prepared)

    def supervised(self) -> Loss | None:
        if not self.labels or self.labels.late:
            return super().supervised()
        logits, self._features = self.labels.outputs(self.model, self.forward)
        return _Supervised(logits, self.labels)

    def gradients(self, group: str, *weighted: tuple[float, Loss | None]) -> Gradients:
        if self.labels.late:
            return super().gradients(group, *weighted)
        if self.forward.notes.early is not None:
            early: Gradients = self.forward.notes.early
            return early
        weights = {type(loss): weight for weight, loss in weighted if loss is not None}
        if not weights:
            return {}
        slope = self.prepared.slope(weights.get(_Unlabelled, 0.0), self.labels)
        if _Supervised in weights:
            for row, own in zip(self.labels.rows, self._slopes, strict=True):
                slope[row].add_(own, alpha=weights[_Supervised])
        return self.model.pull(self.forward, slope, [group])

    def of_head(self, group: str, weight: float = 1.0) -> Gradients:
        """In closed form where the head is linear: with z = W·f + b, ∂L/∂b is the slope in z and ∂L/∂W that times f."""
        if self.labels.late or not self.model.head_is_linear:
            return super().of_head(group, weight)
        slopes = torch.stack(self._slopes) * weight
        features = torch.stack([self.forward.features[row].detach() for row in self.labels.rows])
        by_name = {"weight": slopes.T @ features, "bias": slopes.sum(dim=0)}
        return {group: [by_name[name.rpartition(".")[2]] for name in self.model.layout.groups[group]]}

    @cached_property
    def _slopes(self) -> list[Tensor]:
        """∂L_sup/∂logits at the labelled rows: w·(p − 1[y])/|Q|."""
        slopes, labels = [], self.labels
        for row, label, weight in zip(labels.rows, labels.labels, labels.weights, strict=True):
            slope = self.forward.logits[row].detach().softmax(dim=0)
            slope[label].sub_(1)
            scale = weight / len(labels)
            slopes.append(slope if scale == 1 else slope.mul_(scale))
        return slopes
