"""The ledger in the database: questions, answers, labels and budget, and the event log beside them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    BigInteger,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    String,
    UniqueConstraint,
    create_engine,
    delete,
    event,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DatabaseError, DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, defer, mapped_column

from wise_atta import errors
from wise_atta.serve.state import Event

T = TypeVar("T")
_LOCK_S = 5.0
# How many names one statement holds: databases have a limit, some of them at 32766.
_NAMES = 1000
# Bytes that a row may have. PostgreSQL spells out what it gives back, which doubles it, and has a limit of a gigabyte.
_ROW = {"sqlite": 999 * 10**6, "postgresql": 500 * 10**6}
# How many checkpoints go at a time: replies wait while they are deleted.
_DROPPED = 16
# Bytes of a checkpoint that are written or deleted at a time: replies wait that long.
PART = 2**22
_log = logging.getLogger("wise_atta.serve")
# SQLite counts up a key only if its type is exactly INTEGER.
_Key = BigInteger().with_variant(Integer, "sqlite")
# Answers that the model's guess can be compared with.
_JUDGED = text("agrees IS NOT NULL")


class Base(DeclarativeBase):
    """All tables."""


class LoggedEvent(Base):
    """The event log: enough to make every stream's state again from its last checkpoint."""

    __tablename__ = "events"
    seq: Mapped[int] = mapped_column(_Key, primary_key=True, autoincrement=True)
    stream: Mapped[str] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(16))
    at: Mapped[float] = mapped_column(Float(53))
    body: Mapped[dict[str, Any]] = mapped_column(JSON)
    pictures: Mapped[bytes | None] = mapped_column(LargeBinary)
    skipped: Mapped[bool]
    version: Mapped[int] = mapped_column(BigInteger)
    __table_args__ = (Index("events_by_stream", "stream", "seq"), {"sqlite_autoincrement": True})


class Reach(Base):
    """How far back the log of a stream goes: events up to `cut` are gone, or about to be."""

    __tablename__ = "reach"
    stream: Mapped[str] = mapped_column(String(64), primary_key=True)
    cut: Mapped[int] = mapped_column(BigInteger)


class Checkpoint(Base):
    """A stream's state after an event. In the database, so that state and place in the log cannot part.

    The state of a large one is empty here: its parts hold it.
    """

    __tablename__ = "checkpoints"
    id: Mapped[int] = mapped_column(_Key, primary_key=True, autoincrement=True)
    stream: Mapped[str] = mapped_column(String(64))
    seq: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(Float(53))
    digest: Mapped[str] = mapped_column(String(64))
    state: Mapped[bytes] = mapped_column(LargeBinary)
    __table_args__ = (Index("checkpoints_by_stream", "stream", "seq"),)


class Part(Base):
    """A piece of a large state: of the checkpoint with the same digest, or of none and to be deleted."""

    __tablename__ = "checkpoint_parts"
    stream: Mapped[str] = mapped_column(String(64), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class Question(Base):
    """Every question, its picture, and how far it got: open, held, answered, learned, cant_tell or expired."""

    __tablename__ = "queries"
    stream: Mapped[str] = mapped_column(String(64), primary_key=True)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger)
    rank: Mapped[int]
    index: Mapped[int]
    name: Mapped[str] = mapped_column(String(128))
    audit: Mapped[bool]
    asked_at: Mapped[float] = mapped_column(Float(53))
    state: Mapped[str] = mapped_column(String(16))
    guesses: Mapped[list[Any]] = mapped_column(JSON)
    picture_kind: Mapped[str] = mapped_column(String(8))
    picture: Mapped[bytes | None] = mapped_column(LargeBinary)
    query: Mapped[bytes | None] = mapped_column(LargeBinary)
    shown_at: Mapped[float | None] = mapped_column(Float(53))
    lease_by: Mapped[str | None] = mapped_column(String(64))
    lease_until: Mapped[float | None] = mapped_column(Float(53))
    __table_args__ = (Index("queries_by_state", "stream", "state", "seq"),)


