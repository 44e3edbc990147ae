"""Revoking labels: the event log is replayed without them, or, where it is gone, from a checkpoint.

Exactly: from a checkpoint before the first of the labels, every event is applied again, without the revoked answers.
The questions stay the ones that were asked: people were shown them and the account paid for them. So policy, selector
and account are those of the live stream; tensors, anchor, statistics and guard are those of a stream that never
heard the revoked answers.

That takes a log that reaches back, and a service that was started with the same options all the while.

Approximately: tensors, anchor, statistics and guard of the last checkpoint before the labels, or of the source if the
stream was reset after that checkpoint, and every other label learned since is learned again with the next batches, a
few at a time, as old as it was when it was first learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from wise_atta import errors
from wise_atta.serve import ledger as db
from wise_atta.serve.ledger import Checkpoint, Learned, Question, Reply
from wise_atta.serve.service import LiveStream, record
from wise_atta.serve.state import Outcome, State, Without, is_audit, pack, unpack
from wise_atta.view import View
from wise_atta.what import Selector
from wise_atta.when import Account, Policy


@dataclass(frozen=True)
class Revocation:
    """What a revocation did: answers taken back, whether exactly, and events gone through again."""

    answers: int
    exact: bool
    replayed: int


@dataclass(frozen=True)
class _Rebuilt:
    """What going through the log again from a place on came to."""

    start: int
    state: dict[str, Any]
    events: int
    outcomes: Sequence[Outcome]


class _Scripted(Selector):
    """Picks the samples that were picked."""

    def __init__(self, rows: Mapping[int, Sequence[int]]) -> None:
        super().__init__()
        self.rows = rows

    def pick(self, view: View, k: int = 1) -> list[int]:
        return list(self.rows.get(view.number, ()))


class _Granted(Policy):
    """Grants the labels that were granted."""

    def __init__(self, rows: Mapping[int, Sequence[int]], number: Callable[[], int]) -> None:
        super().__init__(Account(1, per="sample"))
        self.rows = rows
        self.number = number

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        return len(self.rows.get(self.number() + 1, ())), float("nan"), float("nan")

    def refund(self, labels: int) -> None:
        """The live account has been given them back."""


def revoke(stream: LiveStream, *, by: str | None = None, queries: Sequence[str] | None = None) -> Revocation:
    """Take back accepted answers. Runs between two events of the stream's learner, and waits for the ledger."""
    if (by is None) == (queries is None):
        raise errors.BadInput("say whose answers, or the answers to which questions: one of the two")
    # A large checkpoint on its way would bring back what is revoked.
    stream.saved()
    stream.tell().result()
    with stream.ledger.read() as session:
        rows = _chosen(session, stream, by, queries)
        if not rows:
            return Revocation(0, True, 0)
        first = min(row.seq or 0 for row in rows)
        ids = [row.id for row in rows]
        before = frozenset((row.seq or 0, row.query) for row in _revoked(session, stream.name))
        without: Without = before | {(row.seq or 0, row.query) for row in rows}
        rebuilt = _replay(session, stream, first, without)
        exact, replayed = rebuilt is not None, 0 if rebuilt is None else rebuilt.events
        if rebuilt is None:
            # What came too late has taught nothing, and its question stays closed.
            rows = [row for row in rows if row.status == "accepted"]
            first = min((row.seq or 0 for row in rows), default=stream.state.position)
        names = frozenset(row.query for row in rows)
        state, relearn = _approximate(session, stream, first, rows) if rebuilt is None else (rebuilt.state, [])
    after = stream.make()
    after.load_state_dict(state)
    saved, seq = pack(after.state_dict()), after.position
    digest = stream.store(saved)
    # Without their answers some may have come to their end, and nobody could answer them any more.
    still = {query.id for query in after.adapter.open} | set(after.audit.open)

    def write(session: Session) -> None:
        if rebuilt is not None:
            _enter(session, stream.name, rebuilt)
        for some in db.portions(ids):
            session.execute(update(Reply).where(Reply.id.in_(some)).values(status="revoked"))
        db.move(session, stream.name, names & still, "open")
        db.move(session, stream.name, names - still, "expired")
        db.move(session, stream.name, relearn, "answered")
        for forgotten in db.portions([*names, *relearn]):
            session.execute(delete(Learned).where(Learned.stream == stream.name, Learned.query.in_(forgotten)))
        # Later checkpoints have learned what is revoked: nothing may start from them again.
        later = Checkpoint.stream == stream.name, Checkpoint.seq >= first
        session.execute(delete(Checkpoint).where(*later))
        db.notice(session, stream.name, "revoked", answers=len(ids), exact=exact, replayed=replayed)
        stream.add_checkpoint(session, seq, saved, digest)

    stream.ledger.write(write).result()
    # Not before it is in the ledger: should that fail, nothing was revoked.
    stream.state.load_state_dict(state)
    return Revocation(len(ids), exact, replayed)


