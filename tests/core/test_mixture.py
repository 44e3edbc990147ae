"""Are statistics of which the source has a share those of a pooled sample, with the gradient that goes through them?"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from core import nets
from core.checks import same, saved
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta import Adapter, Classifier, adapt, errors, who
from wise_atta.model.statistics import Statistics, kernel_moments, share

WITH_BATCH_NORM = ["batch-norm", "tabular", "folded"]
SHARES = [0.0, 0.3, 0.5, 1.0]


def mixed(net: nn.Module, mixture: float, **options: Any) -> Classifier:
    return Classifier(net, statistics="mixed", mixture=mixture, **options)


def learned(classifier: Classifier, x: Any) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of a loss in all tensors that adapt."""
    forward = classifier.forward(x, grad=True)
    gradients = classifier.gradients(forward.logits.square().sum(), forward.version, ["adapted"])["adapted"]
    return forward.logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])


class Written(nn.Module):
    """A BatchNorm layer by the definition of the mixture, differentiated by autograd."""

    def __init__(self, norm: _BatchNorm, mixture: float) -> None:
        super().__init__()
        self.norm, self.weight = norm, 1 - mixture

    def forward(self, x: Tensor) -> Tensor:
        dims, shape, weight = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)], self.weight
        own = x.mean(dim=dims)
        var = (x - own.view(shape)).square().mean(dim=dims)
        mean = weight * own + (1 - weight) * self.norm.running_mean
        var = weight * var + (1 - weight) * self.norm.running_var
        var = var + weight * (1 - weight) * (own - self.norm.running_mean).square()
        scaled = (x - mean.view(shape)) / (var.view(shape) + self.norm.eps).sqrt()
        return self.norm.weight.view(shape) * scaled + self.norm.bias.view(shape)


def written(net: nn.Module, mixture: float) -> nn.Module:
    twin = copy.deepcopy(net)
    for path, part in list(twin.named_modules()):
        if isinstance(part, _BatchNorm):
            parent, _, name = path.rpartition(".")
            setattr(twin.get_submodule(parent), name, Written(part, mixture))
    return twin


# -- what it is --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
@pytest.mark.parametrize("mixture", SHARES)
@pytest.mark.parametrize("count", [8, 3])
def test_it_is_what_its_formula_says_with_its_gradients(kind: str, mixture: float, count: int) -> None:
    net, x = nets.make(kind), nets.batch(kind, 4, count)
    reference = written(net, mixture)
    expected = reference(x)
    names = {name.replace(".norm.", "."): tensor for name, tensor in reference.named_parameters()}
    slopes = torch.autograd.grad(expected.square().sum(), [names[name] for name, _ in net.named_parameters()])
    logits, gradient = learned(mixed(net, mixture, adapt="all"), x)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, torch.cat([slope.flatten() for slope in slopes]), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
@pytest.mark.parametrize(("mixture", "statistics"), [(0.0, "batch"), (1.0, "source")])
def test_at_its_ends_it_is_the_batch_or_the_source(kind: str, mixture: float, statistics: Any) -> None:
    net, x = nets.make(kind), nets.batch(kind)
    ours = learned(mixed(net, mixture, adapt="all"), x)
    theirs = learned(Classifier(net, adapt="all", statistics=statistics), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def layer(x: Tensor, source: tuple[Tensor, Tensor], mixture: float, weight: Tensor, bias: Tensor) -> Tensor:
    (mean, var), through = share(x, source, kernel_moments(x), 1 - mixture, 1e-5)
    return functional.batch_norm(through, mean, var, weight, bias)


@pytest.mark.parametrize("mixture", SHARES)
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2), (2, 3, 2, 3), (1, 3, 2, 2)], ids=str)
def test_its_gradient_is_that_of_finite_differences(shape: tuple[int, ...], mixture: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, mean, var, weight, bias = (
        torch.rand(size, dtype=torch.float64, generator=generator) for size in (shape, (3,), (3,), (3,), (3,))
    )
    inputs = [tensor.requires_grad_() for tensor in (3 * x, weight + 0.5, bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: layer(x, (mean, var), mixture, w, b), inputs)


@pytest.mark.parametrize("mixture", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_at_the_ends_is_torchs_own(mixture: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(6, 4, 5, 5, dtype=dtype, generator=generator) + 2).requires_grad_()
    mean, var, weight, bias = (torch.rand(4, dtype=dtype, generator=generator) + 0.5 for _ in range(4))
    slope = torch.randn(x.shape, dtype=dtype, generator=generator)
    ours = layer(x, (mean, var), mixture, weight, bias)
    theirs = functional.batch_norm(x, mean.clone(), var.clone(), weight, bias, training=mixture == 0)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, slope)[0] for out in (ours, theirs)))


