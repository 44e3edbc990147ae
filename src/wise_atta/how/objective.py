"""What can be learned without a label? Objectives over one forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wise_atta import errors, signals
from wise_atta.how.filters import Redundancy, confident, trust
from wise_atta.how.labels import Labels
from wise_atta.model import Forward, Weights


class Objective:
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

    def __call__(self, model: Weights, forward: Forward, labels: Labels) -> Tensor | None:
        entropy = signals.entropy(forward.logits)
        if self.below is None:
            return entropy.mean()
        keep = confident(entropy, forward.logits.shape[1], self.below) & ~labels.mask(forward)
        kept = entropy[keep]
        return kept.mean() if len(kept) else None

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

    def __call__(self, model: Weights, forward: Forward, labels: Labels) -> Tensor | None:
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
