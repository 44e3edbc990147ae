"""The running service: streams that predict at once and learn behind it, and one ledger."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from sqlalchemy import exists, func, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from torch import Tensor

from wise_atta import errors, signals
from wise_atta.data.models import SourceModel
from wise_atta.model import Statistics, Version
from wise_atta.serve import ledger as db
from wise_atta.serve.batcher import Batcher, Job, Reply, Stopping
from wise_atta.serve.config import Settings, build, class_names
from wise_atta.serve.history import History
from wise_atta.serve.learner import Learner
from wise_atta.serve.ledger import Charge, Learned, Ledger, Notice, Question, Reply as AnswerRow
from wise_atta.serve.state import Audit, Event, Outcome, State, best_guesses, pack, rooms, unpack
from wise_atta.serve.uploads import UploadReader

T = TypeVar("T")
# How many waiting batches keep their pixels.
_READY = 8
_log = logging.getLogger("wise_atta.serve")


@dataclass(frozen=True, eq=False)
class Serving:
    """What answers requests: one version of the tensors, the statistics that go with it, and their place in the log."""

    version: Version
    statistics: Statistics | None
    seq: int


@dataclass
class Tally:
    """What a stream has done since the service started."""

    requests: int = 0
    pictures: int = 0
    batches: int = 0
    learned: int = 0
    skipped: int = 0
    failed: int = 0
    fallbacks: int = 0
    trips: int = 0


class LiveStream:
    """A named stream of pictures: predicts at once, logs, and learns behind it.

    Parameters
    ----------
    name
        What clients call it.
    make
        Builds its state at the source.
    settings, ledger
        Of the service.
    """

    def __init__(self, name: str, make: Callable[[], State], settings: Settings, ledger: Ledger) -> None:
        self.name = name
        self.make = make
        self.settings = settings
        self.ledger = ledger
        self.state = make()
        self.tally = Tally()
        self.history = History()
        # What the ledger has not taken yet, and the write that is on its way to enter it.
        self._untold: list[Outcome] = []
        self._telling: Future[list[Outcome]] | None = None
        self._untold_lock = threading.Lock()
        self._saving: threading.Thread | None = None
        self._storing = ""
        self.classes = torch.zeros(0)
        self.recovered = self._recover()
        self._source = self.state.adapter.classifier.source_flat()
        self.serving = self._now()
        self.learner = Learner(
            self.state,
            done=self._done,
            save=self.checkpoint,
            checkpoint_s=settings.checkpoint_s,
            checkpoint_events=settings.checkpoint_events,
            max_lag=settings.max_lag,
            name=f"learner {name}",
        )
        self.learner.start()
        self.batcher = Batcher(
            self._answer,
            max_batch=settings.max_batch,
            max_wait_ms=settings.max_wait_ms,
            max_queue=settings.max_queue,
            max_bytes=settings.limits.body,
            behind=lambda: self.learner.waiting,
            name=f"batcher {name}",
        )
        # A kill may have left parts of a large checkpoint: killed again and again, they would fill the disk.
        self._sweep()

    # -- predicting ---------------------------------------------------------------------------------------------

    def predict(self, job: Job) -> Future[Reply]:
        """Queue the pictures of a request; its reply comes when they are in the log. Raises `Full`, or `Stopping`."""
        if self.learner.failed is not None:
            # Its log would grow without end, and a restart has to go through all of it.
            raise Stopping(f"the learner of stream {self.name} has stopped: see the log, and restart the service")
        self.batcher.submit(job)
        return job.future

    def infer(self, inputs: Tensor) -> tuple[Tensor, int]:
        """Logits, and the place in the log up to which the weights behind them have learned. Nothing is changed."""
        adapter, serving = self.state.adapter, self.serving
        inputs = inputs.to(adapter.classifier.device)
        adapter.classifier.check(inputs)
        with torch.no_grad():
            forward = adapter.classifier.forward(inputs, version=serving.version, statistics=serving.statistics)
            logits = adapter.update.output(forward)
            if not bool(logits.isfinite().all()):
                # The guard will see to the learner; the client gets an answer now.
                self.tally.fallbacks += 1
                source = adapter.classifier.source()
                logits = adapter.classifier.forward(inputs, version=source, statistics="source").logits
        return logits.cpu(), serving.seq

    def _answer(self, jobs: list[Job]) -> None:
        samples = [sample for job in jobs for sample in job.samples]
        inputs = torch.stack([sample.pixels for sample in samples])
        logits, version = self.infer(inputs)
        if not bool(logits.isfinite().all()):
            self._part(jobs, logits)
            return
        probabilities = logits.double().softmax(dim=1)
        body = {
            "requests": [[job.request, len(job.samples)] for job in jobs],
            "kinds": [sample.kind for sample in samples],
            "sizes": [len(sample.data) for sample in samples],
            "top": best_guesses(logits),
            # A replay is held to what holds now, whatever a later version allows.
            "room": rooms()[0],
        }
        pictures = b"".join(sample.data for sample in samples)
        admitted = False

        def write(session: Session) -> Event:
            nonlocal admitted
            admitted = self.learner.admit()
            return db.log(session, self.name, "batch", body, pictures=pictures, skipped=not admitted, version=version)

        def reply(event: Event) -> None:
            self._count(jobs, event, logits, probabilities)
            # Pixels take far more memory than pictures as received, from which the learner can make them again.
            self.learner.feed(replace(event, inputs=inputs) if self.learner.waiting <= _READY else event)
            start = 0
            for job in jobs:
                end = start + len(job.samples)
                job.future.set_result(Reply(probabilities[start:end], version))
                start = end

        def settle(written: Future[Event]) -> None:
            problem = written.exception()
            if problem is not None:
                if admitted:
                    self.learner.withdraw()
                for job in jobs:
                    job.future.set_exception(problem)

        self.ledger.write(write, reply).add_done_callback(settle)

    def _part(self, jobs: list[Job], logits: Tensor) -> None:
        """Refuse the requests with a picture that even the source has no number for, and answer the others."""
        sound: list[Job] = []
        for job, rows in zip(jobs, logits.split([len(job.samples) for job in jobs]), strict=True):
            bad = (~rows.isfinite().all(dim=1)).nonzero().flatten().tolist()
            if bad:
                job.future.set_exception(
                    errors.BadInput(f"the model gives NaN or Inf for pictures {bad}: leave them out")
                )
            else:
                sound.append(job)
        if sound:
            self._answer(sound)

    def _count(self, jobs: Sequence[Job], event: Event, logits: Tensor, probabilities: Tensor) -> None:
        tally, count = self.tally, len(logits)
        tally.requests += len(jobs)
        tally.pictures += count
        tally.batches += 1
        tally.skipped += event.skipped
        seen = probabilities.argmax(dim=1).bincount(minlength=logits.shape[1])
        self.classes = seen if len(self.classes) == 0 else self.classes + seen
        now = time.monotonic()
        self.history.answered(
            time.time(),
            [now - job.at for job in jobs],
            float(signals.entropy(logits).sum()),
            seen.numpy(),
            skipped=event.skipped,
            **self._gauges(),
        )

    def _gauges(self) -> dict[str, float]:
        return {
            "spent": self.state.spent,
            "allowed": self.state.allowed,
            "waiting": self.learner.waiting,
            "drift": self.drift,
        }

    def _now(self) -> Serving:
        classifier = self.state.adapter.classifier
        running = classifier.running
        statistics = None if running is None else Statistics(running)
        return Serving(classifier.live, statistics, self.state.position)

    @property
    def drift(self) -> float:
        """How far the adapted tensors are from the source, relative to their own length."""
        moved = (self.serving.version.flat - self._source).norm()
        return float(moved) / max(float(self._source.norm()), 1e-12)

    # -- learning -----------------------------------------------------------------------------------------------

    def _done(self, event: Event, outcome: Outcome) -> None:
        self.serving = self._now()
        if outcome.step is not None:
            self.tally.learned += 1
            self.history.learned(time.time(), **self._gauges())
        if outcome.failed is not None:
            self._fail(outcome.failed)
        self.tally.trips += outcome.tripped is not None
        if outcome.asked or outcome.learned or outcome.expired or outcome.tripped or outcome.late:
            self.tell([replace(outcome, step=None)])

    def _fail(self, why: str) -> None:
        """Count a batch that could not be learned, and tell of the first one: it may be so with all that follow."""
        self.tally.failed += 1
        if self.tally.failed == 1:
            _log.warning("stream %s: a batch could not be learned: %s", self.name, why)
            self.ledger.write(lambda session: db.notice(session, self.name, "failed", why=why))

    def tell(self, outcomes: Sequence[Outcome] = ()) -> Future[list[Outcome]]:
        """Enter outcomes into the ledger, with those that it could not take before: the disk may have been full."""
        with self._untold_lock:
            self._untold += outcomes
            if self._telling is None or self._telling.done():
                self._telling = self.ledger.write(self._tell, self._told)
            return self._telling

    def _tell(self, session: Session) -> list[Outcome]:
        with self._untold_lock:
            # What comes from here on needs another write.
            self._telling, outcomes = None, list(self._untold)
        record(session, self.name, outcomes)
        return outcomes

    def _told(self, outcomes: Sequence[Outcome]) -> None:
        told = set(outcomes)
        with self._untold_lock:
            self._untold = [outcome for outcome in self._untold if outcome not in told]

    def checkpoint(self) -> None:
        """Write the state and its place in the log. Runs between two events."""
        state, seq = pack(self.state.state_dict()), self.state.position
        self.saved()
        if len(state) <= db.PART:
            self._save(seq, state)
        else:
            # It takes seconds, in which this thread can learn.
            self._saving = threading.Thread(target=self._save, args=(seq, state), name="checkpoint", daemon=True)
            self._saving.start()

    def saved(self) -> None:
        """Wait for a large checkpoint that is on its way."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def _save(self, seq: int, state: bytes) -> None:
        def write(session: Session) -> list[Outcome]:
            # A restart begins after these events, and would not come upon what they led to again.
            told = self._tell(session)
            self.add_checkpoint(session, seq, state, digest)
            return told

        def then(told: list[Outcome]) -> None:
            self._told(told)
            self._sweep()

        def settle(written: Future[list[Outcome]]) -> None:
            problem = written.exception()
            if problem is not None:
                self._unsaved(problem, digest)

        try:
            digest = self.store(state)
        except Exception as problem:  # whatever it is, another attempt is due
            self._unsaved(problem, self._storing)
        else:
            self.ledger.write(write, then).add_done_callback(settle)

    def _unsaved(self, problem: BaseException, digest: str) -> None:
        if isinstance(problem, db.Lost):
            _log.error("stream %s: a checkpoint could not be written: %s", self.name, problem)
            return
        # Where no event follows there is no other occasion, and people wait for the questions told with it.
        self.learner.run(self.learner.unsaved)
        _log.error("stream %s: a checkpoint could not be written; it will be tried again", self.name, exc_info=problem)
        # The next attempt may be of another state, and where the disk is full, replies need the room of this one.
        if self._storing == digest:
            self._storing = ""
        self._sweep()

    def store(self, state: bytes) -> str:
        """Bring a large state to the ledger little by little, since replies wait meanwhile. Gives its digest."""
        with self.ledger.read() as session:
            db.require_room(session, state)
        digest = self._storing = db.digest_of(state)
        for part in db.parts(self.name, state, digest):
            self.ledger.write(part).result()
        return digest

    def _sweep(self) -> Future[bool]:
        def write(session: Session) -> bool:
            events, parts = db.sweep(session, self.name), db.sweep_parts(session, self.name, but=self._storing)
            return events or parts

        return self.ledger.write(write, self._again)

    def _again(self, more: bool) -> None:
        if more:
            self._sweep()

    def add_checkpoint(self, session: Session, seq: int, state: bytes, digest: str) -> None:
        """A piece of writing: a state, which was stored, and its place in the log."""
        keep, keep_log = self.settings.checkpoints, self.settings.keep_log
        db.add_checkpoint(session, self.name, seq, state, keep=keep, keep_log=keep_log, digest=digest)

    def between(self, task: Callable[[], T]) -> Future[T]:
        """Do something in the learner's thread, between two events."""

        def run() -> T:
            result = task()
            self.serving = self._now()
            return result

        return self.learner.run(run)

    def note(self, kind: str, **body: Any) -> None:
        """Note something for the people who look after the service."""
        self.ledger.write(lambda session: db.notice(session, self.name, kind, **body)).result()

    # -- coming back --------------------------------------------------------------------------------------------

    def _recover(self) -> int:
        """Load the last checkpoint and replay what the log holds beyond it. Gives the number of events replayed."""
        problem: errors.StateMismatch | None = None
        for self.state.unsaid in rooms():
            replay = self._replay()
            try:
                self.ledger.write(replay.confirm).result()
            except errors.StateMismatch as error:
                problem = problem or error
                if replay.says_all:
                    break
                # Written by an earlier version, which may have let more questions wait.
                self.state = self.make()
            else:
                return replay.events
        assert problem is not None
        raise problem

    def _replay(self) -> _Recovery:
        with self.ledger.read() as session:
            checkpoint = db.last_checkpoint(session, self.name)
            start = 0
            if checkpoint is not None:
                try:
                    self.state.load_state_dict(unpack(checkpoint.state))
                except errors.StateMismatch as error:
                    raise errors.StateMismatch(
                        f"stream {self.name!r} of this database was begun with another model or other options; start "
                        f"with those, or use a new stream or database. In detail: {error}"
                    ) from error
                start = checkpoint.seq
            known = session.scalars(select(Question.id).where(Question.stream == self.name, Question.seq > start)).all()
            replay = _Recovery(self.state, self.name, set(known))
            for event in db.events(session, self.name, start):
                replay.apply(event)
        return replay

    def close(self) -> None:
        """Answer, learn and save what is under way."""
        self.batcher.close()
        self.learner.close()
        self.saved()
        # What is not deleted now will be after the next checkpoint.
        with contextlib.suppress(SQLAlchemyError, db.Lost):
            while self._sweep().result():
                pass


