"""What can be learned without a label? Objectives over one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wise_atta import errors, signals
from wise_atta.how.filters import Redundancy, confident, trust
from wise_atta.how.labels import Labels
from wise_atta.model import Classifier, Forward


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

    def loss(self, forward: Forward, labels: Labels) -> Tensor | None:
        """The mean as a part of the forward's graph; None if nothing is kept."""
        if self.empty(labels):
            return None
        value: Tensor = _Sloped.apply(forward.logits, self.value(labels), self.slope(labels=labels))
        return value

    def _left_out(self, labels: Labels | None) -> Sequence[int]:
        return () if labels is None or self.with_labelled else labels.rows

    def _among(self, rows: Sequence[int]) -> Tensor | float:
        """How many samples the mean is over; 1 where there is none."""
        if self.kept is None:
            return (self.keep.sum() - sum(self.keep[row] for row in rows)).clamp_min(1)
        return max(sum(self.kept) - sum(self.kept[row] for row in rows), 1.0)


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


class Objective:
    """A loss of an unlabelled batch. None means that nothing in the batch is worth a step.

    Attributes
    ----------
    needs_statistics
        Whether it wants the statistics that the forward normalised with.
    """

    needs_statistics: bool = False

    def __call__(self, model: Classifier, forward: Forward, labels: Labels) -> Tensor | None:
        raise NotImplementedError

    def prepare(self, logits: Tensor) -> Prepared | None:
        """Work out what does not depend on labels, without waiting for the device. None: nothing can be."""
        return None

    def start(self, model: Classifier) -> None:
        """Measure what must be known of the source before the stream starts."""

    def reset(self) -> None:
        """Forget running quantities."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up running quantities."""


class Entropy(Objective):
    """Mean entropy, of the whole batch or of its confident, unlabelled samples.

    Parameters
    ----------
    below
        Keep samples with H < below·ln C and leave the labelled ones out; None keeps all n (the paper's L_ent).
    """

    def __init__(self, below: float | None = None) -> None:
        if below is not None and below <= 0:
            raise errors.BadConfig(f"below is a fraction of ln C above 0, or None for no filter, not {below}")
        self.below = below

    def __call__(self, model: Classifier, forward: Forward, labels: Labels) -> Tensor | None:
        if isinstance(forward.prepared, Prepared):
            return forward.prepared.loss(forward, labels)
        entropy = signals.entropy(forward.logits)
        if self.below is None:
            return entropy.mean()
        keep = confident(entropy, forward.logits.shape[1], self.below) & ~labels.mask(forward)
        kept = entropy[keep]
        return kept.mean() if len(kept) else None

    def prepare(self, logits: Tensor) -> Prepared | None:
        log_p = logits.log_softmax(dim=1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(dim=1)
        keep = torch.ones_like(entropy) if self.below is None else confident(entropy, logits.shape[1], self.below)
        keep = keep.to(entropy.dtype)
        rise = -p * (log_p + entropy.unsqueeze(1)) * keep.unsqueeze(1)  # ∂H/∂z = −p·(log p + H)
        return Prepared(entropy, keep, rise, with_labelled=self.below is None)

    def __repr__(self) -> str:
        return f"Entropy(below={self.below})"


class ReliableEntropy(Objective):
    """(1/|S|) Σ_S exp(E₀ − H)·H over the samples S that are confident, new and not labelled; the weight is a constant.

    Parameters
    ----------
    below
        E₀ as a share of ln C.
    epsilon, mean_momentum
        ε, and the momentum of p̄. See `Redundancy`.
    """

    def __init__(self, *, below: float = 0.4, epsilon: float = 0.05, mean_momentum: float = 0.9) -> None:
        if below <= 0:
            raise errors.BadConfig(f"below is a fraction of ln C above 0, not {below}")
        self.below = below
        self.redundancy = Redundancy(epsilon, mean_momentum)

    def __call__(self, model: Classifier, forward: Forward, labels: Labels) -> Tensor | None:
        classes = forward.logits.shape[1]
        entropy, probs = signals.entropy(forward.logits), forward.logits.detach().softmax(dim=1)
        keep = confident(entropy, classes, self.below)  # H < E₀
        keep &= self.redundancy.new(probs)  # |cos(p̄, p)| < ε
        keep &= ~labels.mask(forward)
        self.redundancy.follow(probs[keep])  # p̄ ← 0.9·p̄ + 0.1·(mean of the kept p)
        kept = entropy[keep]
        return (trust(kept, classes, self.below) * kept).mean() if len(kept) else None  # exp(E₀ − H)·H

    def reset(self) -> None:
        self.redundancy.reset()

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.redundancy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.redundancy.load_state_dict(state["mean"])

    def __repr__(self) -> str:
        return f"ReliableEntropy(below={self.below}, redundancy={self.redundancy!r})"
