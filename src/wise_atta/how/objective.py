"""Objectives: what can be learned from one forward without a label."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wise_atta import signals
from wise_atta.average import Redundancy
from wise_atta.how.labels import Labels
from wise_atta.model import Forward, Weights
from wise_atta.part import Part, above, running
from wise_atta.signals import confident, trust


class Objective(Part):
    """A loss of an unlabelled batch. None means that nothing in the batch is worth a step.

    Attributes
    ----------
    needs_statistics
        Whether it wants the statistics that the forward normalised with.
    """

    needs_statistics: bool = False

    def __call__(self, model: Weights, forward: Forward, labels: Labels) -> Tensor | None:
        raise NotImplementedError

    def start(self, model: Weights) -> None:
        """Measure what must be known of the source before the stream starts."""


@dataclass(eq=False)
class Entropy(Objective):
    """Mean entropy, of the whole batch or of its confident, unlabelled samples.

    Parameters
    ----------
    below
        Keep samples with H < below·ln C and leave the labelled ones out; None keeps all n (the paper's L_ent).
    """

    below: float | None = None

    def __post_init__(self) -> None:
        above(0, below=self.below)

    def __call__(self, model: Weights, forward: Forward, labels: Labels) -> Tensor | None:
        entropy = signals.entropy(forward.logits)
        if self.below is None:
            return entropy.mean()
        keep = confident(entropy, forward.logits.shape[1], self.below) & ~labels.mask(forward)
        kept = entropy[keep]
        return kept.mean() if len(kept) else None


@dataclass(kw_only=True, eq=False)
class ReliableEntropy(Objective):
    """(1/|S|) Σ_S exp(E₀ − H)·H over the samples S that are confident, new and not labelled; the weight is a constant.

    Parameters
    ----------
    below
        E₀ as a share of ln C.
    epsilon, mean_momentum
        ε, and the momentum of p̄. See `Redundancy`.
    """

    below: float = 0.4
    epsilon: float = 0.05
    mean_momentum: float = 0.9
    redundancy: Redundancy = running(key="mean")

    def __post_init__(self) -> None:
        above(0, below=self.below)
        self.redundancy = Redundancy(momentum=self.mean_momentum, epsilon=self.epsilon)

    def __call__(self, model: Weights, forward: Forward, labels: Labels) -> Tensor | None:
        classes = forward.logits.shape[1]
        entropy, probs = signals.entropy(forward.logits), forward.logits.detach().softmax(dim=1)
        keep = confident(entropy, classes, self.below)  # H < E₀
        keep &= self.redundancy.new(probs)  # |cos(p̄, p)| < ε
        keep &= ~labels.mask(forward)
        self.redundancy.follow(probs[keep])  # p̄ ← 0.9·p̄ + 0.1·(mean of the kept p)
        kept = entropy[keep]
        return (trust(kept, classes, self.below) * kept).mean() if len(kept) else None  # exp(E₀ − H)·H