class _Recovery:
    """What the log of a stream leads to once more, and whether it is what the ledger says.

    Parameters
    ----------
    state
        As of the last checkpoint.
    stream, known
        Of the ledger: whose, and the questions that it holds of the time since.
    """

    def __init__(self, state: State, stream: str, known: set[str]) -> None:
        self.state = state
        self.stream = stream
        self.known = known
        self.events = 0
        self.says_all = True
        self._missing = set(known)
        self._outcomes: list[Outcome] = []

    def apply(self, event: Event) -> None:
        self.events += 1
        self.says_all &= event.kind != "batch" or "room" in event.body
        outcome = self.state.apply(event)
        self._missing.difference_update(item.id for item in outcome.asked)
        # What the ledger holds is told and charged: its pictures need not be kept until the end.
        new = [item for item in outcome.asked if item.id not in self.known]
        self._outcomes.append(replace(outcome, asked=new, step=None))

    def confirm(self, session: Session) -> None:
        """Enter what the ledger does not know, or refuse and enter nothing: another version may replay it rightly."""
        record(session, self.stream, self._outcomes)
        charged = session.scalar(select(func.sum(Charge.units)).where(Charge.stream == self.stream)) or 0
        if self._missing or charged != self.state.spent:
            raise errors.StateMismatch(
                f"stream {self.stream!r}: the replay of the event log did not come out as before: {len(self._missing)} "
                f"questions are missing, and {self.state.spent} labels are charged, {charged} were. It does on the "
                "same kind of processor, version of torch and threads: go back to these, or use a new stream"
            )


