"""What is kept for how long, and how does it get out? Old pictures are deleted; the ledger becomes Parquet files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import LargeBinary, delete, func, select, update
from sqlalchemy.orm import Session

from wise_atta import errors
from wise_atta.serve import ledger as db
from wise_atta.serve.ledger import Base, Checkpoint, Ledger, Question, Reply
from wise_atta.serve.state import Event

_OPEN = ("open", "held")


def close_old(stream: str, before: float) -> Callable[[Session], Event | None]:
    """A piece of writing that gives up questions which nobody has answered since `before`: nobody can tell any more."""

    def write(session: Session) -> Event | None:
        found = Question.stream == stream, Question.state == "open", Question.asked_at < before
        ids = list(session.scalars(select(Question.id).where(*found)))
        if not ids:
            return None
        session.execute(update(Question).where(*found).values(state="cant_tell"))
        event = db.log(
            session, stream, "answer", {"answers": {name: {"label": None, "by": "retention"} for name in ids}}
        )
        now = time.time()
        for name in ids:
            session.add(Reply(stream=stream, query=name, by="retention", at=now, status="accepted", seq=event.seq))
        return event

    return write


def prune(session: Session, before: float) -> int:
    """Delete the pictures of all questions that were asked before a time and are closed; gives their number.

    Older checkpoints and what an event log keeps of that time go too, as far as nothing newer needs them.
    """
    old = Question.asked_at < before, Question.state.not_in(_OPEN), Question.picture.is_not(None)
    count = session.scalar(select(func.count()).select_from(Question).where(*old)) or 0
    session.execute(update(Question).where(*old).values(picture=None, query=None))
    for stream in session.scalars(select(Checkpoint.stream).distinct()).all():
        base = session.scalar(
            select(func.max(Checkpoint.seq)).where(Checkpoint.stream == stream, Checkpoint.at < before)
        )
        newest = session.scalar(select(func.max(Checkpoint.seq)).where(Checkpoint.stream == stream))
        # The newest one stays whatever its age: a restart needs it.
        reach = min(base if base is not None else -1, newest if newest is not None else -1)
        session.execute(delete(Checkpoint).where(Checkpoint.stream == stream, Checkpoint.seq < reach))
        db.cut(session, stream, reach)
        while db.sweep(session, stream):
            pass
    return count


def export(ledger: Ledger, folder: Path) -> dict[str, int]:
    """Write every table but the tokens as a Parquet file, pictures left out; gives the number of rows of each."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise errors.MissingExtra("Parquet needs pyarrow: pip install 'wise-atta[serve]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, int] = {}
    with ledger.read() as session:
        for table in Base.metadata.sorted_tables:
            if table.name == "tokens":
                continue
            columns = [column for column in table.columns if not isinstance(column.type, LargeBinary)]
            types = {column.name: _arrow_type(pa, column.type) for column in columns}
            found = session.execute(select(*columns).order_by(*table.primary_key.columns)).mappings().all()
            data = {name: [_plain(row[name]) for row in found] for name in types}
            pq.write_table(pa.table(data, schema=pa.schema(list(types.items()))), folder / f"{table.name}.parquet")
            rows[table.name] = len(found)
    return rows


def _arrow_type(pa: Any, kind: Any) -> Any:
    return {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}.get(getattr(kind, "python_type", str), pa.string())


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value
