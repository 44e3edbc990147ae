"""What can be done with an adapter beside its loop: answer for others, look at it, steer it, keep it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from wise_atta import errors, saving
from wise_atta.anchor import Anchor
from wise_atta.guard import Guard
from wise_atta.how import Update
from wise_atta.model import Weights
from wise_atta.prediction import Prediction, Step
from wise_atta.what import Selector
from wise_atta.when import Policy, Utility
from wise_atta.who import Annotator, AnswerLike, Counts, Query, Questions


class Controls:
    """Everything that an `Adapter` offers but the loop itself."""

    classifier: Weights
    update: Update
    policy: Policy
    utility: Utility
    selector: Selector
    questions: Questions
    anchor: Anchor | None
    guard: Guard | None

    def __init__(self) -> None:
        self._number = 0
        self._age = 0
        self._frozen = False
        self._latest: Prediction | None = None
        self._callbacks: list[Callable[[Step], None]] = []
        self._lock = threading.RLock()
        self._half_done = False

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def annotator(self) -> Annotator | None:
        """Who answers in `step`."""
        return self.questions.annotator

    @annotator.setter
    def annotator(self, annotator: Annotator | None) -> None:
        self.questions.annotator = annotator

    def answer(self, answers: Mapping[str, AnswerLike]) -> None:
        """Record answers without a batch at hand. Their labels are learned with the next `learn`."""
        with self._lock:
            self.questions.answer(answers)

    def show(self, ids: Sequence[str]) -> None:
        """Note that somebody has seen these questions: they stay charged even if they expire."""
        with self._lock:
            self.questions.show(ids)

    def give_up(self, ids: Sequence[str]) -> None:
        """Close open questions without an answer. The labels of those that nobody has seen return to the account."""
        with self._lock:
            self.questions.give_up(ids)

    @property
    def counts(self) -> Counts:
        """How many questions were asked, shown, answered, learned, not tellable and expired."""
        return self.questions.counts

    @property
    def open(self) -> list[Query]:
        """Questions that wait for an answer, oldest first."""
        return self.questions.open

    # -- looking at it ------------------------------------------------------------------------------------------

    @property
    def latest(self) -> Prediction | None:
        """The latest prediction that waits for `learn`, if any: after a `step` that failed, the one of its batch."""
        return self._latest

    @property
    def number(self) -> int:
        """How many batches it has seen."""
        return self._number

    def on_step(self, callback: Callable[[Step], None]) -> None:
        """Call `callback(step)` after every `learn`."""
        self._callbacks.append(callback)

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name}={getattr(self, name)!r}" for name in ("classifier", "policy", "utility", "selector", "update")
        )
        return f"Adapter({parts})"

    # -- steering it --------------------------------------------------------------------------------------------

    def freeze(self, frozen: bool = True) -> None:
        """Stop asking and learning (or go on). Answers that arrive meanwhile are kept and learned later."""
        with self._lock:
            self._frozen = frozen

    def export(self) -> nn.Module:
        """A plain `nn.Module` with the adapted weights, for the same inputs as the original."""
        with self._lock:
            return self.classifier.export(self.update.predicts())

    def reset(self, *, model: bool = True, policy: bool = False, account: bool = False) -> None:
        """Return to the source.

        Parameters
        ----------
        model
            Tensors, anchor, optimizer and running quantities.
        policy
            What the policy remembers of past scores.
        account
            The labels spent and earned, and with them every open question.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad(), self.classifier.at_once():
            if model:
                self.update.reset()
                self.classifier.reset_statistics()
                self._drop_graph()
                self._begin()
            self._forget(policy, account)

    def restart(self, *, policy: bool = True, account: bool = True) -> None:
        """Let anchor and selector begin anew at the current tensors, as the published code does at a new domain."""
        with self._lock:
            self._begin()
            self._forget(policy, account)

    def _begin(self) -> None:
        self._age = 0
        self.selector.reset()
        if self.anchor is not None:
            self.anchor.start(self.classifier.live)
        if self.guard is not None:
            self.guard.reset()

    def _forget(self, policy: bool, account: bool) -> None:
        self.policy.reset(history=policy, account=account)
        if account:
            self.questions.reset()

    # -- keeping it ---------------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        raise errors.WiseAttaError(
            "an adapter is neither copied nor pickled: make another around the same model with the same options, and "
            "load_state_dict() there what state_dict() gives here"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on to the same bits: about three times the adapted tensors, never the model."""
        with self._lock:
            if self._half_done:
                # Another thread has waited for the lock: only a handler of signals comes in the middle.
                raise errors.WiseAttaError(
                    "a state cannot be saved in the middle of predict or learn, where a signal has interrupted them: "
                    "let the handler set a flag, and save when the call is done"
                )
            return saving.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. A state of another model, method or version is refused and changes nothing."""
        with self._lock, torch.inference_mode(False), torch.no_grad(), self.classifier.at_once():
            saving.load(self, state)
            self._drop_graph()

    # -- what the loop and these share ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _amid(self) -> Iterator[None]:
        """Within this nothing can be saved: what belongs together is changed one by one."""
        self._half_done = True
        try:
            yield
        finally:
            self._half_done = False

    def _drop_graph(self) -> None:
        """At most one graph is alive: an older prediction keeps its input, and `learn` repeats its forward."""
        if self._latest is not None and self._latest._unlearned is not None:
            self._latest._unlearned.drop_graph()
            self._latest._unlearned.redo = None
        self._latest = None
