"""A batch that could not be predicted on or learned, and is tried again, leaves what it would have left at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.examples import CASES
from core import nets

from wise_atta import Adapter, Guard, adapt
from wise_atta.conformance import FIRST, REST, Case, Fuse, Interrupted, same
from wise_atta.how import Optimizer
from wise_atta.who import Callback

ADAPTING = {name: case for name, case in CASES.items() if case.adapts}


def trying_again(adapter: Adapter, call: str, every: int) -> list[int]:
    """Every `learn` or `predict` fails at each `every`th place before it is let through; how often each did."""
    plain, failed = getattr(adapter, call), list[int]()

    def again(*args: Any) -> Any:
        failed.append(0)
        while True:
            place, before = 1 + failed[-1] * every, adapter.state_dict()
            try:
                with Fuse(place):
                    return plain(*args)
            except Interrupted:
                failed[-1] += 1
                assert same(adapter.state_dict(), before), f"at place {place}"

    setattr(adapter, call, again)
    return failed


@pytest.mark.parametrize("case", ADAPTING.values(), ids=list(ADAPTING))
def test_a_batch_that_could_not_be_predicted_on_is_predicted_on_again_to_the_same_bits(case: Case) -> None:
    whole, part = case.start(), case.start()
    assert same(case.run(part, FIRST), case.run(whole, FIRST))
    failed = trying_again(part, "predict", every=7)
    assert same(case.run(part, REST), case.run(whole, REST))
    assert same(part.state_dict(), whole.state_dict()) and sum(failed) > 5


@pytest.mark.parametrize("how", [{"precision": "fp32"}, {"precision": "bf16"}, {"channels_last": True}])
@pytest.mark.parametrize(
    ("method", "options"), [("tent", {}), ("wise", {"ratio": 0.5}), ("wise", {"ratio": 0.5, "entropy": "all"})]
)
@pytest.mark.parametrize("call", ["predict", "learn"])
def test_a_fast_batch_that_failed_anywhere_is_tried_again_to_the_same_bits(
    method: str, options: dict[str, Any], how: dict[str, Any], call: str
) -> None:
    whole, part = (
        adapt(nets.make().float(), method, statistics="batch", **options, **how, annotator=Callback(nets.truth))
        for _ in range(2)
    )
    failed = trying_again(part, call, every=5)
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


def test_a_guard_that_trips_in_a_batch_that_failed_trips_again() -> None:
    whole, part = (adapt(nets.make(), "tent", lr=0.1, guard=Nervous(every=1)) for _ in range(2))
    failed = trying_again(part, "learn", every=1)
    for number in range(1, 9):
        batch = nets.batch(number=number).sigmoid()
        assert same(part.step(batch).logits, whole.step(batch).logits)
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
            with monkeypatch.context() as context, pytest.raises(Interrupted):
                context.setattr(Optimizer, "step", failing)
                adapter.learn(out, {query.id: 1})
        adapter.learn(adapter.predict(nets.batch(number=4)), {query.id: 1})
        adapter.learn(out)
        return adapter.state_dict()

    def failing(*_: Any, **__: Any) -> None:
        raise Interrupted

    assert same(run(fails=True), run(fails=False))
