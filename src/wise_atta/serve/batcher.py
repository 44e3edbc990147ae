"""The batcher: single pictures become batches, and nobody waits long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from wise_atta import errors
from wise_atta.serve.uploads import Sample

# How many times `max_wait_ms` a picture may wait for others while learning is behind.
_STRETCH = 2


class Full(errors.WiseAttaError):
    """The prediction queue is full; `after` says in how many seconds to try again."""

    def __init__(self, after: float) -> None:
        super().__init__("too many pictures are under way: try again later")
        self.after = after


class Stopping(errors.WiseAttaError):
    """No more requests are taken."""


@dataclass(eq=False)
class Reply:
    """What a request gets: probabilities [n, C] and the version of the weights that gave them."""

    probabilities: Tensor
    version: int


@dataclass(eq=False)
class Job:
    """The pictures of one request."""

    request: str
    samples: Sequence[Sample]
    future: Future[Reply] = field(default_factory=Future)
    at: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        """Bytes of its pictures as received."""
        return sum(len(sample.data) for sample in self.samples)

    def __post_init__(self) -> None:
        # The client may hang up; its pictures are part of the stream all the same.
        self.future.set_running_or_notify_cancel()


class Batcher:
    """Gathers jobs into micro-batches, in the order in which they came.

    Parameters
    ----------
    answer
        Gets the jobs of a micro-batch and sees to it that each of their futures is settled, now or later.
    max_batch, max_wait_ms
        When a micro-batch closes.
    max_bytes
        What the pictures of a micro-batch weigh together; a request that is heavier goes alone. They become one row of
        the log, and a server that is sent a gigabyte at once hangs up.
    behind
        How many micro-batches wait to be learned. While some do and pictures keep coming, a micro-batch stays open for
        twice `max_wait_ms`: fewer, larger ones cost the learner less.
    max_queue
        Pictures under way, from `submit` until their future is settled, before `Full` is raised.
    name
        Of the thread.
    """

    def __init__(
        self,
        answer: Callable[[list[Job]], None],
        *,
        max_batch: int,
        max_wait_ms: float,
        max_queue: int,
        max_bytes: int = 2**25,
        behind: Callable[[], int] = lambda: 0,
        name: str = "batcher",
    ) -> None:
        self.answer = answer
        self.behind = behind
        self.max_batch = max_batch
        self.max_wait = max_wait_ms / 1000
        self.max_queue = max_queue
        self.max_bytes = max_bytes
        self.under_way = 0
        self._jobs: deque[Job] = deque()
        self._more = threading.Condition()
        self._closed = False
        self._pace = 0.01
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job, or raise `Full`."""
        count = len(job.samples)
        with self._more:
            if self._closed:
                raise Stopping("the service is stopping: try again later")
            if self.under_way + count > self.max_queue:
                raise Full(max(1.0, self._pace * self.under_way))
            self.under_way += count
            self._jobs.append(job)
            self._more.notify()
        job.future.add_done_callback(lambda _: self._settled(count))

    def close(self) -> None:
        """Answer what is queued, take no more."""
        with self._more:
            self._closed = True
            self._more.notify()
        self._thread.join()

    def _settled(self, count: int) -> None:
        with self._more:
            self.under_way -= count

    def _run(self) -> None:
        while jobs := self._gather():
            began = time.monotonic()
            try:
                self.answer(jobs)
            except Exception as error:  # the thread has to outlive a batch that cannot be answered
                for job in jobs:
                    if not job.future.done():
                        job.future.set_exception(error)
            each = (time.monotonic() - began) / sum(len(job.samples) for job in jobs)
            self._pace += 0.1 * (each - self._pace)

    def _gather(self) -> list[Job]:
        """The next micro-batch; empty when all is over."""
        with self._more:
            while not self._jobs:
                if self._closed:
                    return []
                self._more.wait()
            while not self._closed and self._waiting() < self.max_batch:
                longest = self.max_wait * (_STRETCH if self.behind() else 1)
                until = min(self._jobs[0].at + longest, self._jobs[-1].at + self.max_wait)
                left = until - time.monotonic()
                if left <= 0 or not self._more.wait(left):
                    break
            jobs = [self._jobs.popleft()]
            count, size = len(jobs[0].samples), jobs[0].size
            while self._jobs:
                count, size = count + len(self._jobs[0].samples), size + self._jobs[0].size
                if count > self.max_batch or size > self.max_bytes:
                    break
                jobs.append(self._jobs.popleft())
            return jobs

    def _waiting(self) -> int:
        return sum(len(job.samples) for job in self._jobs)
