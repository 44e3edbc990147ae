"""Retention, export and backup: old pictures are deleted, and the ledger becomes Parquet files.

A ledger in SQLite is copied while the service runs, and put back while it does not.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import LargeBinary, delete, func, make_url, select, update
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session

from wise_atta import errors
from wise_atta.serve import ledger as db
from wise_atta.serve.ledger import Base, Checkpoint, Ledger, Part, Question
from wise_atta.serve.state import Event

_OPEN = ("open", "held")


def close_old(stream: str, before: float) -> Callable[[Session], Event | None]:
    """A piece of writing that gives up questions which nobody has answered since `before`."""

    def write(session: Session) -> Event | None:
        expired = Question.stream == stream, Question.state == "open", Question.asked_at < before
        ids = list(session.scalars(select(Question.id).where(*expired)))
        if not ids:
            return None
        session.execute(update(Question).where(*expired).values(state="expired"))
        return db.log(session, stream, "expire", {"queries": ids})

    return write


def prune(session: Session, before: float) -> int:
    """Delete the pictures of all questions that were asked before a time and are closed; gives their number.

    Older checkpoints, which hold the pixels of what was open then, and what an event log keeps of that time go too, as
    far as nothing newer needs them.
    """
    old = Question.asked_at < before, Question.state.not_in(_OPEN), Question.picture.is_not(None)
    count = session.scalar(select(func.count()).select_from(Question).where(*old)) or 0
    session.execute(update(Question).where(*old).values(picture=None, query=None))
    for stream in session.scalars(select(Checkpoint.stream).distinct()).all():
        base = session.scalar(
            select(func.max(Checkpoint.seq)).where(Checkpoint.stream == stream, Checkpoint.at < before)
        )
        newest = session.scalar(select(func.max(Checkpoint.seq)).where(Checkpoint.stream == stream))
        if base is not None:
            # A restart needs the newest one whatever its age, and a log that is kept the one at which it begins.
            needed = [newest, base] if base >= db.reaches_back_to(session, stream) else [newest]
            gone = Checkpoint.stream == stream, Checkpoint.at < before, Checkpoint.seq.not_in(needed)
            digests = list(session.scalars(select(Checkpoint.digest).where(*gone)))
            session.execute(delete(Checkpoint).where(*gone))
            # Two checkpoints of one state, as a revocation and a stop write them, share its parts.
            left = select(Checkpoint.digest).where(Checkpoint.stream == stream)
            lone = Part.stream == stream, Part.digest.in_(digests), Part.digest.not_in(left)
            session.execute(delete(Part).where(*lone))
            db.cut(session, stream, base)
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
            records = session.execute(select(*columns).order_by(*table.primary_key.columns)).mappings().all()
            data = {name: [_plain(row[name]) for row in records] for name in types}
            pq.write_table(pa.table(data, schema=pa.schema(list(types.items()))), folder / f"{table.name}.parquet")
            rows[table.name] = len(records)
    return rows


def backup(url: str, target: Path) -> int:
    """Copy a SQLite ledger, as it is at one moment, whether or not a service uses it. Gives the bytes of the copy."""
    source = _file(url)
    if target.exists():
        raise errors.BadConfig(f"{target} is there already: a backup replaces nothing")
    if not source.is_file():
        raise errors.BadConfig(f"there is no ledger {source}")
    unfinished = target.with_name(f"{target.name}.part")
    try:
        unfinished.unlink(missing_ok=True)
        unfinished.touch(mode=0o600)
        with closing(sqlite3.connect(source)) as here, closing(sqlite3.connect(unfinished)) as there:
            here.backup(there)
            # One file, complete in itself.
            there.execute("PRAGMA journal_mode=DELETE")
        unfinished.rename(target)
    except (OSError, sqlite3.Error) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise errors.BadConfig(f"{source} cannot be copied to {target}: {error}") from error
    return target.stat().st_size


def restore(copy: Path, url: str) -> Path:
    """Put a copy in place of a SQLite ledger that no service uses. Gives where the old one is now."""
    target = _file(url).resolve()
    problem = _damage(copy)
    if problem is not None:
        raise errors.BadConfig(f"{copy} is no sound ledger: {problem}")
    held = Path(f"{target}.lock")
    target.parent.mkdir(parents=True, exist_ok=True)
    with held.open("wb") as lock:
        db.lock_file(lock, target)
        unfinished = target.with_name(f"{target.name}.part")
        unfinished.touch(mode=0o600)
        # Before the old one goes: should there be no room for the copy, nothing has changed.
        shutil.copyfile(copy, unfinished)
        aside = target.with_name(f"{target.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        # What SQLite has not moved into the file yet belongs to the old one: left behind, it would spoil the new one.
        for end in ("", "-wal", "-shm"):
            old = Path(f"{target}{end}")
            if old.exists():
                old.rename(f"{aside}{end}")
        unfinished.rename(target)
    return aside


def is_missing(url: str) -> bool:
    """Whether a URL names a SQLite file that is not there.

    >>> is_missing("sqlite:///no-such-ledger.db"), is_missing("postgresql+psycopg://host/name")
    (True, False)
    """
    try:
        return not _file(url).is_file()
    except errors.BadConfig:
        return False


def _file(url: str) -> Path:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise errors.BadConfig("the database is no URL: write one like sqlite:///name.db") from error
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        raise errors.BadConfig("this copies ledgers in SQLite files: use pg_dump and pg_restore for PostgreSQL")
    return Path(parsed.database)


def _damage(copy: Path) -> str | None:
    if not copy.is_file():
        return "it is not there"
    try:
        with closing(sqlite3.connect(f"{copy.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
            for table in ("events", "checkpoints", "queries"):
                connection.execute(f"SELECT 1 FROM {table} LIMIT 1")
    except sqlite3.Error as error:
        return str(error)
    return None if verdict == "ok" else str(verdict)


def _arrow_type(pa: Any, kind: Any) -> Any:
    return {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}.get(getattr(kind, "python_type", str), pa.string())


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value
