"""Inbox: questions for people. Other threads take them out to look at and put answers in."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import partial
from typing import Any

from wise_atta import errors
from wise_atta.who.annotators import Packing, Waiting
from wise_atta.who.query import Answer, AnswerLike, Query, read
from wise_atta.who.questions import Closed, settle


class Inbox(Waiting):
    """Questions for people. Every method may be called from any thread.

    The adapter uses the verbs of an annotator; whatever shows questions to people uses `waiting`, `open`, `show` and
    `put`.

    Parameters
    ----------
    remember
        How many answered questions are remembered, so that an answer that comes again is recognised.

    Examples
    --------
    >>> import torch
    >>> from wise_atta.stream import Batch
    >>> inbox = Inbox()
    >>> inbox.ask([Query.of(Batch(torch.rand(1, 5)), number=7, index=0, logits=torch.zeros(1, 4))], now=7)
    >>> [query.id for query in inbox.open()]
    ['7-0']
    >>> inbox.put("7-0", 3)
    >>> inbox.answers(now=9), inbox.shown(now=9)
    ({'7-0': Answer(label=3, by=None, weight=1.0)}, ['7-0'])
    """

    _closed: Closed

    def __init__(self, remember: int = 10_000) -> None:
        self.remember = remember
        self._lock = threading.RLock()
        super().__init__()

    def __repr__(self) -> str:
        return f"Inbox(remember={self.remember})"

    def _kept(self) -> dict[str, Packing]:
        return super()._kept() | {"closed": (dict, partial(Closed, self.remember))}

    def waiting(self) -> list[str]:
        """The ids of the questions that have no answer, oldest first. Does not count as showing them."""
        with self._lock:
            return list(self._questions)

    def open(self, limit: int | None = None) -> list[Query]:
        """The questions that have no answer, oldest first, to be shown to somebody now: they count as shown."""
        with self._lock:
            queries = list(self._questions.values())[:limit]
            for query in queries:
                self._mark(query.id)
            return queries

    def show(self, query_id: str) -> Query:
        """One question, to be shown to somebody now: it counts as shown."""
        with self._lock:
            if query_id not in self._questions:
                raise self._unknown(query_id)
            self._mark(query_id)
            return self._questions[query_id]

    def put(self, query_id: str, answer: AnswerLike) -> None:
        """Somebody's answer. The same one again changes nothing; a different one is a `Conflict`."""
        with self._lock:
            query = self._questions.get(query_id)
            if query is None:
                if query_id not in self._closed:
                    raise self._unknown(query_id)
                settle(query_id, self._closed[query_id], read(answer, query_id))
                return
            answer = read(answer, query_id, query.classes)
            if answer.label is not None:
                self._mark(query_id)
            if answer.decides:
                self._drop(query_id)
                self._ready[query_id] = answer
                assert answer.end is not None, "None decides nothing"
                self._closed.add(query_id, answer.end)

    def answers(self, now: int, last: Collection[str] = ()) -> dict[str, Answer]:
        with self._lock:
            for query_id in last:
                self._drop(query_id)
            ready, self._ready = self._ready, {}
            return ready

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot be pickled, and the rest must be copied while it is held.
        return {"remember": self.remember, "state": self.state_dict()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        Inbox.__init__(self, pickled["remember"])
        self.load_state_dict(pickled["state"])

    def _mark(self, query_id: str) -> None:
        if query_id not in self._seen:
            self._seen[query_id] = None
            self._news.append(query_id)

    def _drop(self, query_id: str) -> None:
        self._questions.pop(query_id, None)
        self._seen.pop(query_id, None)

    def _unknown(self, query_id: str) -> errors.UnknownQuery:
        return errors.UnknownQuery(f"question {query_id!r} does not wait for an answer: it was never asked, or expired")