class Showing(Base):
    """Who was shown which question, and when."""

    __tablename__ = "showings"
    id: Mapped[int] = mapped_column(_Key, primary_key=True, autoincrement=True)
    stream: Mapped[str] = mapped_column(String(64))
    query: Mapped[str] = mapped_column(String(64))
    by: Mapped[str] = mapped_column(String(64))
    at: Mapped[float] = mapped_column(Float(53))


class Reply(Base):
    """Every answer: accepted, held, rejected, revoked, or a skip. `label` is empty for "can't tell" and for a skip."""

    __tablename__ = "answers"
    id: Mapped[int] = mapped_column(_Key, primary_key=True, autoincrement=True)
    stream: Mapped[str] = mapped_column(String(64))
    query: Mapped[str] = mapped_column(String(64))
    by: Mapped[str] = mapped_column(String(64))
    at: Mapped[float] = mapped_column(Float(53))
    label: Mapped[int | None]
    status: Mapped[str] = mapped_column(String(16))
    agrees: Mapped[bool | None]
    seq: Mapped[int | None] = mapped_column(BigInteger)
    __table_args__ = (
        Index("answers_by_query", "stream", "query"),
        Index("answers_by_person", "by", "id"),
        Index("answers_by_status", "status"),
        Index("answers_by_time", "stream", "at"),
        Index("answers_judged", "by", "id", sqlite_where=_JUDGED, postgresql_where=_JUDGED),
    )


class Learned(Base):
    """Every label learned, once."""

    __tablename__ = "learned"
    stream: Mapped[str] = mapped_column(String(64), primary_key=True)
    query: Mapped[str] = mapped_column(String(64), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(Float(53))


class Charge(Base):
    """Every unit of budget: +1 when a question is asked, −1 if it expired before anyone was shown it."""

    __tablename__ = "budget"
    id: Mapped[int] = mapped_column(_Key, primary_key=True, autoincrement=True)
    stream: Mapped[str] = mapped_column(String(64))
    query: Mapped[str] = mapped_column(String(64))
    units: Mapped[int]
    seq: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(Float(53))
    __table_args__ = (UniqueConstraint("stream", "query", "units", name="budget_once"),)


class Token(Base):
    """Who may do what. Of the secret only a hash is kept."""

    __tablename__ = "tokens"
    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[str] = mapped_column(String(16))
    digest: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float(53))
    revoked_at: Mapped[float | None] = mapped_column(Float(53))


class Notice(Base):
    """What somebody who looks after the service wants to know: starts, resets, trips of the guard, revocations."""

    __tablename__ = "notices"
    id: Mapped[int] = mapped_column(_Key, primary_key=True, autoincrement=True)
    stream: Mapped[str | None] = mapped_column(String(64))
    at: Mapped[float] = mapped_column(Float(53))
    kind: Mapped[str] = mapped_column(String(16))
    body: Mapped[dict[str, Any]] = mapped_column(JSON)
    __table_args__ = (Index("notices_by_time", "at"),)


class Busy(errors.WiseAttaError):
    """Another service uses the same database."""


class Lost(errors.WiseAttaError):
    """Nothing is written any more: the writing thread has ended, or the connection that keeps other services out."""


class _Work(Generic[T]):
    """A piece of writing, what is to follow its commit, and who waits for it."""

    def __init__(self, write: Callable[[Session], T], then: Callable[[T], None] | None) -> None:
        self.write = write
        self.then = then
        self.future: Future[T] = Future()
        # A waiting caller may go away; the work is done all the same.
        self.future.set_running_or_notify_cancel()


