"""The order of the paper: forward, score, decision, selection; then the losses, differentiated by autograd."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from wise_atta import errors
from wise_atta.anchor import Anchor
from wise_atta.how import Update
from wise_atta.model import Forward, Weights
from wise_atta.model.checks import all_finite
from wise_atta.stream import Inputs
from wise_atta.view import View
from wise_atta.what import Selector
from wise_atta.when import Policy, Utility
from wise_atta.who import Questions


@dataclass(eq=False)
class Seen:
    """One batch after its forward: as the parts see it, its score (NaN if nobody may ask), whether all is finite.

    `scores` are those of its samples where they are known already; `used_up` says that its graph has been used.
    """

    forward: Forward
    view: View
    score: float
    finite: bool
    scores: list[float] | None = None
    used_up: bool = False


class Parts(Protocol):
    """What an adapter is made of. Policy, utility and selector may be replaced between two batches."""

    classifier: Weights
    anchor: Anchor | None
    update: Update
    policy: Policy
    utility: Utility
    selector: Selector
    questions: Questions


@dataclass(eq=False)
class Direct:
    """Runs what the loop asks for, one after the other.

    Parameters
    ----------
    parts
        The adapter that it works for.
    """

    parts: Parts

    def look(self, inputs: Inputs, number: int, age: int, *, want: int, count: int, learn: bool) -> Seen:
        """Run the network on a batch of `count`, and score it if up to `want` questions may be asked about it."""
        forward = self.parts.classifier.forward(inputs, grad=learn and self._needs_graph(want))
        view = self._view(forward, number, age)
        numbers = [all_finite(inputs, forward.logits).double()]
        if want:
            numbers.append(self.parts.utility(view).double())
        finite, score = (*self.parts.classifier.send(torch.stack(numbers))(), float("nan"))[:2]
        return Seen(forward, view, score, bool(finite))

    def pick(self, seen: Seen, k: int) -> list[int]:
        """The rows to ask about, at most k."""
        return self.parts.selector.pick(seen.view, k)

    def again(self, inputs: Inputs, redo: Any) -> Forward:
        """The forward of a batch whose graph is gone; `redo` is what `failed` gave for it."""
        return self.parts.classifier.forward(inputs, grad=self.parts.update.needs_graph)

    def failed(self, forward: Forward | None) -> Any:
        """What `again` has to know of a forward that could not be learned, to end in the same bits."""
        return None

    def _needs_graph(self, most: int) -> bool:
        """Whether the forward of a batch with at most so many questions keeps its graph.

        Where only selected batches learn, it is not known yet whether this one will. On an accelerator a graph takes
        memory but no time, so it is kept just in case; on a CPU fresh memory costs time too.
        """
        unsure = self.parts.update.only_selected and (most == 0 or self.parts.classifier.device.type == "cpu")
        return self.parts.update.needs_graph and not unsure

    def _view(self, forward: Forward, number: int, age: int) -> View:
        # The closures must not hold the forward: a view may outlive its graph.
        model, inputs, version, alive = self.parts.classifier, forward.inputs, forward.version, weakref.ref(forward)
        anchor_now = None if self.parts.anchor is None else self.parts.anchor.now()

        def anchor_logits() -> Tensor:
            if anchor_now is None:
                raise errors.BadConfig("drift needs an anchor: give the adapter anchor=Anchor()")
            return model.forward(inputs, version=anchor_now(), keep=False, beside=alive()).logits

        return View(
            number,
            forward.logits.detach(),
            forward.features.detach(),
            head=lambda features: model.head(features, version),
            anchor=anchor_logits,
            age=age,
        )
