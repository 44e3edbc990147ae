"""Query and Answer: what is asked, and what may be answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from wise_atta import errors
from wise_atta.engine import host
from wise_atta.stream import Batch, Inputs, leaves, tree_map


class Verdict(Enum):
    """What a person can say besides a class."""

    CANT_TELL = "cant_tell"
    SKIP = "skip"

    def __repr__(self) -> str:
        return self.name


# Closes the question; the label stays charged.
CANT_TELL: Final = Verdict.CANT_TELL
# Leaves the question open, for later or for somebody else.
SKIP: Final = Verdict.SKIP


@dataclass(frozen=True)
class Answer:
    """An answer, with who gave it and how much it counts.

    Two answers are the same answer if their labels are: `by` and `weight` of the first one are kept.

    Parameters
    ----------
    label
        A class (an integer of Python, numpy or torch), `CANT_TELL`, `SKIP`, or None for "not yet".
    by
        Who answered.
    weight
        The weight of its loss, above 0.

    Examples
    --------
    >>> import torch
    >>> Answer(torch.tensor(3), by="ann")
    Answer(label=3, by='ann', weight=1.0)
    >>> Answer(CANT_TELL)
    Answer(label=CANT_TELL, by=None, weight=1.0)
    """

    label: int | Verdict | None
    by: str | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        raw: Any = self.label
        if isinstance(raw, Tensor):
            whole = raw.dim() == 0 and not (raw.is_floating_point() or raw.is_complex() or raw.dtype == torch.bool)
        else:
            # True == 1, yet whoever answers True to "which class?" misread the question.
            whole = isinstance(raw, int | np.integer) and not isinstance(raw, bool)
        if not (whole or raw is None or isinstance(raw, Verdict)):
            raise errors.BadLabel(
                f"{raw!r} ({type(raw).__name__}) is no answer: "
                "give a class as an integer, an Answer, CANT_TELL, SKIP, or None"
            )
        if not (isinstance(self.weight, int | float | np.number) and 0 < self.weight < math.inf):
            raise errors.BadConfig(f"the weight of an answer must be a finite number above 0, not {self.weight!r}")
        vars(self).update(label=int(raw) if whole else raw, weight=float(self.weight))

    @property
    def decides(self) -> bool:
        """Whether this closes the question: a class or "can't tell"."""
        return self.label is not None and self.label is not SKIP

    @property
    def end(self) -> int | str | None:
        """The label as it is saved."""
        return self.label.value if isinstance(self.label, Verdict) else self.label

    def pack(self) -> dict[str, Any]:
        """What is saved of it."""
        return {"label": self.end, "by": self.by, "weight": self.weight}

    @classmethod
    def unpack(cls, state: Mapping[str, Any]) -> Answer:
        """The answer that was saved."""
        label = state["label"]
        return cls(Verdict(label) if isinstance(label, str) else label, state["by"], state["weight"])


# An answer as people and programs give it.
AnswerLike: TypeAlias = int | np.integer[Any] | Tensor | Answer | Verdict | None


def read(raw: AnswerLike, query_id: str, classes: int | None = None) -> Answer:
    """An answer as people and programs give it, checked against the number of classes, where that is known.

    >>> read(2, "7-0", classes=3)
    Answer(label=2, by=None, weight=1.0)
    >>> read(3, "7-0", classes=3)
    Traceback (most recent call last):
    wise_atta.errors.BadLabel: label 3 for question '7-0' is not a class of the model: give 0 to 2
    """
    try:
        answer = raw if isinstance(raw, Answer) else Answer(raw)  # type: ignore[arg-type]  # becomes an int of Python
    except errors.BadLabel as error:
        raise errors.BadLabel(f"question {query_id!r}: {error}") from None
    if classes is not None and isinstance(answer.label, int) and not 0 <= answer.label < classes:
        raise errors.BadLabel(
            f"label {answer.label} for question {query_id!r} is not a class of the model: give 0 to {classes - 1}"
        )
    return answer


@dataclass(frozen=True, eq=False)
class Query:
    """One question: which class is this sample? It owns its tensors: copies on the CPU, never views of the batch.

    Tensors on an accelerator are copied there, and come to the CPU when somebody looks at them: most questions that are
    answered at once are never looked at.

    Parameters
    ----------
    id
        Names the question; `Query.of` builds it from batch and index alone, so it is the same in every run.
    batch, index
        Number of the batch in the stream (from 1) and position of the sample in it.
    sample_id, meta
        What the stream said about the sample and its batch. Plain values and tensors only, so that they can be saved.
    logits
        What the model predicted, [C].
    asked_at
        Batch number at which it was asked.
    input
        The sample without a batch dimension; `as_batch` puts it back.
    audit
        Whether the answer serves to measure the model rather than to teach it.

    Attributes
    ----------
    classes
        C, how many there are.
    """

    id: str
    batch: int
    index: int
    sample_id: str | None
    meta: Mapping[str, Any] = field(repr=False)
    logits: Tensor = field(repr=False)
    asked_at: int
    input: Inputs = field(repr=False)
    audit: bool = False
    classes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.logits.dim() != 1:
            raise errors.BadInput(f"question {self.id!r}: logits must be [C], not {list(self.logits.shape)}")
        own = self.__dict__
        own["classes"] = len(self.logits)
        for name in ("sample_id", "meta"):
            own[name] = plain(own[name], name, lambda tensor: owned(tensor, "cpu"))
        own["logits"], own["input"] = owned(self.logits), tree_map(owned, self.input)
        tensors = leaves((self.logits, self.input))
        if not all(map(on_host, tensors)):
            own["_away"] = own.pop("logits"), own.pop("input"), host.working(tensors)

    def fetch(self) -> None:
        """Bring logits and input to the CPU if they are not there yet."""
        own = self.__dict__
        away = own.get("_away")
        if away is not None:
            logits, inputs, stream = away
            if stream is not None:
                # Whoever looks may be on another one, which does not wait for the copies to be made.
                stream.synchronize()
            own["logits"], own["input"] = to_host(logits), tree_map(to_host, inputs)
            own.pop("_away", None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("logits", "input"):
                self.fetch()
            if name not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        self.fetch()
        return dict(self.__dict__)

    @classmethod
    def of(cls, batch: Batch, number: int, index: int, logits: Tensor, audit: bool = False) -> Query:
        """The question about sample `index` of batch `number`, whose logits are [n, C].

        >>> import torch
        >>> batch = Batch(torch.rand(4, 3), ids=["a", "b", "c", "d"])
        >>> Query.of(batch, number=7, index=2, logits=torch.zeros(4, 10))
        Query(id='7-2', batch=7, index=2, sample_id='c', asked_at=7, audit=False)
        """
        return cls(
            id=f"{number}-{index}",
            batch=number,
            index=index,
            sample_id=None if batch.ids is None else batch.ids[index],
            meta=batch.meta,
            logits=logits[index],
            asked_at=number,
            input=tree_map(lambda tensor: tensor[index], batch.inputs),
            audit=audit,
        )

    def pack(self) -> dict[str, Any]:
        """What is saved of it, its tensors included."""
        return {item.name: getattr(self, item.name) for item in fields(Query) if item.init}

    @classmethod
    def unpack(cls, state: Mapping[str, Any]) -> Query:
        """The question that was saved, with tensors of its own."""
        query = cls(**{item.name: state[item.name] for item in fields(Query) if item.init})
        # A state that was read onto an accelerator: nobody may look at its questions for long.
        query.fetch()
        return query


def as_batch(query: Query) -> Inputs:
    """The sample as a batch of one, as a model takes it."""
    return tree_map(lambda tensor: tensor.unsqueeze(0), query.input)


def on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def owned(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    """A copy of one's own, on a device or where the tensor is."""
    # Made in inference mode, the copy could never take part in the forward that learns from a late label.
    with torch.inference_mode(False), torch.no_grad():
        return tensor.to(device or tensor.device, copy=True, memory_format=torch.contiguous_format)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the CPU: itself where it is there, or else a copy."""
    return tensor if on_host(tensor) else owned(tensor, "cpu")


def plain(value: Any, where: str, tensor: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> Any:
    """The same value, made of nothing but what can be saved and then loaded with `weights_only=True`.

    That is tensors, dicts, lists, tuples, strings, numbers and None; anything else is an error that says where it is.

    >>> import numpy as np
    >>> plain({"domain": "fog", "severity": np.int64(5)}, "meta")
    {'domain': 'fog', 'severity': 5}
    >>> plain({"tags": {"a"}}, "meta")
    Traceback (most recent call last):
    wise_atta.errors.BadInput: meta['tags'] is a set: use tensors, dicts, lists, tuples, strings, numbers and None
    """
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, np.generic):  # before float and str: float64 and str_ are subclasses of them
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    # Subclasses (enumerations, say) are cut down to the type that can be loaded again.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {plain(key, where): plain(item, f"{where}[{key!r}]", tensor) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item, f"{where}[{index}]", tensor) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise errors.BadInput(
        f"{where} is a {type(value).__name__}: use tensors, dicts, lists, tuples, strings, numbers and None"
    )


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn whatever goes wrong while a saved state is read into `StateMismatch`."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise errors.StateMismatch(f"this is not a state of {what}, or it is damaged: {error!r}") from error
