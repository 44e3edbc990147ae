"""Is the anchor the moving average that the paper says, and does it cost only what it must?"""

from __future__ import annotations

import copy

import pytest
import torch
from core import nets
from core.checks import same
from core.count import Kernels

from wise_atta import Adapter, Anchor, Classifier, adapt, errors, signals


def asking(**options: object) -> Adapter:
    chosen = {"ratio": 0.5, "policy": "uniform", "entropy": "all", "lr": 0.3, "head_lr": 0.2} | options
    return adapt(nets.make(), "wise", **({"statistics": "batch"} | chosen))


def play(adapter: Adapter, number: int) -> None:
    out = adapter.predict(nets.batch(number=number))
    adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 1.0])
def test_the_anchor_is_the_moving_average_of_adapted_tensors(momentum: float) -> None:
    adapter = asking(anchor_momentum=momentum)
    names = list(adapter.classifier.layout.shapes)
    plain = {name: adapter.classifier.live.tensors[name].detach().clone() for name in names}
    for number in range(1, 9):
        play(adapter, number)
        for name in names:
            live = adapter.classifier.live.tensors[name].detach()
            plain[name] = momentum * plain[name] + (1 - momentum) * live
    assert adapter.anchor is not None
    for name, tensor in adapter.anchor.version.tensors.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-12, atol=1e-12)
    assert {"fc.weight", "bn1.bias"} <= set(names)


def test_the_anchor_s_forward_is_that_of_a_net_with_its_tensors() -> None:
    net = nets.make()
    classifier, anchor = Classifier(net, statistics="source"), Anchor(0.75)
    anchor.start(classifier.live)
    classifier.publish(classifier.source_flat() + 1)
    anchor.follow(classifier.live)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for name, tensor in twin.named_parameters():
            if name in classifier.layout.shapes:
                tensor.add_(0.25)
        expected = twin(nets.batch())
    torch.testing.assert_close(classifier.forward(nets.batch(), version=anchor.version).logits, expected)


def test_the_anchor_keeps_one_vector_and_shares_the_rest() -> None:
    net = nets.make()
    classifier, anchor = Classifier(net), Anchor()
    anchor.start(classifier.live)
    assert set(anchor.version.tensors) == set(classifier.layout.shapes)
    classifier.forward(nets.batch(), version=anchor.version)
    assert len(classifier.replicas.free) == 1, "the anchor's forward takes no module of its own"
    replica = classifier.replicas.free[0].module
    assert replica.conv1.weight.data_ptr() == net.conv1.weight.data_ptr()
    (kept,) = anchor.state_dict().values()
    assert kept.numel() == classifier.layout.total


def test_the_anchor_runs_only_on_selected_batches() -> None:
    adapter, ran, selected = asking(ratio=0.4), [], []
    for number in range(1, 11):
        with Kernels() as kernels:
            out = adapter.predict(nets.batch(number=number))
        # Of the two convolutions, the first is known from the forward before.
        ran.append(2 * kernels.forwards().get((False, 8), 0))
        selected.append(len(out.queries))
        adapter.learn(out, {query.id: 0 for query in out.queries})
    assert ran == selected == [0, 0, 1, 0, 1, 0, 0, 1, 0, 1]


def test_the_sample_asked_for_has_drifted_furthest_from_the_anchor() -> None:
    adapter = asking(ratio=1.0, labels=1)
    twin = nets.make()
    assert adapter.anchor is not None
    for number in range(1, 7):
        x = nets.batch(number=number)
        slow = dict(adapter.anchor.version.tensors)
        out = adapter.predict(x)
        with torch.no_grad():
            for name, tensor in twin.named_parameters():
                if name in slow:
                    tensor.copy_(slow[name])
            for part in twin.modules():
                part.training = isinstance(part, torch.nn.BatchNorm2d)
            drift = (out.logits.softmax(1) - twin(x).softmax(1)).square().sum(1).sqrt()
        if number > 1:
            assert out.queries[0].index == int(drift.argmax())
        assert out.view is not None
        torch.testing.assert_close(out.view.drift, drift, rtol=1e-9, atol=1e-12)
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})


