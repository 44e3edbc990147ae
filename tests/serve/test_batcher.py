"""Does a micro-batch stay open longer while learning is behind, and no longer otherwise?"""

from __future__ import annotations

import queue
import time

import pytest
import torch

from wise_atta.serve.batcher import Batcher, Job, Reply
from wise_atta.serve.uploads import Sample

LONG_AGO = 30.0


def job(age: float = 0.0) -> Job:
    picture = Sample("PNG", bytes(10), torch.zeros(1))
    return Job("request", [picture], at=time.monotonic() - age)


def gathered(behind: int) -> tuple[Batcher, queue.Queue[list[Job]]]:
    """A batcher that would wait 20 s for a third picture, and the micro-batches that it closed."""
    closed: queue.Queue[list[Job]] = queue.Queue()

    def answer(jobs: list[Job]) -> None:
        for each in jobs:
            each.future.set_result(Reply(torch.zeros(1, 2), 0))
        closed.put(jobs)

    made = Batcher(answer, max_batch=3, max_wait_ms=20_000, max_queue=10, behind=lambda: behind)
    return made, closed


def test_a_first_picture_that_waited_long_enough_closes_its_batch() -> None:
    batcher, closed = gathered(behind=0)
    old = job(LONG_AGO)
    batcher.submit(old)
    assert closed.get(timeout=60) == [old]
    batcher.close()


@pytest.mark.parametrize(("behind", "first"), [(0, 2), (7, 3)])
def test_while_learning_is_behind_pictures_that_keep_coming_join_it(behind: int, first: int) -> None:
    batcher, closed = gathered(behind)
    jobs = [job(LONG_AGO), job(10.0), job()]
    with batcher._more:  # both are there before the batcher looks
        for each in jobs[:2]:
            batcher._jobs.append(each)
        batcher._more.notify()
    if first == 2:
        assert closed.get(timeout=60) == jobs[:2]
    batcher.submit(jobs[2])
    if first == 3:
        assert closed.get(timeout=60) == jobs
    else:
        batcher.close()
        assert closed.get(timeout=60) == jobs[2:]
    batcher.close()


def test_however_far_behind_a_picture_does_not_wait_when_no_others_come() -> None:
    batcher, closed = gathered(behind=7)
    old = job(LONG_AGO)
    batcher.submit(old)
    assert closed.get(timeout=60) == [old]
    batcher.close()


def test_heavy_pictures_do_not_make_one_row_that_the_log_cannot_take() -> None:
    closed: queue.Queue[list[Job]] = queue.Queue()
    batcher = Batcher(closed.put, max_batch=64, max_wait_ms=20_000, max_queue=100, max_bytes=25)
    heavy = Job("heavy", [Sample("PNG", bytes(40), torch.zeros(1))])
    jobs = [*(job() for _ in range(3)), heavy, *(job() for _ in range(2))]
    for each in jobs:
        batcher.submit(each)
    batcher.close()
    groups = [closed.get(timeout=10) for _ in range(closed.qsize())]
    assert [sum(each.size for each in group) for group in groups] == [20, 10, 40, 20]
    assert [each for group in groups for each in group] == jobs