class Ledger:
    """The database, and the one thread that writes to it.

    Writes are handed to `write` and committed in groups: whatever has come in while one group was being committed makes
    up the next. A write that fails takes back its own changes alone. So the order of commits is the order of the log.

    Parameters
    ----------
    url
        A SQLAlchemy URL.
    exclusive
        Whether to refuse to share the database with another service.
    """

    def __init__(self, url: str, *, exclusive: bool = True) -> None:
        self.url = url
        self._lock: IO[bytes] | Connection | None = None
        self._writing = _engine(url, "BEGIN IMMEDIATE")
        # A reader sees one moment, as with SQLite by itself: a log must not be cut while it is being read.
        self._reading = _engine(url, "BEGIN", isolation_level="REPEATABLE READ")
        self.is_sqlite = self._writing.dialect.name == "sqlite"
        try:
            _make_private(self._writing.url)
            if exclusive:
                self._take_lock()
            migrate(self._writing)
        except BaseException as error:
            self.close()
            if isinstance(error, DatabaseError | OSError):
                raise errors.BadConfig(f"the database cannot be opened: {error}") from error
            raise
        self._work: queue.SimpleQueue[_Work[Any] | None] = queue.SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()
        self.groups = 0

    @contextlib.contextmanager
    def read(self) -> Iterator[Session]:
        """A view of the database as it is now."""
        with Session(self._reading) as session:
            yield session

    def write(self, work: Callable[[Session], T], then: Callable[[T], None] | None = None) -> Future[T]:
        """Let the writing thread run `work` and commit it; `then` is called after that, in the order of commits."""
        item = _Work(work, then)
        self._work.put(item)
        if self._ended:
            self._refuse()
        return item.future

    @property
    def lost(self) -> bool:
        """Whether another service may have taken over: nothing is written any more, only a restart helps."""
        return isinstance(self._lock, Connection) and self._lock.invalidated

    @property
    def _writer(self) -> Engine | Connection:
        """What is written through. On a server that is the connection which holds the lock: they end together."""
        if self.lost:
            raise Lost("the connection to the database was lost: restart the service")
        return self._lock if isinstance(self._lock, Connection) else self._writing

    @property
    def alive(self) -> bool:
        """Whether the writing thread is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Finish what was handed in, and let go of the database."""
        thread = getattr(self, "_thread", None)
        if thread is not None and thread.is_alive():
            self._work.put(None)
            thread.join()
        if self._lock is not None:
            self._lock.close()
        self._lock = None
        self._writing.dispose()
        self._reading.dispose()

    def _run(self) -> None:
        group: list[_Work[Any] | None] = []
        try:
            while None not in group:
                group = [self._work.get()]
                while len(group) < 256:
                    try:
                        group.append(self._work.get_nowait())
                    except queue.Empty:
                        break
                self._commit([item for item in group if item is not None])
        except Exception:
            # What was committed has not taken effect, and what comes after it must not: a restart begins from the log.
            _log.exception("the ledger has stopped")
        finally:
            self._ended = True
            self._refuse(item for item in group if item is not None and not item.future.done())

    def _refuse(self, items: Iterable[_Work[Any]] = ()) -> None:
        """Fail the work given, and all that is queued: the writing thread has ended."""
        left: list[_Work[Any] | None] = [*items]
        with contextlib.suppress(queue.Empty):
            while True:
                left.append(self._work.get_nowait())
        for item in left:
            if item is not None:
                item.future.set_exception(Lost("the ledger has stopped: restart the service"))

    def _commit(self, group: Sequence[_Work[Any]]) -> None:
        done: list[tuple[_Work[Any], Any]] = []
        failed: list[tuple[_Work[Any], BaseException]] = []
        try:
            with Session(self._writer) as session, session.begin():
                for item in group:
                    try:
                        with session.begin_nested():
                            result = item.write(session)
                    except Exception as error:  # handed to whoever waits for it
                        # What the database refuses is this one's fault. Anything else may have taken back them all.
                        if isinstance(error, SQLAlchemyError) and not isinstance(error, DataError | IntegrityError):
                            raise
                        failed.append((item, error))
                    else:
                        done.append((item, result))
        except Exception as error:
            done, failed = [], [(item, error) for item in group]
        self.groups += 1
        for item, result in done:
            if item.then is not None:
                item.then(result)
            item.future.set_result(result)
        for item, problem in failed:
            item.future.set_exception(problem)

    def _take_lock(self) -> None:
        if self.is_sqlite:
            path = self._writing.url.database
            if not path or path == ":memory:":
                raise errors.BadConfig("a ledger in memory would forget everything: give a file, sqlite:///name.db")
            # Whatever links lead there, one file has one lock.
            real = Path(path).resolve()
            file = Path(f"{real}.lock").open("wb")  # noqa: SIM115  # held as long as the ledger is
            try:
                lock_file(file, real)
            except Busy:
                file.close()
                raise
            self._lock = file
        else:
            connection = self._writing.connect()
            # Out of the pool, so that closing it ends the session and with it the lock.
            connection.detach()
            # The server may take a moment to notice that a service was killed.
            deadline = time.monotonic() + _LOCK_S
            while not connection.execute(text("SELECT pg_try_advisory_lock(hashtext('wise-atta'))")).scalar():
                if time.monotonic() > deadline:
                    connection.close()
                    raise Busy("the database is in use by another service: stop that one, or give another database")
                time.sleep(0.1)
            connection.commit()
            self._lock = connection