def test_the_choice_in_the_first_batch_is_random() -> None:
    chosen = set()
    for seed in range(12):
        out = asking(ratio=1.0, seed=seed).predict(nets.batch())
        assert out.view is not None and not out.view.drift.any()
        chosen.add(out.queries[0].index)
    assert len(chosen) > 3


def test_a_view_that_is_looked_at_later_sees_the_anchor_of_its_batch() -> None:
    adapter = asking(ratio=0.1)
    for number in range(1, 5):
        play(adapter, number)
    out = adapter.predict(nets.batch(number=5))
    assert adapter.anchor is not None and out.view is not None and not out.view.drift_known
    anchor = adapter.anchor.version
    adapter.learn(out)
    expected = signals.drift(out.logits, adapter.classifier.forward(nets.batch(number=5), version=anchor).logits)
    assert torch.equal(out.view.drift, expected)


def test_the_anchor_follows_once_a_batch_without_learning_too() -> None:
    adapter = asking(only_selected=True, ratio=0.5)
    assert adapter.anchor is not None
    flats = [adapter.anchor.state_dict()["flat"]]
    for number in (1, 2, 3):
        play(adapter, number)
        flats.append(adapter.anchor.state_dict()["flat"])
    assert torch.equal(flats[0], flats[1]) and not torch.equal(flats[1], flats[2])
    torch.testing.assert_close(flats[3], 0.9 * flats[2] + 0.1 * adapter.classifier.live.flat.detach())
    assert not torch.equal(flats[2], flats[3])


def test_the_published_update_moves_the_anchor_after_each_step() -> None:
    adapter = asking(policy="paced", preset="authors", length=4, ratio=1.0)
    optimizer, reached = adapter.update.optimizer, []
    step = optimizer.step
    optimizer.step = lambda *args, **options: (step(*args, **options), reached.append(optimizer.flat.clone()))[0]  # type: ignore[func-returns-value, method-assign]
    assert adapter.anchor is not None
    plain = adapter.anchor.state_dict()["flat"]
    play(adapter, 1)
    assert len(reached) == 2
    for flat in reached:
        plain = 0.9 * plain + 0.1 * flat
    torch.testing.assert_close(adapter.anchor.state_dict()["flat"], plain, rtol=1e-12, atol=1e-12)


def test_reset_and_restart_put_the_anchor_where_the_model_is() -> None:
    adapter = asking()
    for number in range(1, 5):
        play(adapter, number)
    assert adapter.anchor is not None
    adapter.restart()
    assert torch.equal(adapter.anchor.version.flat, adapter.classifier.live.flat)
    assert not torch.equal(adapter.anchor.version.flat, adapter.classifier.source_flat())
    adapter.reset()
    assert torch.equal(adapter.anchor.version.flat, adapter.classifier.source_flat())


def test_resetting_the_policy_alone_leaves_the_anchor_alone() -> None:
    adapter = asking()
    for number in range(1, 5):
        play(adapter, number)
    assert adapter.anchor is not None
    before = adapter.anchor.state_dict()
    adapter.reset(model=False, policy=True)
    assert same(adapter.anchor.state_dict(), before)


def test_a_state_keeps_its_values_and_a_foreign_one_is_refused() -> None:
    classifier = Classifier(nets.make())
    anchor, other = Anchor(), Anchor()
    anchor.start(classifier.live)
    other.start(Classifier(nets.make(), adapt="head").live)
    state = anchor.state_dict()
    kept = state["flat"].clone()
    anchor.load_state_dict(state)
    classifier.publish(classifier.source_flat() + 1)
    anchor.follow(classifier.live)
    assert torch.equal(state["flat"], kept), "the state belongs to its owner"
    with pytest.raises(errors.StateMismatch, match="values"):
        anchor.load_state_dict(other.state_dict())


@pytest.mark.parametrize("momentum", [-0.1, 1.1, float("nan")])
def test_a_momentum_outside_its_range_is_refused(momentum: float) -> None:
    with pytest.raises(errors.BadConfig, match="momentum"):
        Anchor(momentum)


def test_drift_without_an_anchor_says_what_to_do() -> None:
    out = adapt(nets.make(), "tent").predict(nets.batch())
    assert out.view is not None
    with pytest.raises(errors.BadConfig, match="anchor=Anchor"):
        _ = out.view.drift