def _chosen(session: Session, stream: LiveStream, by: str | None, queries: Sequence[str] | None) -> list[Reply]:
    """The answers to take back, of those that the learner has heard: the others came after the call for this.

    A person's answers that came too late are among them: in a replay they might come in time.
    """
    which = Reply.by == by if queries is None else Reply.query.in_(queries)
    counts = Reply.status.in_(("accepted", "late") if queries is None else ("accepted",))
    heard = Reply.seq <= stream.state.position
    statement = select(Reply).where(Reply.stream == stream.name, counts, heard, which)
    rows = list(session.scalars(statement))
    missing = sorted(set(queries or ()) - {row.query for row in rows})
    if missing:
        raise errors.UnknownQuery(f"questions {missing[:5]} have no answer that counts")
    return rows


def _revoked(session: Session, stream: str) -> list[Reply]:
    return list(session.scalars(select(Reply).where(Reply.stream == stream, Reply.status == "revoked")))


def _replay(session: Session, stream: LiveStream, first: int, without: Without) -> _Rebuilt | None:
    """The whole log once more, without some answers.

    None where the log does not reach back far enough, or was learned by other options than those of today.
    """
    base = db.last_checkpoint(session, stream.name, before=first)
    start = 0 if base is None else base.seq
    if db.reaches_back_to(session, stream.name) > start:
        return None
    if db.recipes(session, stream.name, 0.0 if base is None else base.at) != {stream.settings.recipe}:
        return None
    twin = stream.make()
    if base is not None:
        twin.load_state_dict(unpack(base.state))
    rows: dict[int, list[int]] = {}
    asked = select(Question.id).where(
        Question.stream == stream.name, Question.seq > start, Question.seq <= stream.state.position
    )
    for name in session.scalars(asked.order_by(Question.seq, Question.rank)):
        if not is_audit(name):
            number, index = name.split("-")
            rows.setdefault(int(number), []).append(int(index))
    adapter = twin.adapter
    adapter.policy = _Granted(rows, lambda: adapter.number)
    adapter.selector = _Scripted(rows)
    # What was asked is asked again, however many wait without the revoked answers.
    twin.room = math.inf, 0
    outcomes = []
    for event in db.events(session, stream.name, start, until=stream.state.position):
        done = twin.apply(event, without)
        # Questions, account and notices stay those of the live stream.
        outcomes.append(Outcome(done.seq, learned=done.learned, expired=done.expired, late=done.late))
    return _Rebuilt(start, _spliced(stream.state, twin), len(outcomes), outcomes)


