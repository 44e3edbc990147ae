"""Annotators: a truth that is known, another model, or a function of yours."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wise_atta import errors
from wise_atta.stream import Inputs, tree_map
from wise_atta.who.query import Answer, AnswerLike, Query, as_batch, loading, read


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


# How a quantity is packed to be saved, and unpacked; what is empty is unpacked from {}.
Packing: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], Any]]
QUESTIONS: Packing = (
    lambda queries: [query.pack() for query in queries.values()],
    lambda state: {item["id"]: Query.unpack(item) for item in state},
)
ANSWERS: Packing = (
    lambda answers: {name: answer.pack() for name, answer in answers.items()},
    lambda state: {name: Answer.unpack(item) for name, item in state.items()},
)


class Keeping(Annotator):
    """An annotator that names the quantities that it keeps; they are saved, loaded and forgotten here."""

    # Taken wherever they change. Annotators that other threads use have a real one.
    _lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def _kept(self) -> dict[str, Packing]:
        """The quantities by their names in a state; that of the attribute has an underscore before it."""
        return {}

    def _unpacked(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes that a saved state holds. Raises `StateMismatch` if it is another annotator's."""
        own = type(self).__name__
        with loading(own):
            kind = state["kind"]
            if kind != own:
                raise errors.StateMismatch(
                    f"the state is of the annotator {kind!r}, this one is {own!r}: attach the same one"
                )
            # Earlier releases kept no answers for the next call.
            state = {"ready": {}, **state}
            return {f"_{name}": unpack(state[name]) for name, (_, unpack) in self._kept().items()}

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            packed = {name: pack(getattr(self, f"_{name}")) for name, (pack, _) in self._kept().items()}
            return {"kind": type(self).__name__, **packed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = self._unpacked(state)
        with self._lock:
            vars(self).update(values)

    def reset(self) -> None:
        with self._lock:
            vars(self).update({f"_{name}": unpack({}) for name, (_, unpack) in self._kept().items()})


class Waiting(Keeping):
    """An annotator with whom questions wait until they are answered."""

    _questions: dict[str, Query]
    _seen: dict[str, None]  # of the questions above, in the order in which they were first looked at
    _news: list[str]  # looked at, and not yet told by `shown`
    _ready: dict[str, Answer]  # decided, and not yet given by `answers`

    def __init__(self) -> None:
        Keeping.reset(self)

    def ask(self, queries: Sequence[Query], now: int) -> None:
        with self._lock:
            self._questions |= {query.id: query for query in queries}

    def shown(self, now: int) -> list[str]:
        with self._lock:
            news, self._news = self._news, []
            return news

    def _kept(self) -> dict[str, Packing]:
        return {"questions": QUESTIONS, "seen": (list, dict.fromkeys), "news": (list, list), "ready": ANSWERS}


class Direct(Waiting):
    """An annotator that looks at every question when `answers` is called. A subclass says what its `reply` is."""

    @abstractmethod
    def reply(self, query: Query) -> AnswerLike:
        """The answer; after None or `SKIP` the question is asked again whenever `answers` is called."""

    def answers(self, now: int, last: Collection[str] = ()) -> dict[str, Answer]:
        replies = {name: self._ready.get(name) or self._reply(query, last) for name, query in self._questions.items()}
        self._ready = {}
        self._news += [name for name in replies if name not in self._seen]
        undecided = [name for name, answer in replies.items() if not answer.decides and name not in last]
        self._questions = {name: self._questions[name] for name in undecided}
        self._seen = dict.fromkeys(self._questions)
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
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise errors.BadInput(f"the teacher must give logits [1, C] for one sample, not {shape}")
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