def record(session: Session, stream: str, outcomes: Sequence[Outcome]) -> None:
    """Enter into the ledger what events have led to. Entered again, it changes nothing."""
    now = time.time()
    for outcome in outcomes:
        questions = [
            {
                "stream": stream,
                "id": item.id,
                "seq": outcome.seq,
                "rank": rank,
                "index": item.index,
                "name": item.name,
                "audit": item.audit,
                "asked_at": now,
                "state": "open",
                "guesses": [list(pair) for pair in item.guesses],
                "picture_kind": item.kind,
                "picture": item.data,
                "query": None if item.query is None else pack(item.query.pack()),
            }
            for rank, item in enumerate(outcome.asked)
        ]
        db.insert_new(session, Question, questions)
        charges = [*((item.id, 1) for item in outcome.asked), *((name, -1) for name in outcome.refunded)]
        db.insert_new(
            session,
            Charge,
            [
                {"stream": stream, "query": name, "units": units, "seq": outcome.seq, "at": now}
                for name, units in charges
            ],
        )
        learned = [{"stream": stream, "query": name, "seq": outcome.seq, "at": now} for name in outcome.learned]
        db.insert_new(session, Learned, learned)
        db.move(session, stream, outcome.learned, "learned")
        db.move(session, stream, [*outcome.expired, *outcome.late], "expired")
        for late in db.portions(outcome.late):
            session.execute(
                update(AnswerRow)
                .where(AnswerRow.stream == stream, AnswerRow.query.in_(late), AnswerRow.status == "accepted")
                .values(status="late")
            )
        if outcome.tripped is not None and not _is_noted(session, stream, outcome.seq):
            db.notice(session, stream, "guard", why=outcome.tripped, seq=outcome.seq)


