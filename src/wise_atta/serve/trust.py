"""Questions and answers of people: leases, checks of answers, and a review of whoever stands out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import and_, case, exists, func, or_, select, update
from sqlalchemy.orm import Session, defer

from wise_atta import errors
from wise_atta.serve import ledger as db
from wise_atta.serve.ledger import Question, Reply, Showing
from wise_atta.serve.state import Event, wilson

# An annotator is compared with the others from so many answers on, on both sides.
_ENOUGH = 20
# Only so many of the latest answers count, so that somebody who improves is trusted again.
_LATEST = 200
# Standard deviations: one honest annotator in some hundred is held at some time.
_SURE = 2.576


class Gone(errors.UnknownQuery):
    """A question that has expired."""


@dataclass(frozen=True)
class Submission:
    """One answer of a person: a class, ``"cant_tell"`` or ``"skip"``."""

    stream: str
    query: str
    label: int | Literal["cant_tell", "skip"]


def lease(
    session: Session, streams: Sequence[str], by: str, *, limit: int, seconds: float, now: float | None = None
) -> tuple[list[Question], list[Event]]:
    """Open questions for one person, oldest first, kept from everybody else for a while.

    What the person holds already comes first, what the person has skipped does not come again. Gives the questions,
    and the events that say which of them were shown for the first time.
    """
    now = time.time() if now is None else now
    skipped = exists().where(
        Reply.stream == Question.stream, Reply.query == Question.id, Reply.by == by, Reply.status == "skip"
    )
    own = and_(Question.lease_by == by, Question.lease_until >= now)
    rows = session.scalars(
        select(Question)
        .options(defer(Question.picture), defer(Question.query))
        .where(
            Question.stream.in_(streams),
            Question.state == "open",
            Question.picture.is_not(None),
            or_(
                Question.lease_until.is_(None),
                Question.lease_until < now,
                # A lease ends more than two leases ahead: the clock was put back since. Corrections by moments, as
                # clocks get all day, end no lease.
                Question.lease_until > now + 2 * seconds,
                Question.lease_by == by,
            ),
            ~skipped,
        )
        .order_by(case((own, 0), else_=1), Question.asked_at, Question.seq, Question.rank)
        .limit(limit)
    ).all()
    new: dict[str, list[str]] = {}
    for row in rows:
        if row.lease_by != by or (row.lease_until or 0) < now:
            session.add(Showing(stream=row.stream, query=row.id, by=by, at=now))
        row.lease_by, row.lease_until = by, now + seconds
        if row.shown_at is None:
            row.shown_at = now
            new.setdefault(row.stream, []).append(row.id)
    events = [db.log(session, stream, "show", {"queries": ids}) for stream, ids in new.items()]
    return list(rows), events


def release(session: Session, by: str, questions: Sequence[tuple[str, str]]) -> None:
    """End a person's leases on questions that they will not answer; leases of others stay."""
    for stream, query in questions:
        session.execute(
            update(Question)
            .where(Question.stream == stream, Question.id == query, Question.lease_by == by)
            .values(lease_by=None, lease_until=None)
        )


def answer(
    session: Session, by: str, submitted: Sequence[Submission], classes: int, now: float | None = None
) -> list[Event]:
    """Enter answers of one person. All are checked before anything changes; gives the events to be learned."""
    now = time.time() if now is None else now
    if len({(item.stream, item.query) for item in submitted}) != len(submitted):
        raise errors.Conflict("a question is answered twice in one call: send one answer each")
    fresh = [(item, row) for item in submitted if (row := _check(session, by, item, classes, now)) is not None]
    # What comes now counts too: otherwise one large call could teach a thousand lies before anybody looks.
    differ = [item.label != row.guesses[0][0] for item, row in fresh if not isinstance(item.label, str)]
    held = bool(differ) and is_suspicious(session, by, differ)
    events: dict[str, dict[str, dict[str, object]]] = {}
    replies: list[Reply] = []
    for item, row in fresh:
        label = None if isinstance(item.label, str) else item.label
        agrees = None if label is None else label == row.guesses[0][0]
        reply = Reply(
            stream=item.stream, query=item.query, by=by, at=now, label=label, agrees=agrees, status="accepted"
        )
        row.lease_by = row.lease_until = None
        if item.label == "skip":
            reply.status = "skip"
        elif held:
            reply.status, row.state = "held", "held"
        else:
            row.state = "cant_tell" if label is None else "answered"
            events.setdefault(item.stream, {})[item.query] = {"label": label, "by": by}
            replies.append(reply)
        session.add(reply)
    return _log(session, events, replies)


def _log(session: Session, by_stream: dict[str, dict[str, dict[str, object]]], replies: Sequence[Reply]) -> list[Event]:
    events = {stream: db.log(session, stream, "answer", {"answers": answers}) for stream, answers in by_stream.items()}
    for reply in replies:
        reply.seq = events[reply.stream].seq
    return list(events.values())