def lock_file(lock: IO[bytes], path: Path) -> None:
    """Hold a SQLite database for oneself as long as its lock file is open, or raise `Busy`."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise Busy(f"{path} is in use by another service: stop that one, or give another database") from error


def _engine(url: str, begin: str, isolation_level: str = "READ COMMITTED") -> Engine:
    # Errors are logged, and what was to be written holds pictures and names.
    options: dict[str, Any] = {"hide_parameters": True}
    if not url.startswith("sqlite"):
        options["isolation_level"] = isolation_level
    try:
        engine = create_engine(url, json_serializer=lambda value: json.dumps(value, separators=(",", ":")), **options)
    except ModuleNotFoundError as error:
        raise errors.MissingExtra(f"{error.name} is not there: pip install 'wise-atta[postgres]'") from error
    except ArgumentError as error:
        # The URL is not repeated: it may hold a password.
        raise errors.BadConfig("the database is no URL of a known kind: write one like sqlite:///name.db") from error
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def _prepare(connection: Any, record: object) -> None:
            # The driver's own transactions would not let a savepoint begin one.
            connection.isolation_level = None
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "secure_delete=ON"):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql(begin)

    elif engine.dialect.name != "postgresql":
        raise errors.BadConfig(f"{engine.dialect.name}: the ledger lives in SQLite or PostgreSQL")
    return engine


def _make_private(url: URL) -> None:
    """Create the file of a SQLite database for nobody but its owner: it holds pictures. Its log gets the same mode."""
    if url.get_backend_name() == "sqlite" and url.database and not url.database.startswith((":memory:", "file:")):
        path = Path(url.database).resolve()
        if not path.exists() and path.with_name(f"{path.name}.part").exists():
            raise errors.BadConfig(
                f"there is no {path.name}, only {path.name}.part: a restore was interrupted. Do it again, "
                f"`wise-atta ledger restore`, or take {path.name}.part away to begin with an empty ledger"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)


def migrate(engine: Engine) -> None:
    """Bring the tables to this version, from whichever they are at."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    script = ScriptDirectory.from_config(config)
    environment = EnvironmentContext(config, script, fn=lambda at, context: script._upgrade_revs("head", at))
    with engine.begin() as connection, environment:
        environment.configure(connection=connection, target_metadata=Base.metadata)
        at = environment.get_context().get_current_revision()
        if at is not None and at > (script.get_current_head() or ""):
            raise errors.BadConfig(
                "a newer version has written this database, and this one cannot read it: upgrade, or restore a backup"
            )
        environment.run_migrations()


# ---- pieces of writing -----------------------------------------------------------------------------------------------


