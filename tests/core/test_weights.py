"""Can several sets of weights live on one network, each as if it were alone?"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from core import nets
from torch import Tensor, nn

from wise_atta import Adapter, Classifier, how, who
from wise_atta.model import Network, Statistics, Weights
from wise_atta.when import Uniform

BATCHES = 12
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "channels last": {"channels_last": True},
    "both": {"precision": "bf16", "channels_last": True},
}


def tent(make: Callable[..., Weights]) -> Adapter:
    update = how.Descend(how.Entropy(), lr=1e-2)
    return Adapter(make(adapt=update.adapts), update)


def wise(make: Callable[..., Weights]) -> Adapter:
    update = how.TwoStep(lr=1e-2, norm="norm", block="head")
    parts = {"policy": Uniform(ratio=0.5), "questions": who.Questions(annotator=who.Oracle(nets.truth))}
    return Adapter(make(adapt=update.adapts), update, **parts)


def batch(number: int) -> Tensor:
    inputs: Tensor = nets.batch(number=number, dtype=torch.float32)
    return inputs


def record(adapter: Adapter, number: int) -> list[Any]:
    """Everything that one step gives."""
    steps: list[Any] = []
    adapter._callbacks = [steps.append]
    out = adapter.step(batch(number))
    (step,) = steps
    return [out.logits, step.asked, step.learned, step.work, sorted(step.losses.items()), adapter.classifier.live.flat]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("statistics", [("batch", "batch"), ("batch", "source"), ("ema", "mixed")], ids="-".join)
def test_two_sets_taught_in_turn_equal_two_adapters_apart(way: str, statistics: tuple[Any, Any]) -> None:
    net = nets.make(dtype=torch.float32)
    one, other = statistics
    apart = [
        tent(functools.partial(Classifier, net, statistics=one, **WAYS[way])),
        wise(functools.partial(Classifier, net, statistics=other, **WAYS[way])),
    ]
    network = Network(net, **WAYS[way])
    together = [
        tent(functools.partial(Weights, network, statistics=one)),
        wise(functools.partial(Weights, network, statistics=other)),
    ]
    expected = [[record(adapter, number) for number in range(1, BATCHES)] for adapter in apart]
    steps = [[record(adapter, number) for adapter in together] for number in range(1, BATCHES)]
    for alone, shared in zip(expected, zip(*steps, strict=True), strict=True):
        assert equal(alone, list(shared))
    assert together[1].counts.learned > 2
    assert all((adapter.classifier.live.flat != adapter.classifier.source_flat()).any() for adapter in together)


def test_an_export_holds_the_values_of_its_own_set() -> None:
    network, x = Network(nets.make()), nets.batch()
    weights = [Weights(network, adapt="norm"), Weights(network, adapt="all", statistics="source")]
    for index, own in enumerate(weights, 1):
        own.publish(own.live.flat * (1 + 0.1 * index))
    for own in weights:
        torch.testing.assert_close(own.export()(x), own.forward(x).logits)
    assert not torch.allclose(weights[0].forward(x).logits, weights[1].forward(x).logits)


def tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """Parameters as the layers have them at this moment, and buffers that no BatchNorm layer fills in."""
    norms = tuple(name for name, part in module.named_modules() if isinstance(part, nn.BatchNorm2d))
    buffers = {name: t for name, t in module.named_buffers() if name.rpartition(".")[0] not in norms}
    return {**dict(module.named_parameters(remove_duplicate=False)), **buffers}


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_tensor_exists_once(way: str) -> None:
    class Scaled(nets.BatchNormCnn):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    net = nets.trained(Scaled, dtype=torch.float32)
    network = Network(net, **WAYS[way])
    sets = [
        Weights(network, adapt="norm"),
        Weights(network, adapt={"norm": "norm", "block": "head"}, statistics="mixed"),
        Weights(network, adapt="all", statistics="source"),
        Weights(network, adapt="norm", statistics="ema"),
    ]
    for weights in sets:
        weights.forward(batch(1))
    assert sets[0].replicas is sets[3].replicas, "who adapts the same tensors runs the same replicas"
    seen: dict[str, set[int]] = {}
    for weights in sets:
        replica = weights.replicas.make()
        for name, tensor in tensors(replica.module).items():
            if name not in weights.layout.shapes:
                seen.setdefault(name, set()).add(tensor.data_ptr())
    assert {"conv1.weight", "fc.weight", "scale"} <= seen.keys()
    assert {name: len(places) for name, places in seen.items()} == dict.fromkeys(seen, 1)
    own = {name for name, t in tensors(net).items() if name in seen and {t.data_ptr()} == seen[name]}
    converted = {name for name in seen if "conv" in name and name.endswith("weight")}
    assert own >= {"fc.weight", "scale"}
    assert (converted & own == set()) if WAYS[way] else (own == seen.keys())


def test_changes_made_at_once_are_seen_together() -> None:
    weights = Weights(Network(nets.make()), statistics="ema")
    before = weights.published
    assert before.running is not None
    with weights.at_once():
        weights.publish(before.version.flat + 1)
        weights.commit(weights.forward(nets.batch()).statistics)
        assert weights.published is before
        assert torch.equal(weights.live.flat, before.version.flat + 1) and weights.running is not before.running
    assert weights.published.version is weights.live and weights.published.running is weights.running
    assert torch.equal(weights.published.version.flat, before.version.flat + 1)


def test_a_change_on_its_own_is_published_right_away() -> None:
    weights = Weights(Network(nets.make()), statistics="ema")
    assert weights.running is not None
    for change in (
        lambda: weights.publish(weights.live.flat + 1),
        lambda: setattr(weights, "running", weights.running + 1),
        lambda: weights.commit(weights.forward(nets.batch()).statistics),
        weights.reset_statistics,
    ):
        before = weights.published
        change()
        assert weights.published is not before
        assert weights.published.version is weights.live and weights.published.running is weights.running


def test_what_fails_half_way_is_published_as_it_stands() -> None:
    weights = Weights(Network(nets.make()))
    with pytest.raises(KeyError), weights.at_once(), weights.at_once():
        weights.publish(weights.live.flat + 1)
        raise KeyError
    assert weights.published.version is weights.live
    assert torch.equal(weights.live.flat, weights.source_flat() + 1)


def test_what_is_taken_back_is_published_too() -> None:
    weights = Weights(Network(nets.make()), statistics="ema")
    before = weights.published
    undo = how.remember(weights)
    weights.publish(weights.live.flat + 1)
    weights.commit(weights.forward(nets.batch()).statistics)
    undo()
    assert weights.live is weights.published.version is before.version
    assert weights.running is weights.published.running is before.running


def test_a_reader_never_sees_values_of_one_moment_with_statistics_of_another() -> None:
    weights = Weights(Network(nets.make()), statistics="ema")
    start = weights.published
    assert start.running is not None
    done, torn = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            now = weights.published
            assert now.running is not None and start.running is not None
            steps = now.version.flat[0] - start.version.flat[0], now.running[0] - start.running[0]
            if abs(steps[0] - steps[1]) > 1e-9:
                torn.append(steps)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        with weights.at_once():
            weights.publish(weights.live.flat + 1)
            weights.running = weights.running + 1
    done.set()
    reader.join()
    assert torn == []


def test_a_late_sample_takes_the_statistics_that_it_is_given_in_every_set() -> None:
    network, x = Network(nets.make()), nets.batch()
    used = Weights(network).forward(x).statistics
    assert isinstance(used, Statistics)
    late = [Weights(network, statistics=mode).forward(x[:1], statistics=used) for mode in ("batch", "source", "renorm")]
    assert torch.equal(late[0].logits, late[1].logits) and torch.equal(late[0].logits, late[2].logits)