def _check(session: Session, by: str, item: Submission, classes: int, now: float) -> Question | None:
    """The open question that is answered; None where the answer changes nothing."""
    row = session.get(Question, (item.stream, item.query))
    if row is None:
        raise errors.UnknownQuery(f"question {item.query!r} of stream {item.stream!r} was never asked")
    if isinstance(item.label, int) and not 0 <= item.label < classes:
        raise errors.BadLabel(f"label {item.label} for question {item.query!r} is not a class: give 0 to {classes - 1}")
    if row.state == "expired":
        raise Gone(f"question {item.query!r} has expired: an answer comes too late now, drop it")
    if row.state == "open":
        if row.lease_by not in (None, by) and (row.lease_until or 0) >= now:
            raise errors.Conflict(f"question {item.query!r} is in somebody else's hands: ask for another one")
        return row
    if item.label == "skip":
        return None
    standing = session.scalars(
        select(Reply).where(
            Reply.stream == item.stream, Reply.query == item.query, Reply.status.in_(("accepted", "held"))
        )
    ).first()
    if standing is not None and standing.status == "held" and standing.by != by:
        raise errors.Conflict(f"question {item.query!r} has an answer that waits for a review: ask for another one")
    before = None if standing is None else standing.label
    if before != (None if item.label == "cant_tell" else item.label):
        raise errors.Conflict(f"question {item.query!r} has another answer: the first one stands")
    return None


@dataclass(frozen=True)
class Record:
    """How often somebody's answers differ from the model's guess."""

    by: str
    answers: int
    differ: int
    suspicious: bool

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.differ, self.answers, _SURE)


def records(session: Session) -> list[Record]:
    """Everybody's record, by name."""
    counts = {name: _differs(session, name) for name in _judged(session)}
    return [Record(name, *counts[name], _stands_out(name, counts)) for name in counts]


def _judged(session: Session) -> Iterator[str]:
    """Whose answers can be compared, by name: from each to the next, since people are few and answers are many."""
    first = select(func.min(Reply.by)).where(Reply.agrees.is_not(None))
    name = session.scalar(first)
    while name is not None:
        yield name
        name = session.scalar(first.where(Reply.by > name))


def is_suspicious(session: Session, by: str, now: Sequence[bool] = ()) -> bool:
    """Whether an annotator differs from the model clearly more often than all others together.

    The model is often wrong about what it asks, but equally for all annotators: questions are handed out at random.
    `now` says which of the answers that are being given differ.
    """
    counts = {record.by: (record.answers, record.differ) for record in records(session)}
    answers, differ = counts.get(by, (0, 0))
    counts[by] = answers + len(now), differ + sum(now)
    return _stands_out(by, counts)


def _differs(session: Session, by: str) -> tuple[int, int]:
    latest = (
        select(Reply.agrees)
        .where(Reply.by == by, Reply.agrees.is_not(None), Reply.status.in_(("accepted", "held", "revoked", "rejected")))
        .order_by(Reply.id.desc())
        .limit(_LATEST)
        .subquery()
    )
    row = session.execute(select(func.count(), func.sum(case((latest.c.agrees, 0), else_=1))).select_from(latest)).one()
    return int(row[0]), int(row[1] or 0)


def _stands_out(name: str, counts: dict[str, tuple[int, int]]) -> bool:
    answers, differ = counts[name]
    others = sum(pair[0] for other, pair in counts.items() if other != name)
    differing = sum(pair[1] for other, pair in counts.items() if other != name)
    if min(answers, others) < _ENOUGH:
        return False
    return wilson(differ, answers, _SURE)[0] > wilson(differing, others, _SURE)[1]


def held(session: Session) -> list[Reply]:
    """Answers that wait for a review, oldest first."""
    return list(session.scalars(select(Reply).where(Reply.status == "held").order_by(Reply.id)))


def review(session: Session, ids: Sequence[int], accept: bool) -> list[Event]:
    """Let held answers count, or reject them and open their questions again. Gives the events to be learned."""
    rows = list(session.scalars(select(Reply).where(Reply.id.in_(ids), Reply.status == "held").order_by(Reply.id)))
    missing = sorted(set(ids) - {row.id for row in rows})
    if missing:
        raise errors.UnknownQuery(f"answers {missing} are not held for review")
    events: dict[str, dict[str, dict[str, object]]] = {}
    for row in rows:
        state = "open" if not accept else "cant_tell" if row.label is None else "answered"
        row.status = "accepted" if accept else "rejected"
        session.execute(
            update(Question)
            # It may have expired meanwhile, and stays so.
            .where(Question.stream == row.stream, Question.id == row.query, Question.state == "held")
            .values(state=state)
        )
        if accept:
            events.setdefault(row.stream, {})[row.query] = {"label": row.label, "by": row.by}
    return _log(session, events, rows if accept else [])
