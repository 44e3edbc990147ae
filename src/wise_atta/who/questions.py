"""The life of every question: asked, shown, answered, learned; or too late, expired, or nobody could tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from wise_atta import errors
from wise_atta.stream import Batch
from wise_atta.who.annotators import Annotator
from wise_atta.who.query import CANT_TELL, SKIP, Answer, AnswerLike, Query, loading, owned, plain, read, to_host

Context: TypeAlias = Literal["own", "current", "source"]

_EXPIRED = "expired"
# Late labels that are learned with one batch, each by a forward and a graph of its own; the others wait for the next.
_LATE = 8
_NOT_YET = Answer(None)
_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Counts:
    """How many questions ever reached each stage.

    At any moment `asked` = open + `answered` + `cant_tell` + `expired`, and `answered` = pending + `learned` + `stale`.
    `answered` counts classes alone; `stale` those that came too late to be learned.
    """

    asked: int = 0
    shown: int = 0
    answered: int = 0
    learned: int = 0
    cant_tell: int = 0
    expired: int = 0
    stale: int = 0


@dataclass(eq=False)
class Asked:
    """One question that is not closed, with the context that was handed in when it was asked.

    `age` is set where its label was learned before and is to be learned again: how old, in batches, it was then.
    """

    query: Query
    context: Any = None
    shown: bool = False
    answer: Answer = _NOT_YET
    age: int | None = None

    @property
    def id(self) -> str:
        return self.query.id

    @property
    def label(self) -> int:
        assert isinstance(self.answer.label, int), "only classes are learned"
        return self.answer.label

    def age_at(self, number: int) -> int:
        """How many batches old the label is at a batch; learned again, it is as old as it was the first time."""
        return number - self.query.batch if self.age is None else self.age

    def pack(self) -> dict[str, Any]:
        """What is saved of it."""
        packed = {"query": self.query.pack(), "context": self.context}
        if self.answer is _NOT_YET:
            return packed | {"shown": self.shown}
        return packed | {"answer": self.answer.pack(), "age": self.age}

    @classmethod
    def unpack(cls, state: Mapping[str, Any]) -> Asked:
        """The question that was saved; earlier releases kept no ages."""
        return cls(
            Query.unpack(state["query"]),
            plain(state["context"], "context", to_host),
            state.get("shown", True),
            Answer.unpack(state["answer"]) if "answer" in state else _NOT_YET,
            state.get("age"),
        )


class Closed(dict[str, int | str]):
    """How the latest questions ended: id → the answer. `ages` is how old a label was learned. The oldest go first."""

    def __init__(self, remember: int, ends: Mapping[str, int | str] = _NONE, ages: Mapping[str, int] = _NONE) -> None:
        super().__init__()
        if remember < 0:
            raise errors.BadConfig(f"remember must be 0 or more, not {remember}")
        self.remember = remember
        self.ages: dict[str, int] = {}
        for query_id, end in ends.items():
            self.add(query_id, end, ages.get(query_id))

    def add(self, query_id: str, end: int | str, age: int | None = None) -> None:
        self[query_id] = end
        if age is not None:
            self.ages[query_id] = age
        while len(self) > self.remember:
            oldest = next(iter(self))
            del self[oldest]
            self.ages.pop(oldest, None)


def _expired(query_id: str) -> errors.UnknownQuery:
    return errors.UnknownQuery(f"question {query_id!r} has expired: an answer comes too late now, drop it")


def settle(query_id: str, end: int | str, answer: Answer) -> None:
    """Accept an answer to a question that already ended as `end` if it changes nothing; otherwise raise."""
    if not answer.decides:
        return
    if end == _EXPIRED:
        raise _expired(query_id)
    if end != answer.end:
        raise errors.Conflict(
            f"question {query_id!r} was answered {end!r} and now {answer.end!r}: the first answer stands"
        )


@dataclass(eq=False)
class Questions:
    """Every question from the moment it is asked until its label is learned, and whoever answers.

    Every call checks all it was given before it changes anything.

    Parameters
    ----------
    classes
        Number of classes C; labels are 0 … C − 1. None: as many as the first question has.
    expires_after
        A question asked at batch t can be answered up to batch t + expires_after, and expires at its end. None: never.
    remember
        How many ended questions are remembered, so that an answer that comes again is recognised.
    annotator
        Who answers, for `Adapter.step`. With `predict` and `learn` the caller does.
    context
        How a late label's sample is normalised in BatchNorm nets: with the statistics of its ``"own"`` batch, of the
        ``"current"`` batch, or of the ``"source"``.
    late_weight
        The age, in batches, at which a late label counts half: at age a its loss is weighted by 1/(1 + a/late_weight).
        None: all count alike.
    late_limit
        A label more than so many batches old is recorded and stays charged, but is not learned. None: all are learned.
        Of many that come at once, eight are learned with each batch: every one takes a forward and a graph of its own.

    Examples
    --------
    >>> import torch
    >>> from wise_atta.stream import Batch
    >>> questions = Questions(classes=3, expires_after=10)
    >>> query = Query.of(Batch(torch.rand(4, 2)), number=1, index=2, logits=torch.zeros(4, 3))
    >>> questions.ask([query])
    >>> questions.answer({"1-2": None})  # not yet
    []
    >>> [new.label for new in questions.answer({"1-2": 0})]
    [0]
    >>> questions.answer({"1-2": 0})  # the same again changes nothing
    []
    >>> questions.close(["1-2"])
    >>> questions.counts
    Counts(asked=1, shown=1, answered=1, learned=1, cant_tell=0, expired=0, stale=0)
    """

    classes: int | None = None
    expires_after: int | None = None
    remember: int = 10_000
    _: KW_ONLY
    annotator: Annotator | None = None
    context: Context = "own"
    late_weight: float | None = None
    late_limit: int | None = None
    # Whether a teacher of the method's own answers in `learn`, when it is time, and what one label of it costs.
    taught: bool = field(default=False, init=False)
    _teacher_cost: int | None = field(default=None, init=False)
    _return: Callable[[int], None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.classes is not None and self.classes < 1:
            raise errors.BadConfig(f"classes must be 1 or more, not {self.classes}")
        if self.context not in get_args(Context):
            raise errors.unknown("context", self.context, get_args(Context))
        if self.late_weight is not None and not 0 < self.late_weight < math.inf:
            raise errors.BadConfig(f"late_weight must be None or an age above 0 batches, not {self.late_weight}")
        for name in ("late_limit", "expires_after"):
            if (batches := getattr(self, name)) is not None and batches < 0:
                raise errors.BadConfig(f"{name} must be None or 0 batches or more, not {batches}")
        if not (self.annotator is None or isinstance(self.annotator, Annotator)):
            raise errors.BadConfig(
                f"annotator={self.annotator!r} is no annotator: wrap a function (question → answer) in who.Callback"
            )
        self.forget()

    def start(self, refund: Callable[[int], None], teacher_cost: int | None) -> None:
        """Serve an adapter: labels return to its account; `teacher_cost` is that of a label of its own teacher."""
        self._return, self._teacher_cost, self.taught = refund, teacher_cost, teacher_cost is not None

    def __repr__(self) -> str:
        return (
            f"Questions(classes={self.classes}, expires_after={self.expires_after}, remember={self.remember})"
            f"  # {len(self._open)} open, {len(self._pending)} pending"
        )

    # -- looking at it --------------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        return Counts(**self._counts)

    @property
    def open(self) -> list[Query]:
        """Questions without an answer, oldest first."""
        # A list first, in one go: another thread may look while questions come and go.
        return [item.query for item in list(self._open.values())]

    @property
    def clear(self) -> bool:
        """Whether no answer can come and none waits to be learned."""
        return not self._open and not self._pending

    @property
    def pending(self) -> list[Asked]:
        """Answers that were not learned yet, in the order in which they came."""
        return list(self._pending.values())

    @property
    def free(self) -> bool:
        """Labels that cost nothing are not rationed: the policy is not asked and the account not charged."""
        if self.taught:
            return self._teacher_cost == 0
        return self.annotator is not None and self.annotator.cost == 0

    # -- asked ----------------------------------------------------------------------------------------------------

    def about(self, batch: Batch, number: int, rows: Sequence[int], logits: Tensor) -> list[Query]:
        """The questions about these rows of a batch."""
        return [Query.of(batch, number, row, logits) for row in rows]

    def ask(self, queries: Sequence[Query], context: Any = None) -> None:
        """Take in new questions of one batch.

        A context (tensors and plain values) is copied once and stays with its questions until they are learned.
        """
        new: dict[str, Asked] = {}
        classes = self.classes
        own = plain(context, "the context of a question", owned) if queries else None
        for query in queries:
            classes = query.classes if classes is None else classes
            if query.id in new or self._knows(query.id):
                raise errors.BadInput(f"question {query.id!r} was asked before: every question needs its own id")
            if query.classes != classes:
                raise errors.BadInput(
                    f"question {query.id!r} has logits of {query.classes} classes, the others have {classes}"
                )
            new[query.id] = Asked(query, own)
        self.classes = classes
        self._open |= new
        self._fresh += new
        self._counts["asked"] += len(new)

    def keep(self) -> None:
        """Bring what came with the latest questions to the host, now that they may wait for long."""
        moved: dict[int, Any] = {}
        for query_id in self._fresh:
            if (item := self._open.get(query_id) or self._pending.get(query_id)) is not None:
                item.query.fetch()
                if id(item.context) not in moved:
                    moved[id(item.context)] = plain(item.context, "context", to_host)
                item.context = moved[id(item.context)]
        self._fresh.clear()

    def hand_over(self, queries: Sequence[Query], now: int) -> None:
        """Give the annotator new questions. Where that fails nobody has them: no label is spent."""
        assert self.annotator is not None
        try:
            self.annotator.ask(queries, now)
        except BaseException:
            for query in queries:
                del self._open[query.id]
                self._counts["asked"] -= 1
            self._refund(len(queries))
            raise

    # -- shown ----------------------------------------------------------------------------------------------------

    def show(self, ids: Iterable[str]) -> None:
        """Somebody has seen these questions. Seen again, or seen after the end, changes nothing."""
        ids = dict.fromkeys(ids)
        for query_id in ids:
            if not self._knows(query_id):
                raise self._unknown(query_id)
        for item in filter(None, map(self._open.get, ids)):
            self._counts["shown"] += not item.shown
            item.shown = True

    # -- answered -------------------------------------------------------------------------------------------------

    def read(self, answers: Mapping[str, AnswerLike]) -> dict[str, Answer]:
        """The answers that tell something new about an open question; raises on the first that is wrong."""
        if not isinstance(answers, Mapping):
            raise errors.BadInput(f"answers must map question ids to answers, not be a {type(answers).__name__}")
        if answers and self.taught:
            raise errors.BadInput("the method's own teacher answers its questions: give it no answers")
        new: dict[str, Answer] = {}
        for query_id, raw in answers.items():
            if not self._knows(query_id):
                raise self._unknown(query_id)
            answer = read(raw, query_id, self.classes)
            if query_id in self._pending:
                settle(query_id, self._pending[query_id].label, answer)
            elif query_id in self._closed:
                settle(query_id, self._closed[query_id], answer)
            elif answer.label is not None:
                new[query_id] = answer
        return new

    def answer(self, answers: Mapping[str, AnswerLike]) -> list[Asked]:
        """Record answers; gives the questions that have a class now and had none before.

        "Can't tell" closes its question, "skip" leaves it open, None tells nothing, and the same class or "can't tell"
        again changes nothing. Raises `UnknownQuery`, `BadLabel` or `Conflict`, and then none of the answers counts.
        """
        return self._record(self.read(answers))

    def _record(self, answers: Mapping[str, Answer]) -> list[Asked]:
        new = []
        for query_id, answer in answers.items():
            item = self._open[query_id] if answer.label is SKIP else self._open.pop(query_id)
            self._counts["shown"] += not item.shown
            item.shown = True
            if answer.label is CANT_TELL:
                self._closed.add(query_id, CANT_TELL.value)
                self._counts["cant_tell"] += 1
            elif answer.label is not SKIP:
                item.answer = answer
                self._pending[query_id] = item
                new.append(item)
        self._counts["answered"] += len(new)
        return new

    def collect(self, now: int) -> None:
        """Record what the annotator has by now, one answer by one: that one is refused costs no other."""
        assert self.annotator is not None
        # An annotator hands each answer over once, so all are recorded before anything else can fail.
        refused = self._take(self.annotator.answers(now, last=self.closing(now)))
        if refused:
            raise refused[0]
        self.show(self.annotator.shown(now))

    def _take(self, answers: Mapping[str, AnswerLike]) -> list[errors.WiseAttaError]:
        refused: list[errors.WiseAttaError] = []
        for query_id, answer in answers.items():
            # After a `learn` by hand an annotator does not know yet that a question has expired.
            if query_id in self._closed and self._closed[query_id] == _EXPIRED:
                continue
            try:
                self._record(Questions.read(self, {query_id: answer}))
            except errors.WiseAttaError as error:
                refused.append(error)
        return refused

    # -- learned --------------------------------------------------------------------------------------------------

    def due(self, new: Mapping[str, Answer], number: int, now: int) -> tuple[list[Asked], list[str]]:
        """The labels to learn with batch `number`, and the ids of those that came too late for it."""
        if not self._pending and not new:
            return [], []
        labelled = (
            replace(self._open[name], answer=answer) for name, answer in new.items() if isinstance(answer.label, int)
        )
        answered = [*self._pending.values(), *labelled]
        limit = math.inf if self.late_limit is None else self.late_limit
        late = [item for item in answered if item.query.batch != number]
        stale = [item.query.id for item in late if item.age_at(now) > limit]
        # What is learned again grows no older by waiting, so what is new goes first.
        timely = sorted((item for item in late if item.age_at(now) <= limit), key=lambda item: item.age is not None)
        left = {*stale, *(item.query.id for item in timely[_LATE:])}
        return [item for item in answered if item.query.id not in left], stale

    def weight_of(self, item: Asked, now: int) -> float:
        """What a late label counts: less, the older it is."""
        return item.answer.weight / (1 if self.late_weight is None else 1 + item.age_at(now) / self.late_weight)

    def close(
        self, ids: Iterable[str], end: Literal["learned", "stale"] = "learned", number: int | None = None
    ) -> None:
        """The labels of these pending questions have been learned, or came too late; only the labels are remembered.

        With the number of the batch that they were learned with, so is how old they were.
        """
        ids = list(ids)
        if len(set(ids)) != len(ids):
            raise errors.AlreadyLearned(f"an id is there twice in {ids}: learn every label once")
        for query_id in ids:
            if query_id in self._closed and self._closed[query_id] != _EXPIRED:
                raise errors.AlreadyLearned(f"question {query_id!r} was closed before: learn every label once")
            if query_id in self._open:
                raise errors.UnknownQuery(f"question {query_id!r} has no answer yet, so nothing was learned from it")
            if query_id not in self._pending:
                raise self._unknown(query_id)
        for query_id in ids:
            item = self._pending.pop(query_id)
            self._closed.add(query_id, item.label, None if number is None else item.age_at(number))
        self._counts[end] += len(ids)

    # -- settled --------------------------------------------------------------------------------------------------

    def settle(
        self, answers: Mapping[str, Answer], learned: Sequence[str], stale: Sequence[str], number: int, now: int
    ) -> list[str]:
        """At the end of batch `number`: record its answers and what became of them, and close what came to nothing.

        Gives the ids of the questions that expired. The labels of those that nobody was shown return to the account.
        """
        if answers:
            self._record(answers)
        self.close(learned, "learned", now)
        if stale:
            self.close(stale, "stale")
        expired = [] if self.expires_after is None else self.closing(number)
        if expired:
            self.give_up(expired)
        return expired

    def closing(self, now: int) -> list[str]:
        """The open questions whose last batch this is. Changes nothing."""
        if self.expires_after is None:
            return []
        return [query_id for query_id, item in self._open.items() if now - item.query.asked_at >= self.expires_after]

    def give_up(self, ids: Sequence[str]) -> int:
        """Close open questions without an answer. Gives how many nobody was ever shown: these labels are returned."""
        ids = list(dict.fromkeys(ids))
        for query_id in ids:
            if query_id not in self._open:
                raise self._unknown(query_id)
        unseen = 0
        for query_id in ids:
            unseen += not self._open.pop(query_id).shown
            self._closed.add(query_id, _EXPIRED)
        self._counts["expired"] += len(ids)
        self._refund(unseen)
        return unseen

    def _refund(self, labels: int) -> None:
        if labels and self._return is not None and not self.free:
            self._return(labels)

    # -- keeping it -----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget every question, counts included."""
        self._open: dict[str, Asked] = {}
        self._pending: dict[str, Asked] = {}
        self._fresh: list[str] = []
        self._closed = Closed(self.remember)
        self._counts = asdict(Counts())

    def reset(self) -> None:
        """The same, for whoever answers, too."""
        self.forget()
        if self.annotator is not None:
            self.annotator.reset()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the options, as tensors and plain values."""
        self.keep()
        return {
            "classes": self.classes,
            "counts": dict(self._counts),
            "open": [item.pack() for item in self._open.values()],
            "pending": [item.pack() for item in self._pending.values()],
            "closed": dict(self._closed),
            "ages": dict(self._closed.ages),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises `StateMismatch`, and changes nothing, if it is no such state."""
        with loading("the questions of an adapter"):
            classes, counts = state["classes"], Counts(**state["counts"])
            opened = {item.query.id: item for item in map(Asked.unpack, state["open"])}
            pending = {item.query.id: item for item in map(Asked.unpack, state["pending"])}
            closed = Closed(self.remember, state["closed"], state.get("ages", _NONE))
        if self.classes is not None and classes not in (None, self.classes):
            raise errors.StateMismatch(f"the state is of a model with {classes} classes, this one has {self.classes}")
        ended = counts.answered + counts.cant_tell + counts.expired
        if counts.asked != len(opened) + ended or counts.answered != len(pending) + counts.learned + counts.stale:
            raise errors.StateMismatch(f"the state is damaged: its questions do not add up to {counts}")
        self.classes = classes if self.classes is None else self.classes
        self._open, self._pending, self._fresh = opened, pending, []
        self._closed, self._counts = closed, asdict(counts)

    def _knows(self, query_id: str) -> bool:
        return query_id in self._open or query_id in self._pending or query_id in self._closed

    def _unknown(self, query_id: str) -> errors.UnknownQuery:
        if query_id in self._closed:
            return _expired(query_id)
        if self._counts["asked"] == 0:
            return errors.UnknownQuery(f"question {query_id!r} was never asked: no question was asked yet")
        return errors.UnknownQuery(
            f"question {query_id!r} was never asked, or ended so long ago that it is forgotten: "
            f"answer questions by the id that predict gave them (open now: {len(self._open)})"
        )
