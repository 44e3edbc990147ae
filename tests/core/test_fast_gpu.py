"""Do CUDA graphs, bf16 and compiled nets say the same as the plain way on the device?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core import nets
from core.fast import METHODS
from torch import Tensor

from wise_atta import Adapter, adapt, who

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]


def make(method: str = "wise", kind: str = "batch-norm", **options: Any) -> Adapter:
    chosen: dict[str, Any] = {"lr": 0.01, "precision": "fp32", **METHODS[method]}
    if method in ("eatta", "wise"):
        chosen["annotator"] = who.Oracle(nets.truth)
    return adapt(nets.make(kind, dtype=torch.float32).cuda(), method, **(chosen | options))


def play(adapter: Adapter, steps: int = 50, kind: str = "batch-norm") -> list[Tensor]:
    """Batches of 16, and among them one of 5."""
    sizes = [5 if number == 20 else 16 for number in range(steps)]
    return [adapter.step(batch(kind, number, n)).logits for number, n in enumerate(sizes)]


def batch(kind: str, number: int, n: int = 16) -> Any:
    inputs = nets.batch(kind, 1 + number % 8, n=n, dtype=torch.float32)
    return {name: leaf.cuda() for name, leaf in inputs.items()} if isinstance(inputs, dict) else inputs.cuda()


def agree(plain: Adapter, fast: Adapter, kind: str = "batch-norm", steps: int = 50) -> None:
    ours, theirs = play(plain, steps, kind), play(fast, steps, kind)
    distance = (plain.classifier.live.flat - fast.classifier.live.flat).abs().max().item()
    moved = (plain.classifier.live.flat - plain.classifier.source_flat()).abs().max().item()
    assert moved > 1e-4 and distance < 1e-5
    torch.testing.assert_close(theirs[-1], ours[-1], rtol=1e-4, atol=1e-4)
    assert plain.counts == fast.counts


def recorded(adapter: Adapter) -> list[str]:
    graphs = adapter.classifier._graphs
    assert graphs is not None
    return sorted(graphs._recordings)


@pytest.mark.parametrize("kind", ["batch-norm", "tokens", "text"])
@pytest.mark.parametrize("method", METHODS)
def test_after_fifty_steps_graphs_agree_with_the_plain_way(method: str, kind: str) -> None:
    fast = make(method, kind, graphs=True)
    agree(make(method, kind), fast, kind)
    assert "graph" in recorded(fast)


@pytest.mark.parametrize("statistics", ["source", "mixed", "ema", "renorm"])
def test_graphs_follow_the_statistics(statistics: str) -> None:
    fast = make(statistics=statistics, graphs=True)
    agree(make(statistics=statistics), fast)
    assert recorded(fast) == ["beside", "graph"]


@pytest.mark.parametrize("kind", ["batch-norm", "tabular", "folded"])
@pytest.mark.parametrize("mixture", [0.0, 0.3, 1.0])
def test_graphs_follow_a_mixture_and_its_gradient(mixture: float, kind: str) -> None:
    options: dict[str, Any] = {"statistics": "mixed", "mixture": mixture}
    fast = make("tent", kind, graphs=True, **options)
    agree(make("tent", kind, **options), fast, kind)
    assert "graph" in recorded(fast)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mixture_of_the_batch_alone_is_the_batch_on_a_device(precision: str) -> None:
    logits, moved = [], []
    for options in ({"statistics": "batch"}, {"statistics": "mixed", "mixture": 0.0}):
        adapter = make("tent", precision=precision, channels_last=True, **options)
        logits.append(play(adapter, 10)[-1])
        moved.append(adapter.classifier.live.flat - adapter.classifier.source_flat())
    tolerance = 1e-4 if precision == "fp32" else 0.05
    assert (logits[1] - logits[0]).norm() <= tolerance * logits[0].norm()
    assert moved[0].norm() > 0
    assert (moved[1] - moved[0]).norm() <= 5 * tolerance * moved[0].norm()


@pytest.mark.parametrize(
    "options",
    [
        {"annotator": who.Delayed(who.Oracle(nets.truth), who.Between(0, 3))},
        {"only_selected": True},
        {"block": "block"},
        {"guard": True},
        {"shadow": True},
    ],
    ids=["late labels", "light", "block", "guard", "shadow"],
)
def test_graphs_agree_where_more_than_one_forward_is_needed(options: dict[str, Any]) -> None:
    agree(make(**options), make(graphs=True, **options), steps=30)


def test_what_was_handed_out_does_not_change_with_the_next_batch() -> None:
    adapter = make(graphs=True)
    outs = [adapter.step(batch("batch-norm", number)) for number in range(8)]
    copies = [out.logits.clone() for out in outs]
    versions = [adapter.classifier.live.flat]
    kept = versions[0].clone()
    for number in range(8):
        adapter.step(batch("batch-norm", number))
    assert all(torch.equal(out.logits, copy) for out, copy in zip(outs, copies, strict=True))
    assert torch.equal(versions[0], kept)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_question_keeps_its_sample_when_the_batch_is_overwritten(graphs: bool) -> None:
    adapter = make(annotator=None, graphs=graphs, ratio=1, policy="uniform", expires_after=None)
    for number in range(6):
        inputs = batch("batch-norm", number)
        before = inputs.cpu()
        out = adapter.predict(inputs)
        (query,) = out.queries
        inputs.zero_()
        adapter.learn(out)
        torch.testing.assert_close(query.input, before[query.index], rtol=0, atol=0)
        torch.testing.assert_close(query.logits, out.logits[query.index].cpu(), rtol=0, atol=0)
        assert not (query.input.is_cuda or query.input.is_pinned() or query.logits.is_pinned())
    contexts = [item["context"]["values"] for item in adapter.state_dict()["desk"]["open"]]
    assert len(contexts) == 6 and not any(values.is_cuda or values.is_pinned() for values in contexts)


def test_an_older_prediction_is_learned_from_a_forward_of_its_own() -> None:
    results = []
    for options in ({}, {"graphs": True}):
        adapter = make(**options)
        play(adapter, 6)
        older, newer = (adapter.predict(batch("batch-norm", number)) for number in (6, 7))
        adapter.learn(older)
        adapter.learn(newer)
        results.append(adapter.classifier.live.flat)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


def test_a_state_saved_with_graphs_goes_on_without_them() -> None:
    first, second, plain = make(graphs=True), make(), make()
    play(first, 10)
    second.load_state_dict(first.state_dict())
    play(plain, 10)
    a, b = play(second, 4), play(plain, 4)
    torch.testing.assert_close(a[-1], b[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", list(nets.KINDS))
@pytest.mark.parametrize("graphs", [False, True])
def test_bf16_says_nearly_the_same(kind: str, graphs: bool) -> None:
    plain, fast = make(kind=kind), make(kind=kind, precision="bf16", channels_last=True, graphs=graphs)
    ours, theirs = play(plain, 8, kind), play(fast, 8, kind)
    assert (ours[0] - theirs[0]).abs().max() < 0.05 * ours[0].abs().max()
    assert theirs[-1].dtype == torch.float32


@pytest.mark.timeout(300)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_compiled_net_agrees_with_the_plain_one(graphs: bool) -> None:
    agree(make("tent"), make("tent", compile=True, graphs=graphs), steps=8)