def _is_noted(session: Session, stream: str, seq: int) -> bool:
    same = Notice.stream == stream, Notice.kind == "guard", Notice.body["seq"].as_integer() == seq
    return bool(session.scalar(select(exists().where(*same))))


class Service:
    """Everything that runs behind the HTTP interface.

    Parameters
    ----------
    model
        What is served. It is never changed.
    settings
        How.
    """

    def __init__(self, model: SourceModel, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        torch.set_num_threads(settings.threads)
        self.uploads = UploadReader(
            model.preparation, max_pictures=settings.max_batch, max_pixels=settings.limits.pixels
        )
        outputs = self._make().adapter.classifier.outputs
        if outputs is None:
            raise errors.BadConfig("the number of classes cannot be read off the model's head: name it with head=…")
        self.classes = class_names(model, settings.classes, outputs)
        self.started = time.time()
        self.ledger = Ledger(settings.database)
        self.streams: dict[str, LiveStream] = {}
        self._closing = threading.Lock()
        self.ready = False
        try:
            for name in settings.streams:
                self.streams[name] = LiveStream(name, self._make, settings, self.ledger)
            for stream in self.streams.values():
                kind = "recovered" if stream.recovered else "start"
                stream.note(kind, replayed=stream.recovered, recipe=settings.recipe)
        except BaseException:
            self.close()
            raise
        self.ready = True

    def _make(self) -> State:
        settings = self.settings
        return State(build(self.model, settings), Audit(settings.audit_rate, settings.seed), self.uploads)

    @property
    def healthy(self) -> bool:
        return (
            self.ledger.alive
            and not self.ledger.lost
            and all(stream.learner.failed is None for stream in self.streams.values())
        )

    def close(self) -> None:
        """Stop in good order: what is under way is answered, learned and saved."""
        with self._closing:
            self.ready = False
            for stream in self.streams.values():
                stream.close()
            self.ledger.close()