def _enter(session: Session, stream: str, rebuilt: _Rebuilt) -> None:
    """Enter what the replayed log made of the labels: without the revoked ones, others came earlier."""
    desk = rebuilt.state["adapter"]["desk"]
    pending = [] if desk is None else [item["query"]["id"] for item in desk["pending"]]
    learned = {name: outcome.seq for outcome in rebuilt.outcomes for name in outcome.learned}
    before = session.scalars(select(Learned).where(Learned.stream == stream, Learned.seq > rebuilt.start))
    for differ in db.portions([row.query for row in before if learned.get(row.query) != row.seq]):
        session.execute(delete(Learned).where(Learned.stream == stream, Learned.query.in_(differ)))
    for timely in db.portions([*learned, *pending]):
        too_late = Reply.stream == stream, Reply.query.in_(timely), Reply.status == "late"
        session.execute(update(Reply).where(*too_late).values(status="accepted"))
    db.move(session, stream, pending, "answered")
    record(session, stream, rebuilt.outcomes)


def _spliced(live: State, twin: State) -> dict[str, Any]:
    """What was learned when the log was replayed; what was decided and paid for in life."""
    state = live.state_dict()
    other = twin.state_dict()
    adapter = {**other["adapter"]}
    for name in ("parts", "policy", "selector"):
        adapter[name] = state["adapter"][name]
    return {**other, "adapter": adapter, "position": state["position"]}


def _approximate(
    session: Session, stream: LiveStream, first: int, rows: Sequence[Reply]
) -> tuple[dict[str, Any], list[str]]:
    """The tensors of a checkpoint before the labels, in a stream where all later labels wait to be learned."""
    names = frozenset(row.query for row in rows)
    base = db.last_checkpoint(session, stream.name, before=first)
    state = stream.state.state_dict()
    if not rows:
        return state, []
    if base is not None and base.seq >= state["since"]:
        source, start = unpack(base.state), base.seq
    else:
        source, start = stream.make().state_dict(), state["since"]
    for name in ("update", "anchor", "running", "guard", "age"):
        state["adapter"][name] = source["adapter"][name]
    desk = state["adapter"]["desk"]
    later = session.scalars(select(Learned.query).where(Learned.stream == stream.name, Learned.seq > start)).all()
    relearn = [name for name in later if name not in names]
    if desk is not None:
        relearn = _unlearn(session, stream.name, desk, names, relearn)
        # People have seen what is open again: should it expire, its label is not returned.
        state["shown"] = [item["query"]["id"] for item in desk["open"] if item["shown"]]
    audit = state["audit"]
    for row in rows:
        question = session.get(Question, (stream.name, row.query))
        if question is not None and is_audit(row.query):
            audit["open"][row.query] = question.guesses[0][0]
            if row.agrees is not None:
                audit["total"] -= 1
                audit["right"] -= row.agrees
    return state, relearn


def _unlearn(
    session: Session, stream: str, desk: dict[str, Any], names: frozenset[str], relearn: list[str]
) -> list[str]:
    """Turn a desk back: revoked questions are open again, labels to be learned again are pending."""
    counts, closed, ages = desk["counts"], desk["closed"], desk["ages"]
    waiting = {item["query"]["id"]: item for item in desk["pending"]}
    for name in sorted(names):
        item = waiting.pop(name, None)
        question = item["query"] if item is not None else _question(session, stream, name)
        if question is None or (item is None and name not in closed):
            continue
        end = closed.pop(name, None)
        ages.pop(name, None)
        if end == "cant_tell":
            counts["cant_tell"] -= 1
        else:
            counts["answered"] -= 1
            counts["learned"] -= item is None
        context = None if item is None else item["context"]
        desk["open"].append({"query": question, "context": context, "shown": True})
    again = []
    for name in relearn:
        question, end = _question(session, stream, name), closed.get(name)
        if question is None or not isinstance(end, int):
            continue
        del closed[name]
        counts["learned"] -= 1
        waiting[name] = {
            "query": question,
            "context": None,
            "answer": {"label": end, "by": None, "weight": 1.0},
            # Unknown where an earlier release learned it. It was learned, so it was not too old.
            "age": ages.pop(name, 0),
        }
        again.append(name)
    desk["pending"] = list(waiting.values())
    return again


def _question(session: Session, stream: str, name: str) -> dict[str, Any] | None:
    row = session.get(Question, (stream, name))
    return None if row is None or row.query is None else unpack(row.query)