def test_it_is_the_moments_of_a_pooled_sample() -> None:
    generator = torch.Generator().manual_seed(2)
    source = 1 + torch.randn(30, 3, dtype=torch.float64, generator=generator)
    batch = 2 * torch.randn(70, 3, dtype=torch.float64, generator=generator) - 3
    var, mean = torch.var_mean(source, dim=0, correction=0)
    pair, _ = share(batch, (mean, var), kernel_moments(batch), 0.7, 1e-5)
    var, mean = torch.var_mean(torch.cat([source, batch]), dim=0, correction=0)
    torch.testing.assert_close(pair, (mean, var), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
def test_the_share_is_the_same_at_every_batch_size(kind: str) -> None:
    net, x = nets.make(kind), nets.batch(kind)
    classifier = mixed(net, 0.3)
    once, twice = classifier.forward(x), classifier.forward(torch.cat([x, x]))
    torch.testing.assert_close(twice.logits, torch.cat([once.logits] * 2), rtol=1e-10, atol=1e-10)
    cut = classifier.forward(x[:4]).logits
    assert not torch.allclose(cut, once.logits[:4], rtol=1e-3), "another batch has other moments"
    alone = mixed(net, 1.0)
    torch.testing.assert_close(alone.forward(x[:4]).logits, alone.forward(x).logits[:4], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
def test_one_picture_is_enough_unless_the_batch_is_all(kind: str) -> None:
    net = nets.make(kind)
    adapter = adapt(net, "tent", statistics="mixed", mixture=0.5, lr=0.1)
    for number in range(1, 4):
        out = adapter.predict(nets.batch(kind, number, 1))
        adapter.learn(out)
        assert out.logits.isfinite().all()
    assert not torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())
    with pytest.raises(errors.SingleSample):
        adapt(net, "tent", statistics="mixed", mixture=0.0).predict(nets.batch(kind, 1, 1))


class Twice(nn.Module):
    """Goes through one norm layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.fc = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, nets.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(torch.tanh(self.norm(self.mix(x)))))


def test_a_layer_that_is_called_twice_has_both_gradients() -> None:
    net, x = nets.trained(Twice), nets.batch("tabular")
    reference = written(net, 0.3)
    names = {name.replace(".norm.", "."): tensor for name, tensor in reference.named_parameters()}
    slopes = torch.autograd.grad(reference(x).square().sum(), [names[name] for name, _ in net.named_parameters()])
    _, gradient = learned(mixed(net, 0.3, adapt="all"), x)
    torch.testing.assert_close(gradient, torch.cat([slope.flatten() for slope in slopes]), rtol=1e-9, atol=1e-9)


# -- the ways to run it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"precision": "fp32"}, 1e-4), ({"channels_last": True}, 1e-4), ({"precision": "bf16"}, 0.1)],
    ids=["fp32", "channels last", "bf16"],
)
def test_fast_ways_agree_with_the_plain_one(options: dict[str, Any], tolerance: float) -> None:
    net, x = nets.make(dtype=torch.float32), nets.batch(dtype=torch.float32, n=32)
    plain, fast = (learned(mixed(net, 0.3, **more), x) for more in ({}, options))
    for ours, theirs in zip(fast, plain, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("method", ["tent", "wise"])
def test_recomputed_blocks_give_the_same_bits(method: str) -> None:
    def run(**options: Any) -> Tensor:
        more = {"annotator": who.Oracle(nets.truth), "ratio": 0.5} if method == "wise" else {}
        adapter = adapt(nets.make(), method, statistics="mixed", mixture=0.3, lr=0.05, **more, **options)
        for number in range(1, 7):
            adapter.step(nets.batch(number=number))
        return adapter.classifier.live.flat

    assert torch.equal(run(checkpointing=["block"]), run())


def test_a_compiled_network_refuses_it() -> None:
    with pytest.raises(errors.BadConfig, match="needs statistics='batch' or 'source', not 'mixed'"):
        mixed(nets.make(dtype=torch.float32), 0.3, compile=True)


# -- what goes away and comes back -------------------------------------------------------------------------------------


def wise(**options: Any) -> Adapter:
    chosen = {"ratio": 1.0, "policy": "uniform", "entropy": "all", "lr": 0.05, "statistics": "mixed", "mixture": 0.3}
    return adapt(nets.make(), "wise", **(chosen | options))


@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
def test_the_exported_module_says_the_same(kind: str) -> None:
    adapter = adapt(nets.make(kind), "tent", statistics="mixed", mixture=0.3, lr=0.1)
    for number in range(1, 4):
        adapter.step(nets.batch(kind, number))
    module = pickle.loads(pickle.dumps(adapter.export()))
    for count in (8, 1, 5):
        x = nets.batch(kind, 5, count)
        expected = adapter.predict(x, ask=False, learn=False).logits
        assert torch.equal(nets.call(module, x), expected)
        torch.testing.assert_close(nets.call(module.float(), x.float()).double(), expected, rtol=1e-3, atol=1e-3)
        module.double()
        module = adapter.export()


def test_the_exported_module_has_the_gradient_too() -> None:
    net, x = nets.make(), nets.batch()
    classifier = mixed(net, 0.3, adapt="all")
    module = classifier.export()
    slopes = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    torch.testing.assert_close(torch.cat([slope.flatten() for slope in slopes]), learned(classifier, x)[1])


def test_a_state_goes_on_to_the_same_bits() -> None:
    def run(adapter: Adapter, first: int, last: int) -> list[Tensor]:
        return [adapter.step(nets.batch(number=number)).logits for number in range(first, last)]

    annotator = {"annotator": who.Delayed(who.Oracle(nets.truth), 2)}
    first, second = wise(**annotator), wise(annotator=who.Delayed(who.Oracle(nets.truth), 2))
    run(first, 1, 6)
    second.load_state_dict(saved(first.state_dict()))
    assert same(run(first, 6, 12), run(second, 6, 12))
    assert same(first.state_dict(), second.state_dict())


@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_late_sample_in_its_own_context_has_its_old_logits(kind: str, dtype: torch.dtype) -> None:
    classifier = mixed(nets.make(kind, dtype=dtype), 0.3)
    asked = nets.batch(kind, 1, 4, dtype)
    forward = classifier.forward(asked)
    assert forward.statistics is not None and forward.statistics.batch is None
    kept = Statistics(forward.statistics.values.clone())
    classifier.forward(nets.batch(kind, 9, 8, dtype))
    for index in range(4):
        late = classifier.forward(asked[index : index + 1], statistics=kept, grad=True)
        torch.testing.assert_close(late.logits, forward.logits[index : index + 1], rtol=1e-6, atol=1e-6)


def test_a_late_label_moves_as_its_sample_was_normalised() -> None:
    adapter = wise()
    out = adapter.predict(nets.batch())
    adapter.learn(out)
    (query,) = out.queries
    (kept,) = (item["context"] for item in adapter.state_dict()["desk"]["open"])
    assert kept["batch"] is None
    alone = adapter.classifier.forward(
        nets.batch()[query.index : query.index + 1],
        version=adapter.classifier.source(),
        statistics=Statistics(kept["values"]),
    )
    torch.testing.assert_close(alone.logits[0], query.logits, rtol=1e-9, atol=1e-9)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistics": "mixed", "mixture": 0.3, "prior": 256}, "prior and mixture both say .*: give one"),
        ({"statistics": "mixed", "mixture": 1.1}, "the source's share, from 0 to 1, not 1.1"),
        ({"statistics": "mixed", "mixture": -0.1}, "the source's share, from 0 to 1, not -0.1"),
        ({"statistics": "mixed", "mixture": float("nan")}, "the source's share, from 0 to 1, not nan"),
        ({"mixture": 0.3}, "give statistics='mixed'"),
        ({"statistics": "ema", "mixture": 0.3}, "not 'ema': give statistics='mixed'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.BadConfig, match=message):
        adapt(nets.make(), "bn", **options)


def test_layers_without_running_statistics_refuse_it() -> None:
    net = nets.make()
    for part in net.modules():
        if isinstance(part, _BatchNorm):
            part.track_running_stats, part.running_mean, part.running_var = False, None, None
    with pytest.raises(errors.BadConfig, match="statistics='batch'"):
        mixed(net, 0.3).forward(nets.batch())


def test_a_model_without_batch_norm_runs_as_it_is() -> None:
    net, x = nets.make("tokens"), nets.batch("tokens", n=1)
    assert torch.equal(mixed(net, 0.3).forward(x).logits, net(x))
