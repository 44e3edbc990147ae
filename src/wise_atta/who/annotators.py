"""Who answers? A truth that is known, another model, or a function of yours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wise_atta import errors
from wise_atta.stream import Inputs, tree_map
from wise_atta.who.query import (
    Answer,
    AnswerLike,
    Query,
    as_batch,
    loading,
    pack_answer,
    pack_query,
    read,
    unpack_answer,
    unpack_query,
)


class Annotator(ABC):
    """Takes questions and, sooner or later, gives answers. Time is counted in batches.

    One batch `now` goes: `ask` the new questions, take the `answers`, note what was `shown`. An answer is a class or
    `CANT_TELL`, and comes once. Where `answers` raises, what was asked stays asked, and what was answered is given by
    the next call.

    `cost` is what one answer costs, in labels.
    """

    cost: int = 1

    @abstractmethod
    def ask(self, queries: Sequence[Query], now: int) -> None:
        """Hand over the questions asked at batch `now`. Where it raises, none of them counts as asked."""

    @abstractmethod
    def answers(self, now: int, last: Collection[str] = ()) -> dict[str, Answer]:
        """What has arrived by batch `now` and was not given before.

        For the questions `last` it is the last chance: in the same moment they are withdrawn, so that nobody can be
        shown one, or answer it, in vain.
        """

    @abstractmethod
    def shown(self, now: int) -> list[str]:
        """The questions that somebody has looked at by batch `now` and that were not named before."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on, as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises `StateMismatch`, and changes nothing, if it is another annotator's."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all questions."""


def check_kind(state: Mapping[str, Any], owner: Annotator) -> None:
    """Raise `StateMismatch` if a saved state is another annotator's."""
    kind = type(owner).__name__
    with loading(kind):
        found = state["kind"]
    if found != kind:
        raise errors.StateMismatch(
            f"the state is of the annotator {found!r}, this one is {kind!r}: attach the same one"
        )


