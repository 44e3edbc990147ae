"""The learner: one thread a stream, which takes the events of the log in their order."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from wise_atta.serve.batcher import Stopping
from wise_atta.serve.state import Event, Outcome, State

# To step behind, not to starve: a third of what another thread gets that wants the same core.
_NICE = 5
# Whoever learns holds the graph of a whole batch: no more do so at a time than there are processors, however many
# streams there are.
_TURNS = threading.BoundedSemaphore(os.cpu_count() or 1)
# The least time after which a checkpoint that could not be written is tried again.
_AGAIN_S = 1.0
_log = logging.getLogger("wise_atta.serve")
T = TypeVar("T")


class _Task(Generic[T]):
    """Something to do between two events, and who waits for it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()

    def do(self) -> None:
        try:
            result = self.work()
        except Exception as error:  # handed to whoever waits for it
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Learner:
    """Drives a `State` with the events of the log.

    Parameters
    ----------
    state
        What learns.
    done
        Called after every event, with its outcome.
    save
        Called when it is time for a checkpoint.
    checkpoint_s, checkpoint_events
        When that is: after so many seconds or so many events, if there were any.
    max_lag
        From how many waiting batches on further ones are skipped.
    """

    def __init__(
        self,
        state: State,
        *,
        done: Callable[[Event, Outcome], None],
        save: Callable[[], None],
        checkpoint_s: float,
        checkpoint_events: int,
        max_lag: int,
        name: str = "learner",
    ) -> None:
        self.state = state
        self.done = done
        self.save = save
        self.checkpoint_s = checkpoint_s
        self.checkpoint_events = checkpoint_events
        self.max_lag = max_lag
        self.failed: BaseException | None = None
        self._queue: queue.SimpleQueue[Event | _Task[Any] | None] = queue.SimpleQueue()
        self._ended = False
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = 0
        self._saved = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Batches that are waiting to be learned."""
        return self._waiting

    def admit(self) -> bool:
        """Whether one more batch is to be learned. If so it counts as waiting."""
        with self._lock:
            if self._waiting >= self.max_lag:
                return False
            self._waiting += 1
            return True

    def withdraw(self) -> None:
        """A batch that was admitted does not come after all, or was learned."""
        with self._lock:
            self._waiting -= 1

    def feed(self, event: Event) -> None:
        """Hand over an event that is in the log. Once the thread has ended it stays there, for a restart."""
        self._queue.put(event)
        if self._ended:
            self._refuse()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Do something between two events. Ends with `Stopping` if there is no learner to do it any more."""
        task = _Task(work)
        self._queue.put(task)
        if self._ended:
            self._refuse()
        return task.future

    def unsaved(self) -> None:
        """A checkpoint could not be written, so another one is due, though not at once. Runs between two events."""
        self._since += 1
        self._saved = max(self._saved, time.monotonic() + _AGAIN_S - self.checkpoint_s)

    def close(self) -> None:
        """Learn what is waiting, write a checkpoint, and stop."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":
            # Where processors are scarce, whoever waits for an answer goes first. There threads have a nice value each.
            nice = os.getpriority(os.PRIO_PROCESS, 0) + _NICE
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(nice, 19))
        try:
            while (item := self._next()) is not None:
                self._take(item)
            self._save()
        except BaseException as error:
            # A state that could not take an event must not take the next one: the service reports itself unwell.
            self.failed = error
            _log.exception("the learner has stopped")
        finally:
            self._ended = True
            self._refuse()

    def _refuse(self) -> None:
        """Fail the tasks that are queued: the thread has ended. Events stay in the log."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, _Task):
                    item.future.set_exception(Stopping("the learner has stopped: see the log, and restart the service"))

    def _next(self) -> Any:
        while True:
            left = max(self._saved + self.checkpoint_s - time.monotonic(), 0) if self._since else None
            try:
                return self._queue.get(timeout=left)
            except queue.Empty:
                self._save()

    def _take(self, item: Event | _Task[Any]) -> None:
        if isinstance(item, _Task):
            item.do()
            return
        with _TURNS:
            outcome = self.state.apply(item)
        if item.kind == "batch" and not item.skipped:
            self.withdraw()
        self._since += 1
        self.done(item, outcome)
        if self._since >= self.checkpoint_events or time.monotonic() - self._saved >= self.checkpoint_s:
            self._save()

    def _save(self) -> None:
        if self._since:
            self.save()
        self._since, self._saved = 0, time.monotonic()
