"""Annotators around annotators: answers that come late, or wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np

from wise_atta import errors, rng
from wise_atta.who.annotators import ANSWERS, Annotator, Keeping, Packing
from wise_atta.who.query import Answer, Query, loading


def _generator(seed: int, who: str, query_id: str) -> np.random.Generator:
    """Chance that belongs to one question, whatever else was asked and in which order."""
    counter = int.from_bytes(hashlib.blake2b(query_id.encode(), digest_size=8).digest(), "little")
    return rng.numpy(seed, who, counter)


@dataclass(eq=False, repr=False)
class Wrapper(Keeping):
    """An annotator that changes what another one does."""

    annotator: Annotator

    def __post_init__(self) -> None:
        self.cost = self.annotator.cost

    def __repr__(self) -> str:
        options = "".join(f", {item.name}={getattr(self, item.name)!r}" for item in fields(self)[1:])
        return f"{type(self).__name__}({self.annotator!r}{options})"

    def ask(self, queries: Sequence[Query], now: int) -> None:
        self.annotator.ask(queries, now)

    def shown(self, now: int) -> list[str]:
        return self.annotator.shown(now)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "annotator": self.annotator.state_dict()} | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = self._unpacked(state)
        with loading(type(self).__name__):
            inner = state["annotator"]
        self.annotator.load_state_dict(inner)
        vars(self).update(values)

    def reset(self) -> None:
        super().reset()
        self.annotator.reset()


class Delay(Protocol):
    """A distribution of delays. Anything with this one verb will do."""

    def draw(self, generator: np.random.Generator) -> int:
        """A number of batches, 0 or more."""


@dataclass(frozen=True)
class Between:
    """Any number of batches from low to high, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise errors.BadConfig(f"a delay between low and high needs 0 ≤ low ≤ high, not {self.low} and {self.high}")

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.integers(self.low, self.high, endpoint=True))


@dataclass(frozen=True)
class _Mean:
    mean: float

    def __post_init__(self) -> None:
        # Above, numpy's draws leave the range of 64-bit integers.
        if not 0 <= self.mean <= 1e15:
            raise errors.BadConfig(f"the mean delay must be a number of batches from 0 to 1e15, not {self.mean}")


class Geometric(_Mean):
    """Mostly short, now and then very long: at every batch the answer comes with the same probability, 1/(1 + mean)."""

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.geometric(1 / (1 + self.mean))) - 1


class Poisson(_Mean):
    """Around the mean, within a few of its square roots."""

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.poisson(self.mean))


@dataclass(eq=False, repr=False)
class Delayed(Wrapper):
    """Keeps each answer back until some batches after its question was asked.

    Parameters
    ----------
    annotator
        Who really answers.
    batches
        How many batches: a number, or a distribution such as `Between(10, 90)`, `Geometric(mean=50)`, `Poisson(50)`.
    seed
        A question's delay depends on the seed and its id alone.

    Examples
    --------
    >>> import torch
    >>> from wise_atta.stream import Batch
    >>> from wise_atta.who import Oracle
    >>> late = Delayed(Oracle(lambda query: 2), batches=3)
    >>> late.ask([Query.of(Batch(torch.rand(1, 5)), number=7, index=0, logits=torch.zeros(1, 4))], now=7)
    >>> late.answers(now=9), late.answers(now=10)
    ({}, {'7-0': Answer(label=2, by='oracle', weight=1.0)})
    """

    batches: int | Delay = 50
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.batches, int) and not hasattr(self.batches, "draw"):
            raise errors.BadConfig(f"batches must be an int or have a method draw(generator), not {self.batches!r}")
        if isinstance(self.batches, int) and self.batches < 0:
            raise errors.BadConfig(f"a delay must be 0 batches or more, not {self.batches}")
        self._due: dict[str, int] = {}
        self._held: dict[str, Answer] = {}

    def ask(self, queries: Sequence[Query], now: int) -> None:
        due = {query.id: now + self._draw(query.id) for query in queries}
        self.annotator.ask(queries, now)
        self._due |= due

    def answers(self, now: int, last: Collection[str] = ()) -> dict[str, Answer]:
        # Taken as soon as they are given, so that nobody need keep a question's input while its answer waits.
        answers = self.annotator.answers(now, last)
        self._held |= {name: answer for name, answer in answers.items() if name in self._due}
        ripe = sorted((name for name in self._held if self._due[name] <= now), key=self._due.__getitem__)
        arrived = {name: self._held[name] for name in ripe}
        for name in {*ripe, *last}:
            self._due.pop(name, None)
            self._held.pop(name, None)
        return arrived

    def _kept(self) -> dict[str, Packing]:
        return {"due": (dict, dict), "held": ANSWERS}

    def _draw(self, query_id: str) -> int:
        if isinstance(self.batches, int):
            return self.batches
        batches = self.batches.draw(_generator(self.seed, "delayed", query_id))
        if batches < 0:
            raise errors.BadConfig(f"{self.batches!r} drew a delay of {batches} batches: it must be 0 or more")
        return batches


@dataclass(eq=False, repr=False)
class Noisy(Wrapper):
    """Now and then gives a wrong class, any of the others with equal probability. "Can't tell" stays what it is.

    Parameters
    ----------
    annotator
        Who really answers.
    rate
        Probability of a wrong class, 0 to 1.
    classes
        Number of classes.
    seed
        Whether a question is answered wrongly depends on the seed and its id alone.
    """

    rate: float
    classes: int
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.rate <= 1:
            raise errors.BadConfig(f"the rate of wrong answers must be within 0 and 1, not {self.rate}")
        if self.classes < 2:
            raise errors.BadConfig(f"a wrong answer needs at least 2 classes, not {self.classes}")

    def ask(self, queries: Sequence[Query], now: int) -> None:
        for query in queries:
            if query.classes != self.classes:
                raise errors.BadConfig(
                    f"question {query.id!r} has {query.classes} classes, Noisy was made for {self.classes}"
                )
        super().ask(queries, now)

    def answers(self, now: int, last: Collection[str] = ()) -> dict[str, Answer]:
        return {name: self._distort(name, answer) for name, answer in self.annotator.answers(now, last).items()}

    def _distort(self, query_id: str, answer: Answer) -> Answer:
        generator = _generator(self.seed, "noisy", query_id)
        if not isinstance(answer.label, int) or generator.random() >= self.rate:
            return answer
        return replace(answer, label=(answer.label + int(generator.integers(1, self.classes))) % self.classes)
