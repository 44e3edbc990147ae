"""View: one prediction as utilities and selectors see it, each side computed once, when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from wise_atta import signals


@dataclass(eq=False, repr=False)
class View:
    """One batch as the model saw it. Everything is detached, and nothing is computed before it is asked for.

    Parameters
    ----------
    number
        Which batch of the stream this is, from 1.
    logits, features
        What the one forward gave: [n, C] and [n, d].
    head
        The current classifier head, features → logits.
    anchor
        Runs the anchor's forward and gives its logits. Called at most once, and only if drift is asked for.
    age
        How many batches the model has seen since it started or was reset, this one included. 0: as many as
        `number` says.
    """

    number: int
    logits: Tensor
    features: Tensor
    head: Callable[[Tensor], Tensor]
    anchor: Callable[[], Tensor]
    age: int = 0

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def classes(self) -> int:
        return self.logits.shape[1]

    @cached_property
    def probs(self) -> Tensor:
        return self.logits.softmax(dim=1)

    @cached_property
    def entropy(self) -> Tensor:
        return signals.entropy(self.logits)

    @cached_property
    def drift(self) -> Tensor:
        """‖p − p̄‖₂ for each sample. Costs the anchor's forward, once."""
        return signals.drift(self.logits, self.anchor())

    @property
    def drift_known(self) -> bool:
        """Whether drift was computed already, so that looking at it costs nothing."""
        return "drift" in self.__dict__
