"""What can be learned without a label? Objectives over one forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wise_atta import errors, signals
from wise_atta.how.labels import Labels
from wise_atta.model import Classifier, Forward


class Objective:
    """A loss of an unlabelled batch. None means that nothing in the batch is worth a step."""

    def __call__(self, model: Classifier, forward: Forward, labels: Labels) -> Tensor | None:
        raise NotImplementedError

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
        entropy = signals.entropy(forward.logits)
        if self.below is None:
            return entropy.mean()
        keep = entropy.detach() < signals.entropy_threshold(forward.logits.shape[1], self.below)
        keep &= ~labels.mask(forward)
        kept = entropy[keep]
        return kept.mean() if len(kept) else None

    def __repr__(self) -> str:
        return f"Entropy(below={self.below})"
