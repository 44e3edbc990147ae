"""The state of a stream at a place in its event log, a deterministic machine: the same events, the same state.

The live learner, the recovery after a crash, the replay that revokes labels and the twin in the tests all drive this
one class. It knows no clock, no database and no request.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wise_atta import errors, rng, when
from wise_atta.how.update import NoUpdate
from wise_atta.loop import Adapter
from wise_atta.prediction import Step
from wise_atta.serve.uploads import UploadReader
from wise_atta.stream import Batch
from wise_atta.who import CANT_TELL, Answer, Query

_RECENT = 200
# What questions that wait may weigh: they are part of every checkpoint, which has to fit into one row.
_ROOM = 2**28
# What each weighs there beside its pixels, about: its names, and tensors of a few numbers.
_EACH = 2**10
# What questions that wait may weigh together, and each beside its pixels.
Room: TypeAlias = tuple[float, float]
# Answers that are passed over in a replay: where in the log they are, and to which question.
Without: TypeAlias = frozenset[tuple[int, str]]


@dataclass(frozen=True, eq=False)
class Event:
    """One entry of the log.

    Parameters
    ----------
    seq
        Its place; rises over all streams.
    stream, kind
        Which stream, and what happened: ``"batch"``, ``"answer"``, ``"show"``, ``"expire"`` or ``"reset"``.
    body
        The facts, as JSON: for a batch `requests` (id and size of each), `kinds`, `sizes`, `top`, the likeliest classes
        as served, and `room`, what questions that wait may weigh when it is learned; see `rooms`.
    pictures
        The pictures of a batch as received, one after the other.
    skipped
        Whether the learner leaves this batch out.
    version
        Place in the log up to which the weights that answered had learned.
    """

    seq: int
    stream: str
    kind: str
    body: Mapping[str, Any]
    pictures: bytes | None = None
    skipped: bool = False
    version: int = 0
    inputs: Tensor | None = field(default=None, repr=False)

    def samples(self) -> list[tuple[str, bytes]]:
        """Kind and bytes of each picture."""
        samples, start = [], 0
        for kind, size in zip(self.body["kinds"], self.body["sizes"], strict=True):
            samples.append((kind, (self.pictures or b"")[start : start + size]))
            start += size
        return samples

    def names(self) -> list[str]:
        """A name for each picture: its request's id and its place there."""
        return [f"{request}/{place}" for request, count in self.body["requests"] for place in range(count)]


@dataclass(frozen=True, eq=False)
class Asked:
    """A question that an event gave rise to, with its picture as received.

    Parameters
    ----------
    id, index, name
        Of the question, of its sample in the batch, and the sample's own.
    audit
        Whether it measures rather than teaches.
    guesses
        The likeliest classes, with their probabilities.
    kind, data
        The picture.
    query
        The question itself, where it teaches.
    """

    id: str
    index: int
    name: str
    audit: bool
    guesses: Sequence[tuple[int, float]]
    kind: str
    data: bytes
    query: Query | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an event led to.

    Parameters
    ----------
    asked, learned, expired
        Questions that were asked, whose label was learned, or that ended without an answer.
    refunded
        Those of the expired that nobody was shown: their label is returned.
    late
        Answers that came after their question had ended, or too late to be learned.
    step, tripped, failed
        The learner's record; why the guard went back; why the batch could not be learned.
    """

    seq: int
    asked: Sequence[Asked] = ()
    learned: Sequence[str] = ()
    expired: Sequence[str] = ()
    refunded: Sequence[str] = ()
    late: Sequence[str] = ()
    step: Step | None = None
    tripped: str | None = None
    failed: str | None = None


class Audit:
    """The draw of samples that measure accuracy: one of every block of 1/rate samples, uniformly within its block.

    The first block is left out, so that spent ≤ ⌊rate · seen⌋ holds at every moment; after it every sample has the same
    chance, whatever the model thinks of it.

    Parameters
    ----------
    rate
        Labels per sample.
    seed
        Of the draws.

    Examples
    --------
    >>> audit = Audit(Fraction(1, 4), seed=0)
    >>> [len(audit.draw(4)) for _ in range(5)]
    [0, 1, 1, 1, 1]
    >>> audit.account.spent, audit.account.allowed
    (4, 5)
    """

    def __init__(self, rate: Fraction, seed: int = 0) -> None:
        self.account = when.Account(rate, per="sample")
        self.seed = seed
        self.right = 0
        self.total = 0
        self.recent: list[bool] = []
        self.open: dict[str, int] = {}

    def draw(self, count: int) -> list[int]:
        """Which of the next `count` samples are audited."""
        rate, first = self.account.rate, self.account.seen
        self.account.earn(count)
        if not rate:
            return []
        picked = []
        block = self.account.spent + 1
        while (place := self._place(block)) < first + count:
            picked.append(place - first)
            block += 1
        self.account.spend(len(picked))
        return picked

    def _place(self, block: int) -> int:
        start, end = (math.ceil(number / self.account.rate) for number in (block, block + 1))
        return start + int(rng.numpy(self.seed, "audit", block).integers(end - start))

    def answer(self, query_id: str, label: int | None) -> bool | None:
        """Note the class of an audited sample (None: nobody can tell). Says whether the served class was right."""
        served = self.open.pop(query_id)
        if label is None:
            return None
        right = label == served
        self.right, self.total = self.right + right, self.total + 1
        self.recent = [*self.recent, right][-_RECENT:]
        return right

    def state_dict(self) -> dict[str, Any]:
        return {
            "account": self.account.state_dict(),
            "right": self.right,
            "total": self.total,
            "recent": list(self.recent),
            "open": dict(self.open),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.account.load_state_dict(state["account"])
        self.right, self.total = state["right"], state["total"]
        self.recent, self.open = list(state["recent"]), dict(state["open"])


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson interval of a share, at 95 % unless told otherwise.

    Examples
    --------
    >>> [round(end, 3) for end in wilson(8, 10)]
    [0.49, 0.943]
    """
    if not total:
        return 0.0, 1.0
    share, weight = right / total, z * z / total
    middle, half = share + weight / 2, z * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return (middle - half) / (1 + weight), (middle + half) / (1 + weight)


