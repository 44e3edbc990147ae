"""How do people answer? Questions lie in a box; other threads take them out to look at and put answers in."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from wise_atta import errors
from wise_atta.who.annotators import Annotator, check_kind
from wise_atta.who.query import (
    Answer,
    AnswerLike,
    Query,
    loading,
    pack_answer,
    pack_label,
    pack_query,
    read,
    to_answer,
    unpack_answer,
    unpack_query,
)
from wise_atta.who.questions import Closed, settle


class Inbox(Annotator):
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

    def __init__(self, remember: int = 10_000) -> None:
        self._lock = threading.Lock()
        self._questions: dict[str, Query] = {}
        self._seen: dict[str, None] = {}  # of the questions above, in the order in which they were first shown
        self._news: list[str] = []  # shown, and not yet told by `shown`
        self._ready: dict[str, Answer] = {}
        self._closed = Closed(remember)

    def __repr__(self) -> str:
        return f"Inbox(remember={self._closed.remember})"

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
                settle(query_id, self._closed[query_id], to_answer(answer))
                return
            given = read(answer, query_id, query.classes)
            if given.label is not None:
                self._mark(query_id)
            if given.decides:
                self._drop(query_id)
                self._ready[query_id] = given
                end = pack_label(given.label)
                assert end is not None, "None decides nothing"
                self._closed.add(query_id, end)

    def ask(self, queries: Sequence[Query], now: int) -> None:
        with self._lock:
            self._questions |= {query.id: query for query in queries}

    def answers(self, now: int, last: Collection[str] = ()) -> dict[str, Answer]:
        with self._lock:
            for query_id in last:
                self._drop(query_id)
            ready, self._ready = self._ready, {}
            return ready

    def shown(self, now: int) -> list[str]:
        with self._lock:
            news, self._news = self._news, []
            return news

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "kind": type(self).__name__,
                "questions": [pack_query(query) for query in self._questions.values()],
                "seen": list(self._seen),
                "news": list(self._news),
                "ready": {name: pack_answer(answer) for name, answer in self._ready.items()},
                "closed": dict(self._closed),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_kind(state, self)
        with loading(type(self).__name__):
            questions = {item["id"]: unpack_query(item) for item in state["questions"]}
            seen, news = dict.fromkeys(state["seen"]), list(state["news"])
            ready = {name: unpack_answer(item) for name, item in state["ready"].items()}
            closed = Closed(self._closed.remember, state["closed"])
        with self._lock:
            self._questions, self._seen, self._news = questions, seen, news
            self._ready, self._closed = ready, closed

    def reset(self) -> None:
        with self._lock:
            self._questions, self._seen, self._news, self._ready = {}, {}, [], {}
            self._closed = Closed(self._closed.remember)

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot be pickled, and the rest must be copied while it is held.
        return {"remember": self._closed.remember, "state": self.state_dict()}

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
