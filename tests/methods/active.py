"""How is an active method tried out? With truths that depend on the question alone, and a state saved on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from core.checks import same, saved
from methods import small
from torch import Tensor, nn

import wise_atta as wa
from wise_atta import who
from wise_atta.prediction import Step


def truth(query: wa.Query) -> int:
    return (3 * query.batch + query.index) % small.CLASSES


def adapt(method: str, *, model: nn.Module | None = None, **options: Any) -> wa.Adapter:
    """An adapter around the small net, whose questions are answered at once."""
    return wa.adapt(small.net() if model is None else model, method, **({"annotator": who.Oracle(truth)} | options))


def steps(adapter: wa.Adapter, stream: Sequence[Tensor]) -> list[tuple[wa.Prediction, Step]]:
    """Every batch's prediction and record."""
    records: list[Step] = []
    adapter.on_step(records.append)
    return [(adapter.step(x), records[-1]) for x in stream]


def rows(out: wa.Prediction) -> list[int]:
    return [query.index for query in (*out.queries, *out.sent)]


def labels(out: wa.Prediction) -> Tensor:
    return torch.tensor([truth(query) for query in out.queries])


def assert_resumes(make: Callable[[], wa.Adapter], batches: int = 6, after: int = 3) -> None:
    """Saved after some batches and loaded elsewhere, it goes on to the same bits."""
    stream = small.batches(batches)
    through, begun, resumed = make(), make(), make()
    expected = [out.logits for out, _ in steps(through, stream)]
    steps(begun, stream[:after])
    state = begun.state_dict()
    resumed.load_state_dict(saved(state))
    assert same(resumed.state_dict(), state)
    found = [out.logits for out, _ in steps(resumed, stream[after:])]
    assert all(torch.equal(a, b) for a, b in zip(expected[after:], found, strict=True))
    assert same(resumed.state_dict(), through.state_dict())
    resumed.reset(policy=True, account=True)
    fresh = make()
    again = [out.logits for out, _ in steps(resumed, stream)]
    # Draws are named by the number of the batch, which goes on after a reset: the first prediction is what tells.
    assert torch.equal(again[0], steps(fresh, stream[:1])[0][0].logits)
