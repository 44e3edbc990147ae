"""Utilities: how much a batch is worth a label. Six readings of one prediction; higher is more wanted.

The paper names them (equation 2 and the appendix on utilities) but gives neither sign nor k for the last five. Here
entropies count negatively, so that confident batches come first as they do under `Count`, and drifts count positively.
`sign` turns that round. k is 8, an eighth of the paper's batch of 64, or the whole batch where it is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from wise_atta import errors, signals
from wise_atta.part import at_least
from wise_atta.view import View

Sign = Literal[1, -1]


class Utility(Protocol):
    """Anything that reads one number, a 0-dim tensor, off a view of a batch."""

    @property
    def needs_anchor(self) -> bool:
        """Whether it costs the anchor's forward on every batch, selected or not."""
        ...

    def __call__(self, view: View) -> Tensor: ...


@dataclass(frozen=True)
class Count:
    """How many predictions are confident: #{i : H(p_i) < τ_ent} (equation 2).

    Parameters
    ----------
    threshold_fraction
        τ_ent as a fraction of ln C, the largest entropy there is.

    Examples
    --------
    >>> from wise_atta.view import View
    >>> logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    >>> Count()(View(1, logits, logits, head=lambda f: f, anchor=lambda: logits))
    tensor(1.)
    """

    threshold_fraction: float = 0.4
    needs_anchor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.threshold_fraction <= 1:
            raise errors.BadConfig(
                f"threshold_fraction={self.threshold_fraction} must lie in (0, 1]: it is a part of ln C"
            )

    def __call__(self, view: View) -> Tensor:
        sure = signals.confident(view.entropy, view.logits.shape[1], self.threshold_fraction)
        # Not in the dtype of the logits: half precision cannot count beyond a few hundred.
        return sure.sum(dtype=torch.float32)


class _Signed:
    """The mean of a reading, over all samples or the k where it is most extreme, with a sign."""

    needs_anchor: ClassVar[bool] = False
    largest: ClassVar[bool] = True
    sign: Sign
    k: int | None = None

    def __post_init__(self) -> None:
        if self.sign not in (1, -1):
            raise errors.BadConfig(f"sign={self.sign!r} must be 1 or -1")
        at_least(1, k=self.k)

    def __call__(self, view: View) -> Tensor:
        values = view.drift if self.needs_anchor else view.entropy
        if self.k is not None:
            values = values.topk(min(self.k, len(values)), largest=self.largest).values
        return self.sign * values.mean()


@dataclass(frozen=True)
class MeanEntropy(_Signed):
    """Mean entropy of the predictions.

    Parameters
    ----------
    sign
        −1: confident batches first. 1: unsure batches first.
    """

    sign: Sign = -1


@dataclass(frozen=True)
class TopKEntropy(_Signed):
    """Mean entropy of the k least confident predictions.

    Parameters
    ----------
    k
        How many predictions count.
    sign
        −1: batches whose least confident predictions are confident come first. 1: the reverse.
    """

    k: int = 8
    sign: Sign = -1


@dataclass(frozen=True)
class LowKEntropy(_Signed):
    """Mean entropy of the k most confident predictions.

    Parameters
    ----------
    k
        How many predictions count.
    sign
        −1: batches with some very confident predictions come first. 1: the reverse.
    """

    largest: ClassVar[bool] = False
    k: int = 8
    sign: Sign = -1


@dataclass(frozen=True)
class MeanDrift(_Signed):
    """Mean drift ‖p − p̄‖₂ of the predictions from the anchor's. Costs the anchor's forward on every batch.

    Parameters
    ----------
    sign
        1: batches on which the model has moved come first. −1: the reverse.
    """

    needs_anchor: ClassVar[bool] = True
    sign: Sign = 1


@dataclass(frozen=True)
class TopKDrift(_Signed):
    """Mean drift of the k predictions that moved most. Costs the anchor's forward on every batch.

    Parameters
    ----------
    k
        How many predictions count.
    sign
        1: batches with some predictions that moved far come first. −1: the reverse.
    """

    needs_anchor: ClassVar[bool] = True
    k: int = 8
    sign: Sign = 1