def best_guesses(logits: Tensor, count: int = 5) -> list[list[tuple[int, float]]]:
    """The likeliest classes of each row and their probabilities.

    >>> best_guesses(torch.tensor([[0.0, 2.0, 1.0]]), 2)
    [[(1, 0.6652...), (2, 0.2447...)]]
    """
    best = logits.double().softmax(-1).topk(min(count, logits.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(labels, shares, strict=True)) for labels, shares in rows]


def rooms() -> list[Room]:
    """What held for the batches of a log: first what holds today, then what did before the log said it, latest first.

    >>> rooms()
    [(268435456, 1024), (268435456, 0), (inf, 0)]
    """
    return [(_ROOM, _EACH), (_ROOM, 0), (math.inf, 0)]


def is_audit(query_id: str) -> bool:
    """Whether a question measures rather than teaches.

    >>> is_audit("a7-0"), is_audit("7-0")
    (True, False)
    """
    return query_id.startswith("a")


class State:
    """A stream's adapter and audit, driven by events.

    Parameters
    ----------
    adapter
        At the source, used by nobody else for learning.
    audit
        Who draws the samples that accuracy is measured on.
    uploads
        Turns logged pictures into pixels again.
    """

    def __init__(self, adapter: Adapter, audit: Audit, uploads: UploadReader) -> None:
        self.adapter = adapter
        self.audit = audit
        self.uploads = uploads
        self.position = 0
        # Place of the last return to the source: nothing before it is in the tensors any more.
        self.since = 0
        # What questions may weigh whatever the log says, and where it does not say it.
        self.room: Room | None = None
        self.unsaid = rooms()[0]
        self._shown: dict[str, None] = {}
        self._idle = isinstance(adapter.update, NoUpdate) and isinstance(adapter.policy, when.Never)

    @property
    def spent(self) -> int:
        return self.adapter.policy.spent + self.audit.account.spent

    @property
    def allowed(self) -> int:
        return int(self.adapter.policy.allowed) + int(self.audit.account.allowed)

    def apply(self, event: Event, without: Without = frozenset()) -> Outcome:
        """Go one event on. `without` names answers that are passed over, because they were revoked."""
        if event.seq <= self.position:
            raise errors.BadInput(f"event {event.seq} comes after {self.position}: events are applied once, in order")
        outcome = getattr(self, f"_{event.kind}")(event, without)
        self.position = event.seq
        assert isinstance(outcome, Outcome)
        return outcome

    def _batch(self, event: Event, without: Without) -> Outcome:
        names = event.names()
        asked: list[Asked] = []
        audited = self.audit.draw(len(names))
        sources = event.samples() if audited else []
        for row in audited:
            guesses = [(int(label), float(p)) for label, p in event.body["top"][row]]
            new = Asked(f"a{event.seq}-{row}", row, names[row], True, guesses, *sources[row])
            self.audit.open[new.id] = guesses[0][0]
            asked.append(new)
        if event.skipped or self._idle:
            return Outcome(event.seq, asked)
        inputs = event.inputs
        if inputs is None:
            inputs = torch.stack([self.uploads.restore(kind, data) for kind, data in event.samples()])
        try:
            batch = Batch(inputs.to(self.adapter.classifier.device), ids=names)
            room, each = self.room or event.body.get("room", self.unsaid)
            out = self.adapter.predict(batch, ask=self._waiting * (inputs[0].nbytes + each) < room)
        except errors.WiseAttaError as error:
            _require_memory(error)
            # The adapter is as it was, and will be so again in every replay.
            return Outcome(event.seq, asked, failed=str(error))
        for query in out.queries:
            row = query.index
            source = event.samples()[row]
            asked.append(Asked(query.id, row, names[row], False, best_guesses(query.logits[None])[0], *source, query))
        try:
            step = self.adapter.learn(out)
        except errors.WiseAttaError as error:
            _require_memory(error)
            # Nothing was learned, but what was asked is asked and paid for.
            return Outcome(event.seq, asked, failed=str(error))
        refunded = self._unseen(step.expired)
        return Outcome(
            event.seq, asked, step.learned, step.expired, refunded, step.stale, step=step, tripped=step.tripped
        )

    def _unseen(self, ended: Sequence[str]) -> list[str]:
        """Those of the ended questions that were never shown."""
        unseen = [name for name in ended if name not in self._shown]
        for name in ended:
            self._shown.pop(name, None)
        return unseen

    @property
    def _waiting(self) -> int:
        """Questions that wait for an answer, or with one to be learned."""
        counts = self.adapter.counts
        return counts.asked - counts.cant_tell - counts.expired - counts.learned - counts.stale

    def _answer(self, event: Event, without: Without) -> Outcome:
        late = []
        for name, item in event.body["answers"].items():
            if (event.seq, name) in without:
                continue
            self._shown.pop(name, None)
            if is_audit(name):
                if name not in self.audit.open:
                    late.append(name)
                    continue
                right = self.audit.answer(name, item["label"])
                if right is not None and self.adapter.guard is not None:
                    self.adapter.guard.audit(right)
                continue
            label = CANT_TELL if item["label"] is None else item["label"]
            try:
                self.adapter.answer({name: Answer(label, by=item["by"])})
            except (errors.UnknownQuery, errors.Conflict):
                late.append(name)
        return Outcome(event.seq, late=late)

    def _show(self, event: Event, without: Without) -> Outcome:
        names = [name for name in event.body["queries"] if not is_audit(name)]
        for name in names:
            # A question that the desk has forgotten can be shown no more.
            with contextlib.suppress(errors.UnknownQuery):
                self.adapter.show([name])
        open_now = {query.id for query in self.adapter.open}
        self._shown |= {name: None for name in names if name in open_now}
        return Outcome(event.seq)

    def _expire(self, event: Event, without: Without) -> Outcome:
        open_now = {query.id for query in self.adapter.open}
        names = [name for name in event.body["queries"] if name in open_now]
        self.adapter.give_up(names)
        # What was drawn for an audit stays charged, seen or not: it stands for its block, which is drawn from once.
        audited = [name for name in event.body["queries"] if self.audit.open.pop(name, None) is not None]
        return Outcome(event.seq, expired=[*names, *audited], refunded=self._unseen(names))

    def _reset(self, event: Event, without: Without) -> Outcome:
        self.adapter.reset(model=True, policy=bool(event.body["policy"]))
        self.since = event.seq
        return Outcome(event.seq)

    def state_dict(self) -> dict[str, Any]:
        return {
            "adapter": self.adapter.state_dict(),
            "audit": self.audit.state_dict(),
            "shown": list(self._shown),
            "position": self.position,
            "since": self.since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            adapter, audit = state["adapter"], state["audit"]
            shown, position = dict.fromkeys(state["shown"]), int(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise errors.StateMismatch(f"this is not the checkpoint of a stream: {error!r}") from error
        self.adapter.load_state_dict(adapter)
        self.audit.load_state_dict(audit)
        # Earlier releases did not keep it.
        self._shown, self.position, self.since = shown, position, int(state.get("since", 0))


def _require_memory(error: errors.WiseAttaError) -> None:
    """Stop rather than go on without a batch for which there was no memory: in a replay there may be."""
    if "DefaultCPUAllocator" in str(error):
        raise MemoryError(str(error)) from error


def pack(state: Mapping[str, Any]) -> bytes:
    """A state as bytes."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    """The state again; tensors and plain values only, no code."""
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise errors.StateMismatch("the checkpoint does not hold a state")
    return state
