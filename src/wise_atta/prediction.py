"""Prediction and Step: what `predict` and `learn` give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from wise_atta import errors
from wise_atta.model import Forward, Statistics, Work
from wise_atta.stream import Inputs
from wise_atta.view import View
from wise_atta.when import Decision, Policy
from wise_atta.who import Counts, Query


@dataclass(eq=False)
class Unlearned:
    """What `learn` needs of a batch, consumed once.

    Attributes
    ----------
    owner
        The adapter that predicted, if it may learn the batch; frozen, it settles any of its own.
    inputs
        The batch.
    forward
        Its forward with the graph, as long as that is alive; `learn` repeats it otherwise.
    statistics
        What a forward that is gone normalised with: a moving average has still to follow it.
    redo
        What the engine has to do with a repeated forward, so that it gives the same bits.
    asked
        Ids of the questions about the batch.
    decision
        How the policy decided.
    tripped
        Why the guard went back before the batch was predicted, if it did.
    work, seconds
        What predicting took.
    """

    owner: object
    inputs: Inputs
    forward: Forward | None
    statistics: Statistics | None = None
    redo: Any = None
    asked: tuple[str, ...] = ()
    decision: Decision = field(default_factory=Decision)
    tripped: str | None = None
    work: Work = field(default_factory=Work)
    seconds: float = 0.0

    def drop_graph(self) -> None:
        """Let the graph go; its statistics are still to move the average."""
        if self.forward is not None:
            self.statistics = self.forward.statistics
        self.forward = None


@dataclass(frozen=True)
class Learned:
    """What came of learning a batch: its forward, the losses, classes by the method's own teacher, the guard's word."""

    forward: Forward | None
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    taught: Mapping[str, int] = field(default_factory=dict)
    tripped: str | None = None


@dataclass(eq=False)
class Prediction:
    """What `predict` gives. It owns its forward; `learn` consumes it once.

    Attributes
    ----------
    logits
        [n, C], computed before any update on this batch, detached.
    queries
        The questions about this batch, at most what the budget allows; often empty.
    sent
        The same where the method has a teacher of its own: it answers them, nobody else is asked.
    utility
        The batch's score, or NaN if none was computed.
    spent
        Labels charged so far.
    allowed
        How many could have been.
    number
        Of the batch, from 1; 0 after plain inference.
    view
        The batch as the model saw it; None after plain inference.
    """

    logits: Tensor
    queries: list[Query] = field(default_factory=list)
    sent: list[Query] = field(default_factory=list)
    utility: float = float("nan")
    spent: int = 0
    allowed: float = 0
    number: int = 0
    view: View | None = field(default=None, repr=False)
    _unlearned: Unlearned | None = field(default=None, repr=False)
    _learned: bool = field(default=False, repr=False)

    def __len__(self) -> int:
        return len(self.logits)

    def unlearned_by(self, adapter: object, frozen: bool) -> Unlearned:
        """What an adapter needs to learn from it; an error where that cannot be."""
        batch = self._unlearned
        if self._learned:
            raise errors.AlreadyLearned(f"batch {self.number} was learned already: call predict again for a new batch")
        if batch is None and frozen:
            return Unlearned(adapter, self.logits, None)
        if batch is None or (batch.owner is not adapter and not (frozen and batch.owner is None)):
            raise errors.BadInput("this prediction cannot be learned: it came from plain inference or another adapter")
        return batch


@dataclass(frozen=True)
class Step:
    """What happened with one batch, for records and callbacks.

    Attributes
    ----------
    number
        Of the batch, from 1.
    samples
        How many it had.
    utility
        Its score, or NaN if none was computed.
    threshold
        The score from which on a batch was selected; it, `rate` and `debt` are the policy's `Decision`.
    rate
        The share of batches that was to be selected at that moment.
    debt
        The labels by which the policy was behind before it decided.
    asked
        The questions about this batch.
    learned
        The questions whose labels were learned with it.
    late
        How many of those were about earlier batches.
    stale
        Labels that came too late to be learned.
    expired
        Questions that were closed without an answer.
    spent
        Labels charged so far.
    allowed
        How many could have been.
    counts
        How many questions came how far, of all batches.
    losses
        Tensors, read only by who wants them; `skipped` is 1 where nothing in the batch was worth a step.
    work
        How often the network was run.
    seconds
        How long `predict` and `learn` took.
    tripped
        Why the guard went back to a good state, where it did.
    """

    number: int
    samples: int
    utility: float
    threshold: float
    rate: float
    debt: float
    asked: tuple[str, ...]
    learned: tuple[str, ...]
    late: int
    stale: tuple[str, ...]
    expired: tuple[str, ...]
    spent: int
    allowed: float
    counts: Counts
    losses: Mapping[str, Tensor]
    work: Work
    seconds: float
    tripped: str | None = None

    @classmethod
    def of(cls, out: Prediction, batch: Unlearned, policy: Policy, **rest: Any) -> Step:
        """The step that a batch was, with what came of learning it."""
        return cls(
            number=out.number,
            samples=len(out.logits),
            utility=out.utility,
            threshold=batch.decision.threshold,
            rate=batch.decision.rate,
            debt=batch.decision.debt,
            asked=batch.asked,
            spent=policy.spent,
            allowed=policy.allowed,
            **rest,
        )
