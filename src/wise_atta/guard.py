"""Guard: notices collapse in what the stream shows, and returns to the last good state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wise_atta import errors, signals
from wise_atta.anchor import Anchor
from wise_atta.how import Update
from wise_atta.model import Version, Weights
from wise_atta.stream import Inputs
from wise_atta.view import View
from wise_atta.who.query import loading, plain

_log = logging.getLogger("wise_atta.guard")
# A share of classes read off fewer predictions than these says little.
_FEW = 32


@dataclass(frozen=True)
class _Seen:
    """One batch: its size, how often each class was predicted, and the sum of the entropies."""

    samples: int
    classes: Tensor
    entropy: float


@dataclass(frozen=True)
class _Look:
    """The window: how many predictions, which class leads, its share, the number of classes in effect, mean entropy."""

    total: int
    leader: int
    share: float
    classes: float
    entropy: float


@dataclass(frozen=True)
class _Snapshot:
    """Adapted tensors, anchor and statistics after some batch."""

    batch: int
    update: Mapping[str, Tensor]
    anchor: Tensor | None
    running: Tensor | None

    def pack(self) -> dict[str, Any]:
        """What is saved of it."""
        return dict(plain(vars(self), "a snapshot", lambda tensor: tensor.detach().cpu().clone()))

    @classmethod
    def unpack(cls, state: Mapping[str, Any], device: torch.device) -> _Snapshot:
        """The snapshot that was saved. Its tensors are copies: those of inference mode cannot be learned with."""
        return cls(**plain(state, "a snapshot", lambda tensor: tensor.to(device, copy=True)))


@dataclass(kw_only=True, eq=False)
class Guard:
    """Watches a method of any kind for collapse, with nothing but its predictions to go by.

    Every batch adds its predictions to a window. An **alarm** is raised when the most predicted class has a share far
    above that in the most even window so far, when far fewer classes are predicted than there, when the mean entropy
    has fallen to next to nothing of what it was at first, or when audited samples are right far less often than before.
    An alarm may have an honest reason, such as a stretch of the stream with one class. So it is **confirmed** first:
    the last good state and the source model predict the same batch, and if either of them says much the same, the
    stream is like that and nothing happens. Otherwise the guard **trips**: tensors, anchor and statistics return to the
    last good state, momenta are dropped, and the batch is learned from there. Two trips with no good state between them
    lead back to the source.

    A snapshot is taken every so many batches if the window is calm, and counts as good once the next one is taken.

    Parameters
    ----------
    window
        How many predictions are looked back on.
    every
        Number of batches between snapshots, and between two attempts to confirm an alarm.
    share
        Alarm at this part of the way from the usual share of the most predicted class to 1.
    classes
        Alarm below this part of the usual number of predicted classes, 1/Σ f² with f the share of each.
    entropy
        Alarm below this part of the mean entropy at first.
    agree
        An alarm is confirmed if fewer than this part of the predictions are those of the last good state.
    audits, accuracy
        Alarm if of the last `audits` audited samples fewer are right than this part of the best such number so far.

    Attributes
    ----------
    trips
        How often it returned to a good state.
    """

    window: int = 256
    every: int = 10
    share: float = 0.5
    classes: float = 0.5
    entropy: float = 0.05
    agree: float = 0.6
    audits: int = 20
    accuracy: float = 0.5
    trips: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        counts = self.window, self.every, self.audits
        if min(counts) < 1:
            raise errors.BadConfig(f"window, every and audits must be at least 1, not {', '.join(map(str, counts))}")
        parts = self.share, self.classes, self.entropy, self.agree, self.accuracy
        if not all(0 <= part <= 1 for part in parts):
            raise errors.BadConfig(f"share, classes, entropy, agree and accuracy must be in [0, 1], not {parts}")

    def start(self, model: Weights, update: Update, anchor: Anchor | None) -> None:
        """Take charge of a method whose tensors are at the source."""
        if hasattr(self, "model"):
            raise errors.BadConfig("this guard watches another adapter already: make one for each")
        self.model, self.update, self.anchor = model, update, anchor
        self.reset()

    def reset(self) -> None:
        """Begin anew: the present state is good, and nothing was seen. Trips stay counted."""
        self._seen: list[_Seen] = []
        self._right: list[bool] = []
        self._usual: dict[str, float] = {}
        self._good: _Snapshot = self._snapshot(0)
        self._next: _Snapshot | None = None
        self._calm = self._wait = 0
        self._again = False

    def audit(self, right: bool) -> None:
        """Note whether the prediction for a sample drawn at random was right."""
        self._right = [*self._right, right][-self.audits :]
        if len(self._right) == self.audits:
            self._usual = self._usual | {"right": max(sum(self._right), self._usual.get("right", 0.0))}

    def check(self, view: View, inputs: Inputs) -> str | None:
        """Look at a batch before it is learned. If adaptation has collapsed, go back, and say why."""
        look = self._look(view)
        alarm = self._alarm(look)
        self._wait = max(self._wait - 1, 0)
        if alarm is None:
            self._keep(view.number, look)
            return None
        if self._wait or not self._confirmed(view, inputs):
            self._wait = self._wait or self.every
            return None
        self._return(alarm, view.number)
        return alarm

    def rescue(self, number: int) -> None:
        """Go back at once: the logits hold NaN or Inf although the inputs do not."""
        self._return("the logits hold NaN or Inf", number)

    # -- seeing it ----------------------------------------------------------------------------------------------

    def _look(self, view: View) -> _Look:
        counts = view.logits.argmax(dim=1).bincount(minlength=view.classes)
        # One copy to the host: counts are whole numbers that float64 holds exactly.
        *classes, entropy = torch.cat([counts.double(), view.entropy.double().sum().unsqueeze(0)]).tolist()
        seen = _Seen(len(view), torch.tensor(classes, dtype=torch.float64, device="cpu"), entropy)
        self._seen = [*self._seen, seen]
        while sum(seen.samples for seen in self._seen[1:]) >= self.window:
            self._seen = self._seen[1:]
        total = sum(seen.samples for seen in self._seen)
        share = torch.stack([seen.classes for seen in self._seen]).sum(dim=0) / total
        return _Look(
            total=total,
            leader=int(share.argmax()),
            share=float(share.max()),
            classes=1 / float(share.square().sum()),
            entropy=sum(seen.entropy for seen in self._seen) / total,
        )

    def _alarm(self, look: _Look) -> str | None:
        if look.total >= min(_FEW, self.window) and not {"share", "classes", "entropy"} <= set(self._usual):
            self._usual = self._usual | {"share": look.share, "classes": look.classes, "entropy": look.entropy}
        # Audited samples that are right about as often as ever leave nothing to suspect.
        enough = (1 + self.accuracy) / 2
        if len(self._right) == self.audits and sum(self._right) >= enough * self._usual["right"]:
            return None
        if self._accused:
            before = round(self._usual["right"])
            return f"{sum(self._right)} of the last {self.audits} audited samples are right, {before} were"
        if look.total < self.window:
            return None
        usual, last = self._usual, f"the last {look.total} predictions"
        if look.share >= self._level(self.share):
            return f"class {look.leader} is {look.share:.0%} of {last}, where the top class had {usual['share']:.0%}"
        if look.classes < self.classes * usual["classes"]:
            return f"{look.classes:.1f} classes share {last}, where {usual['classes']:.1f} did"
        if look.entropy < self.entropy * usual["entropy"]:
            return f"the mean entropy of {last} is {look.entropy:.2g}, at first it was {usual['entropy']:.2g}"
        return None

    def _level(self, part: float) -> float:
        """This part of the way from the usual share to 1."""
        return self._usual["share"] + part * (1 - self._usual["share"])

    @property
    def _accused(self) -> bool:
        return len(self._right) == self.audits and sum(self._right) < self.accuracy * self._usual["right"]

    def _confirmed(self, view: View, inputs: Inputs) -> bool:
        if self._accused:
            return True
        own = view.logits.argmax(dim=1)
        version = Version(self._good.update["flat"], self.model.layout, grad=False)
        good = self.model.forward(inputs, version=version, running=self._good.running).logits
        if _agreement(own, good) >= self.agree:
            return False
        source = self.model.forward(inputs, version=self.model.source(), statistics="source").logits
        sure = float(signals.entropy(source).mean()) < signals.entropy_threshold(view.classes)
        return not (sure and _agreement(own, source) >= self.agree)

    # -- keeping it ---------------------------------------------------------------------------------------------

    def _keep(self, number: int, look: _Look) -> None:
        """Take a snapshot when it is time and all is calm: half as far from the usual as an alarm."""
        if look.total < min(_FEW, self.window):
            return
        usual = self._usual
        if look.total >= self.window:
            even = {"share": min(look.share, usual["share"]), "classes": max(look.classes, usual["classes"])}
            self._usual = usual = usual | even
        calm = (
            look.share < self._level(self.share / 2)
            and look.classes >= (1 + self.classes) / 2 * usual["classes"]
            and look.entropy >= 2 * self.entropy * usual["entropy"]
        )
        self._calm = self._calm + 1 if calm else 0
        if self._calm >= self.every:
            if self._next is not None:
                self._good, self._again = self._next, False
            # The tensors of this moment made the predictions that were found calm; this batch is not learned yet.
            self._next, self._calm = self._snapshot(number - 1), 0

    def _snapshot(self, batch: int) -> _Snapshot:
        anchor = None if self.anchor is None else self.anchor.version.flat
        return _Snapshot(batch, self.update.snapshot(), anchor, self.model.running)

    def _return(self, why: str, number: int) -> None:
        if self._again:
            self.update.reset()
            self.model.reset_statistics()
            if self.anchor is not None:
                self.anchor.start(self.model.live)
            self._good = self._snapshot(0)
        else:
            self.update.restore(self._good.update)
            self.model.running = self._good.running
            if self.anchor is not None and self._good.anchor is not None:
                self.anchor.load_state_dict({"flat": self._good.anchor})
        self._next, self._seen, self._right = None, [], []
        self._calm = self._wait = 0
        self._again = True
        self.trips += 1
        where = f"batch {self._good.batch}" if self._good.batch else "the source"
        _log.warning("batch %d: collapse, back to the state of %s: %s", number, where, why)

    def state_dict(self) -> dict[str, Any]:
        return {
            "trips": self.trips,
            "seen": [[seen.samples, seen.classes, seen.entropy] for seen in self._seen],
            "right": list(self._right),
            "usual": dict(self._usual),
            "good": self._good.pack(),
            "next": None if self._next is None else self._next.pack(),
            "counters": [self._calm, self._wait, self._again],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with loading("a guard"):
            self._good = _Snapshot.unpack(state["good"], self.model.device)
            self._next = state["next"] and _Snapshot.unpack(state["next"], self.model.device)
            self._seen = [_Seen(*values) for values in state["seen"]]
            self._right, self._usual, self.trips = list(state["right"]), dict(state["usual"]), state["trips"]
            self._calm, self._wait, self._again = state["counters"]


def _agreement(own: Tensor, logits: Tensor) -> float:
    """Which part of the predictions is the same."""
    return float((own == logits.argmax(dim=1)).double().mean())
