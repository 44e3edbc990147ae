"""Does a batch that could not be learned, and is learned again, leave what it would have left at once?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conformance.examples import CASES, Case, step
from core import nets
from core.checks import same

from wise_atta import Adapter, Anchor, Classifier, Guard, adapt
from wise_atta.how import Average, Optimizer, Replay
from wise_atta.what import Selector
from wise_atta.who import Callback, Query

# Whatever may run out of memory, or be interrupted, in a call.
PLACES = [
    (Classifier, ("forward", "head", "gradients", "pull", "publish", "commit")),
    (Optimizer, ("_sgd", "_adam", "step", "move", "publish")),
    (Anchor, ("follow",)),
    (Average, ("follow",)),
    (Replay, ("add",)),
    (Selector, ("pick", "scores", "shuffled")),
    (Query, ("__post_init__",)),
]


class Failure(BaseException):
    """Not an Exception: what interrupts a program is none either."""


class Fuse:
    """Fails once, before or after call number `left`."""

    left: int | None = None

    def burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.left = None
                raise Failure

    @contextmanager
    def laid(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        with patch.context() as context:
            for kind, names in PLACES:
                for name in names:
                    context.setattr(kind, name, self._around(getattr(kind, name)))
            yield

    def _around(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def burning(*args: Any, **kwargs: Any) -> Any:
            self.burn()
            result = plain(*args, **kwargs)
            self.burn()
            return result

        return burning


def learning_again(
    adapter: Adapter, patch: pytest.MonkeyPatch, every: int, call: str = "learn"
) -> tuple[Adapter, list[int]]:
    """Every `learn` fails at each `every`th place before it is let through; how often each did."""
    plain, failed = getattr(adapter, call), list[int]()

    def again(*args: Any) -> Any:
        fuse = Fuse()
        failed.append(0)
        with fuse.laid(patch):
            while True:
                fuse.left = 1 + failed[-1] * every
                before = adapter.state_dict()
                try:
                    return plain(*args)
                except Failure:
                    failed[-1] += 1
                    assert same(adapter.state_dict(), before), f"at place {1 + (failed[-1] - 1) * every}"

    patch.setattr(adapter, call, again)
    return adapter, failed


ADAPTING = {name: case for name, case in CASES.items() if case.adapts}


@pytest.mark.parametrize("case", ADAPTING.values(), ids=list(ADAPTING))
def test_a_batch_that_failed_anywhere_is_learned_again_to_the_same_bits(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, part = (case.use(case.make(), torch.float64) for _ in range(2))
    # Rules of many steps fail at some places of each.
    name = type(part.update).__name__
    part, failed = learning_again(part, monkeypatch, every={"Anchored": 13, "Candidates": 5}.get(name, 1))
    assert same(step(part, range(1, 6)), step(whole, range(1, 6)))
    assert same(part.state_dict(), whole.state_dict())
    assert name == "NoUpdate" or sum(failed) > 10


@pytest.mark.parametrize("case", ADAPTING.values(), ids=list(ADAPTING))
def test_a_batch_that_could_not_be_predicted_on_is_predicted_on_again_to_the_same_bits(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, part = (case.use(case.make(), torch.float64) for _ in range(2))
    part, failed = learning_again(part, monkeypatch, every=1, call="predict")
    assert same(step(part, range(1, 6)), step(whole, range(1, 6)))
    assert same(part.state_dict(), whole.state_dict()) and sum(failed) > 5


@pytest.mark.parametrize("how", [{"precision": "fp32"}, {"precision": "bf16"}, {"channels_last": True}])
@pytest.mark.parametrize(
    ("method", "options"), [("tent", {}), ("wise", {"ratio": 0.5}), ("wise", {"ratio": 0.5, "entropy": "all"})]
)
def test_a_fast_batch_that_failed_anywhere_is_learned_again_to_the_same_bits(
    method: str, options: dict[str, Any], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, part = (
        adapt(nets.make().float(), method, statistics="batch", **options, **how, annotator=Callback(nets.truth))
        for _ in range(2)
    )
    part, failed = learning_again(part, monkeypatch, every=3)
    for adapter in (whole, part):
        for number in range(1, 7):
            adapter.step(nets.batch(number=number, dtype=torch.float32))
    assert same(part.state_dict(), whole.state_dict()) and sum(failed) > 10


class Nervous(Guard):
    """Goes back at every third batch that it has seen."""

    def _alarm(self, look: Any) -> str | None:
        super()._alarm(look)
        return "three batches" if len(self._seen) == 3 else None

    def _confirmed(self, view: Any, inputs: Any) -> bool:
        return True


def test_a_guard_that_trips_in_a_batch_that_failed_trips_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = (adapt(nets.make(), "tent", lr=0.1, guard=Nervous(every=1)) for _ in range(2))
    part, failed = learning_again(part, monkeypatch, every=1)
    assert same(step(part, range(1, 9)), step(whole, range(1, 9)))
    assert same(part.state_dict(), whole.state_dict())
    assert whole.guard is not None and whole.guard.trips == 2 and sum(failed) > 10


def test_the_average_follows_a_batch_that_failed_also_where_its_label_is_learned_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(fails: bool) -> dict[str, Any]:
        adapter = adapt(nets.make(), "wise", ratio=0.5, policy="uniform", only_selected=True, statistics="ema")
        for number in (1, 2):
            adapter.learn(adapter.predict(nets.batch(number=number)))
        (query,) = adapter.open
        out = adapter.predict(nets.batch(number=3))
        if fails:
            with monkeypatch.context() as context, pytest.raises(Failure):
                context.setattr(Optimizer, "step", failing)
                adapter.learn(out, {query.id: 1})
        adapter.learn(adapter.predict(nets.batch(number=4)), {query.id: 1})
        adapter.learn(out)
        return adapter.state_dict()

    def failing(*_: Any, **__: Any) -> None:
        raise Failure

    assert same(run(fails=True), run(fails=False))