class Direct(Annotator):
    """An annotator that looks at every question when `answers` is called. A subclass says what its `reply` is."""

    def __init__(self) -> None:
        self._questions: dict[str, Query] = {}
        self._seen: list[str] = []  # of the questions above: looked at before, and not decided
        self._news: list[str] = []  # looked at, and not yet told by `shown`
        self._ready: dict[str, Answer] = {}  # decided in a call of `answers` that then failed

    @abstractmethod
    def reply(self, query: Query) -> AnswerLike:
        """The answer; after None or `SKIP` the question is asked again whenever `answers` is called."""

    def ask(self, queries: Sequence[Query], now: int) -> None:
        self._questions |= {query.id: query for query in queries}

    def answers(self, now: int, last: Collection[str] = ()) -> dict[str, Answer]:
        replies = {name: self._ready.get(name) or self._reply(query, last) for name, query in self._questions.items()}
        self._ready = {}
        self._news += [name for name in replies if name not in self._seen]
        undecided = [name for name, answer in replies.items() if not answer.decides and name not in last]
        self._questions = {name: self._questions[name] for name in undecided}
        self._seen = list(self._questions)
        return {name: answer for name, answer in replies.items() if answer.decides}

    def _reply(self, query: Query, last: Collection[str]) -> Answer:
        try:
            answer = read(self.reply(query), query.id, query.classes)
        except Exception as error:
            if query.id in last:
                self._questions = {name: other for name, other in self._questions.items() if name != query.id}
            else:
                error.add_note(
                    f"Question {query.id!r} stays open and is asked again at every step. If it can never be answered, "
                    "let CANT_TELL close it; SKIP has it asked again without an error."
                )
            raise
        if answer.decides:
            # Kept in case that the next question's reply fails: nobody is to be asked twice.
            self._ready[query.id] = answer
        return answer

    def shown(self, now: int) -> list[str]:
        news, self._news = self._news, []
        return news

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            "questions": [pack_query(query) for query in self._questions.values()],
            "seen": list(self._seen),
            "news": list(self._news),
            "ready": {name: pack_answer(answer) for name, answer in self._ready.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_kind(state, self)
        with loading(type(self).__name__):
            questions = {item["id"]: unpack_query(item) for item in state["questions"]}
            seen, news = list(state["seen"]), list(state["news"])
            ready = {name: unpack_answer(item) for name, item in state.get("ready", {}).items()}
        self._questions, self._seen, self._news, self._ready = questions, seen, news, ready

    def reset(self) -> None:
        Direct.__init__(self)


class Oracle(Direct):
    """Knows the truth and answers at once. For studies; the truth stays here and never enters the adapter.

    Parameters
    ----------
    truth
        Sample id → class, or a function of the question.

    Examples
    --------
    >>> import torch
    >>> from wise_atta.stream import Batch
    >>> oracle = Oracle({"cat.png": 0, "dog.png": 1})
    >>> batch = Batch(torch.rand(2, 3), ids=["cat.png", "dog.png"])
    >>> oracle.ask([Query.of(batch, number=1, index=1, logits=torch.zeros(2, 2))], now=1)
    >>> oracle.answers(now=1)
    {'1-1': Answer(label=1, by='oracle', weight=1.0)}
    """

    def __init__(self, truth: Mapping[str, int] | Callable[[Query], int]) -> None:
        super().__init__()
        self.truth = truth

    def __repr__(self) -> str:
        return f"Oracle({len(self.truth)} samples)" if isinstance(self.truth, Mapping) else f"Oracle({self.truth!r})"

    def reply(self, query: Query) -> AnswerLike:
        if not isinstance(self.truth, Mapping):
            return Answer(self.truth(query), by="oracle")
        if query.sample_id is None or query.sample_id not in self.truth:
            raise errors.BadInput(
                f"the oracle has no truth for sample {query.sample_id!r} of question {query.id!r}: "
                "give Batch(inputs, ids=…) ids that the truth has"
            )
        return Answer(self.truth[query.sample_id], by="oracle")


class Callback(Direct):
    """Asks a function of yours, at once and then at every batch until it gives a class or `CANT_TELL`.

    A question that the function was called with counts as shown, whatever it returned.

    Parameters
    ----------
    function
        Question → answer: a class, an `Answer`, `CANT_TELL`, `SKIP`, or None for "not yet".
    """

    def __init__(self, function: Callable[[Query], AnswerLike]) -> None:
        super().__init__()
        self.function = function

    def __repr__(self) -> str:
        return f"Callback({self.function!r})"

    def reply(self, query: Query) -> AnswerLike:
        return self.function(query)


class Teacher(Direct):
    """Another, usually larger, model answers with its most likely class.

    Each question is one forward of one sample, without gradients. The model must be in eval mode and stays as it is.

    Parameters
    ----------
    model
        A module or function: inputs as the stream has them (pixels in [0, 1]) → logits [n, C], or an object with
        `.logits`. It normalises for itself, and its classes are the student's.
    cost
        Labels charged for an answer: 1, or 0, which makes the teacher free; tables show it.

    Examples
    --------
    >>> import torch
    >>> from wise_atta.stream import Batch
    >>> teacher = Teacher(lambda x: -x, cost=0)
    >>> batch = Batch(torch.tensor([[3.0, 1.0, 2.0]]))
    >>> teacher.ask([Query.of(batch, number=1, index=0, logits=torch.zeros(1, 3))], now=1)
    >>> teacher.answers(now=1)
    {'1-0': Answer(label=1, by='teacher', weight=1.0)}
    """

    def __init__(self, model: Callable[..., Any], cost: int = 1) -> None:
        super().__init__()
        if cost not in (0, 1):
            raise errors.BadConfig(f"a teacher's answer costs 1 like any other, or 0 where it is free, not {cost}")
        self.model = model
        self.cost = cost
        self._check_mode()

    def __repr__(self) -> str:
        name = getattr(self.model, "__name__", type(self.model).__name__)
        return f"Teacher({name}, cost={self.cost})"

    def reply(self, query: Query) -> AnswerLike:
        self._check_mode()
        with torch.no_grad():
            out = self._forward(as_batch(query))
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != 1:
            found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise errors.BadInput(f"the teacher must give logits [1, C] for one sample, not {found}")
        if logits.shape[1] != query.classes:
            raise errors.BadConfig(
                f"the teacher has {logits.shape[1]} classes and the student {query.classes}: "
                "wrap the teacher in a function that gives the student's classes"
            )
        if not bool(logits.isfinite().all()):
            raise errors.NotFinite(f"the teacher's logits for question {query.id!r} hold NaN or Inf")
        return Answer(int(logits[0].argmax()), by="teacher")

    def _forward(self, inputs: Inputs) -> Any:
        if isinstance(self.model, nn.Module):
            tensor = next(self.model.parameters(), next(self.model.buffers(), None))
            if tensor is not None:
                device = tensor.device
                inputs = tree_map(lambda leaf: leaf.to(device), inputs)
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        return self.model(inputs) if isinstance(inputs, Tensor) else self.model(*inputs)

    def _check_mode(self) -> None:
        # Switching the mode for the forward would be seen by whoever else uses the module.
        if isinstance(self.model, nn.Module) and any(part.training for part in self.model.modules()):
            raise errors.BadConfig("the teacher is in training mode: call teacher.eval() first")