def insert_new(session: Session, table: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, leaving alone those that are there: a replay tells the ledger what it may know already."""
    if rows:
        dialect = session.get_bind().dialect.name
        make = sqlite.insert if dialect == "sqlite" else postgresql.insert
        session.execute(make(table).on_conflict_do_nothing(), [dict(row) for row in rows])


def log(
    session: Session,
    stream: str,
    kind: str,
    body: Mapping[str, Any],
    *,
    pictures: bytes | None = None,
    skipped: bool = False,
    version: int = 0,
) -> Event:
    """Add an event to the log."""
    row = LoggedEvent(
        stream=stream, kind=kind, at=time.time(), body=dict(body), pictures=pictures, skipped=skipped, version=version
    )
    session.add(row)
    session.flush()
    return Event(row.seq, stream, kind, body, pictures, skipped, version)


def notice(session: Session, stream: str | None, kind: str, **body: Any) -> None:
    """Note something for the people who look after the service."""
    session.add(Notice(stream=stream, at=time.time(), kind=kind, body=body))


def move(session: Session, stream: str, ids: Collection[str], state: str) -> None:
    """Let questions be in a state."""
    for some in portions(ids):
        session.execute(update(Question).where(Question.stream == stream, Question.id.in_(some)).values(state=state))


def portions(names: Iterable[T]) -> Iterator[list[T]]:
    """As many at a time as one statement can name.

    >>> print(*(len(some) for some in portions(range(2500))))
    1000 1000 500
    """
    left = iter(names)
    return iter(lambda: list(itertools.islice(left, _NAMES)), [])


def recipes(session: Session, stream: str, since: float) -> set[str]:
    """What a stream was learned by from a moment on: by every service that was started since, and the one before it."""
    starts = select(Notice).where(Notice.stream == stream, Notice.kind.in_(("start", "recovered")))
    earlier = starts.where(Notice.at <= since).order_by(Notice.at.desc(), Notice.id.desc()).limit(1)
    notices = [*session.scalars(earlier), *session.scalars(starts.where(Notice.at > since))]
    return {str(row.body.get("recipe")) for row in notices}


def events(session: Session, stream: str, after: int, until: int | None = None) -> Iterator[Event]:
    """The log of a stream, oldest first."""
    statement = (
        select(LoggedEvent).where(LoggedEvent.stream == stream, LoggedEvent.seq > after).order_by(LoggedEvent.seq)
    )
    if until is not None:
        statement = statement.where(LoggedEvent.seq <= until)
    for row in session.scalars(statement.execution_options(yield_per=16)):
        yield Event(row.seq, row.stream, row.kind, row.body, row.pictures, row.skipped, row.version)
        session.expunge(row)


def last_checkpoint(session: Session, stream: str, before: int | None = None) -> Checkpoint | None:
    """The newest checkpoint, or the newest at a place before `before`."""
    statement = (
        select(Checkpoint).where(Checkpoint.stream == stream).order_by(Checkpoint.seq.desc(), Checkpoint.id.desc())
    )
    if before is not None:
        statement = statement.where(Checkpoint.seq < before)
    row = session.scalars(statement.limit(1)).first()
    if row is None:
        return None
    if not row.state:
        parts = select(Part.data).where(Part.stream == stream, Part.digest == row.digest).order_by(Part.number)
        state = b"".join(session.scalars(parts))
        # What is put together here is nothing to be written.
        session.expunge(row)
        row.state = state
    if digest_of(row.state) != row.digest:
        raise errors.StateMismatch(f"the checkpoint of stream {stream!r} at event {row.seq} is damaged")
    return row


def require_room(session: Session, state: bytes) -> None:
    """Refuse a state that is too large to be stored."""
    most = _ROW[session.get_bind().dialect.name]
    if len(state) > most:
        raise errors.BadInput(
            f"a checkpoint of {len(state)} bytes, where the database gives back {most} at most: every question that "
            "waits is part of it, so let some be answered, or revoke fewer labels at a time"
        )


def parts(stream: str, state: bytes, digest: str) -> Iterator[Callable[[Session], None]]:
    """Pieces of writing that store a large state little by little, ahead of its checkpoint; none for a small one."""
    for number, start in enumerate(range(0, len(state), PART) if len(state) > PART else ()):
        yield partial(_add_part, stream=stream, digest=digest, number=number, data=state[start : start + PART])


def _add_part(session: Session, **part: Any) -> None:
    if session.get(Part, (part["stream"], part["digest"], part["number"]), options=[defer(Part.data)]) is None:
        session.execute(insert(Part).values(part))


def add_checkpoint(
    session: Session,
    stream: str,
    seq: int,
    state: bytes,
    *,
    keep: int,
    keep_log: float,
    digest: str | None = None,
    now: float | None = None,
) -> None:
    """Write a checkpoint and, in the same commit, give up what it makes superfluous.

    Parameters
    ----------
    digest
        Of the state, where it is known; what `parts` stored under it is not written again.
    keep
        How many checkpoints stay, closer together the younger they are.
    keep_log
        Days for which events, and the checkpoint before them, stay; then `keep` more do, evenly over that time.
    """
    now = time.time() if now is None else now
    require_room(session, state)
    digest = digest or digest_of(state)
    for write in parts(stream, state, digest):
        write(session)
    whole = state if len(state) <= PART else b""
    session.add(Checkpoint(stream=stream, seq=seq, at=now, digest=digest, state=whole))
    session.flush()
    rows = session.execute(
        select(Checkpoint.id, Checkpoint.seq, Checkpoint.at)
        .where(Checkpoint.stream == stream)
        .order_by(Checkpoint.seq, Checkpoint.id)
    ).all()
    if keep_log:
        # Replay has to begin somewhere: at a checkpoint no younger than the log that is kept.
        period = keep_log * 86400
        old = [row for row in rows if row.at < now - period]
        cut(session, stream, old[-1].seq if old else 0)
        # It is cut at checkpoints only, so some lie evenly over its time: the first of every part of it stays.
        stay = {row.at // (period / keep): row.seq for row in reversed(rows)}.values()
        start = reaches_back_to(session, stream)
        drop = old[:-1] + _thinned([row for row in rows if row not in old and row.seq not in (start, *stay)], keep)
    else:
        cut(session, stream, seq)
        drop = _thinned(list(rows), keep)
    if drop:
        session.execute(delete(Checkpoint).where(Checkpoint.id.in_([row.id for row in drop])))


def cut(session: Session, stream: str, seq: int) -> None:
    """Give up the events of a stream up to a place; `sweep` deletes them."""
    if seq > reaches_back_to(session, stream):
        session.merge(Reach(stream=stream, cut=seq))


def sweep(session: Session, stream: str, limit: int = 16) -> bool:
    """Delete some events that were given up, and say whether there may be more.

    Few at a time: they hold pictures, and replies wait while a large transaction is written.
    """
    old = LoggedEvent.stream == stream, LoggedEvent.seq <= reaches_back_to(session, stream)
    places = list(session.scalars(select(LoggedEvent.seq).where(*old).order_by(LoggedEvent.seq).limit(limit)))
    session.execute(delete(LoggedEvent).where(LoggedEvent.seq.in_(places)))
    return len(places) == limit


def sweep_parts(session: Session, stream: str, but: str) -> bool:
    """Delete a part of no checkpoint, nor of the state `but` which is being stored; say whether there may be more.

    For the service alone, which knows what is being stored.
    """
    digests = select(Checkpoint.digest).where(Checkpoint.stream == stream)
    lone = select(Part.digest, Part.number).where(
        Part.stream == stream, Part.digest != but, Part.digest.not_in(digests)
    )
    part = session.execute(lone.limit(1)).first()
    if part is not None:
        which = Part.stream == stream, Part.digest == part.digest, Part.number == part.number
        session.execute(delete(Part).where(*which))
    return part is not None


def digest_of(state: bytes) -> str:
    """What tells whether a stored state is whole."""
    return hashlib.sha256(state).hexdigest()


def reaches_back_to(session: Session, stream: str) -> int:
    """The place in the log after which every event of a stream is there."""
    row = session.get(Reach, stream)
    return 0 if row is None else row.cut


def _thinned(rows: list[Any], keep: int) -> list[Any]:
    """Which checkpoints to drop so that `keep` stay in the end, closer together the younger they are."""
    dropped: list[Any] = []
    while len(rows) > keep and len(dropped) < _DROPPED:
        end = rows[-1].seq + 1
        inner = range(1, len(rows) - 1) if len(rows) > 2 else range(1)
        # The gap that would be left, measured by how long ago it was.
        worst = (
            min(inner, key=lambda i: (rows[i + 1].seq - rows[i - 1].seq) / (end - rows[i - 1].seq))
            if len(rows) > 2
            else 0
        )
        dropped.append(rows.pop(worst))
    return dropped


def count_by(session: Session, column: Any, *where: Any) -> dict[Any, int]:
    """How many rows there are for each value of a column."""
    rows = session.execute(select(column, func.count()).where(*where).group_by(column))
    return {row[0]: row[1] for row in rows}
