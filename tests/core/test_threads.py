"""Do threads that share a model get what they would have got alone?"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from core import nets
from core.checks import look, same
from torch import Tensor, nn

from wise_atta import Adapter, adapt

CALLS = 1000


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Threads take turns far more often than they would by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs at the same time; their results, or the first error."""
    results: list[Any] = [None] * len(jobs)
    failures: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        try:
            start.wait()
            results[index] = jobs[index]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[index]) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def inputs() -> list[Tensor]:
    return [nets.batch("tabular", number, n=4) for number in range(1, 21)]


def bare(net: nn.Module) -> list[Tensor]:
    batches = inputs()
    with torch.no_grad():
        return [net(batches[call % 20]) for call in range(CALLS)]


def adapting(adapter: Adapter) -> list[Tensor]:
    batches, logits = inputs(), []
    for call in range(CALLS):
        out = adapter.predict(batches[call % 20])
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
        logits.append(out.logits)
    return logits


def adapters(net: nn.Module) -> tuple[Adapter, Adapter]:
    return adapt(net, "tent", lr=0.01), adapt(net, "wise", ratio=0.2, lr=0.01, entropy="all")


def test_two_adapters_and_the_bare_model_in_threads_are_serial() -> None:
    alone = nets.make("tabular")
    tent, wise = adapters(alone)
    serial = [bare(alone), adapting(tent), adapting(wise)]
    shared = nets.make("tabular")
    before = look(shared)
    tent, wise = adapters(shared)
    threaded = together(lambda: bare(shared), lambda: adapting(tent), lambda: adapting(wise))
    for name, own, expected in zip(("bare", "tent", "wise"), threaded, serial, strict=True):
        wrong = [call for call in range(CALLS) if not torch.equal(own[call], expected[call])]
        assert not wrong, f"{name}: {len(wrong)} of {CALLS} outputs differ, the first at call {wrong[0]}"
    assert same(look(shared), before)


def test_inference_during_learning_sees_one_version_at_a_time() -> None:
    adapter = adapt(nets.make("tabular"), "wise", ratio=1.0, policy="uniform", lr=0.05, entropy="all")
    x = nets.batch("tabular", 50, n=4)
    versions = [adapter.classifier.live]
    publish = adapter.classifier.publish

    def note(flat: Tensor) -> None:
        publish(flat)
        versions.append(adapter.classifier.live)

    adapter.classifier.publish = note  # type: ignore[method-assign]
    done = threading.Event()
    logits: list[Tensor] = []

    def learn() -> None:
        try:
            for number in range(1, 101):
                out = adapter.predict(nets.batch("tabular", number, n=4))
                adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
                enough = len(logits) + 2
                while number % 4 == 0 and len(logits) < enough:
                    time.sleep(1e-4)  # so that inference keeps pace on any machine
        finally:
            done.set()

    def infer() -> None:
        while not done.is_set():
            logits.append(adapter.predict(x, ask=False, learn=False).logits)

    together(learn, infer, infer)
    possible = {adapter.classifier.forward(x, version=version).logits.numpy().tobytes() for version in versions}
    seen = {own.numpy().tobytes() for own in logits}
    assert len(possible) == len(versions) > 100
    assert seen <= possible
    assert len(seen) > 10, "the threads hardly ran at the same time"


def test_inference_in_several_threads_gives_the_serial_outputs() -> None:
    adapter = adapt(nets.make("tabular"), "tent", lr=0.05)
    adapter.learn(adapter.predict(nets.batch("tabular")))
    batches = inputs()

    def infer() -> list[Tensor]:
        return [adapter.predict(batches[call % 20], ask=False, learn=False).logits for call in range(100)]

    serial = infer()
    for own in together(infer, infer, infer):
        assert same(own, serial)


def test_learning_from_two_threads_takes_one_step_at_a_time() -> None:
    adapter = adapt(nets.make("tabular"), "wise", ratio=1.0, policy="uniform", lr=0.01, entropy="all")

    def learn() -> list[int]:
        numbers = []
        for number in range(1, 51):
            out = adapter.predict(nets.batch("tabular", number, n=4))
            adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
            numbers.append(out.number)
        return numbers

    first, second = together(learn, learn)
    assert sorted([*first, *second]) == list(range(1, 101))
    assert adapter.counts.asked == adapter.counts.learned == adapter.policy.spent == 100


def test_open_questions_can_be_looked_at_while_others_come_and_go() -> None:
    adapter = adapt(nets.make("tabular"), "wise", ratio=1.0, policy="uniform", expires_after=100)
    done = threading.Event()

    def work() -> None:
        x = nets.batch("tabular")
        for _ in range(300):
            adapter.learn(adapter.predict(x))
        done.set()

    def look_on() -> int:
        seen = 0
        while not done.is_set():
            seen = max(seen, len(adapter.open))
        return seen

    assert together(work, look_on)[1] >= 100
