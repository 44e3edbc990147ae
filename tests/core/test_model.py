"""Is any net seen rightly as features and a head, with few tensors that adapt and all others shared?"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from core import nets
from core.checks import look, same
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from wise_atta import Anchor, Batch, Classifier, adapt, errors
from wise_atta.model import Statistics

KINDS = list(nets.KINDS)
WITH_BATCH_NORM = [name for name, kind in nets.KINDS.items() if kind.batch_norm]
MODES = ["batch", "source", "mixed", "ema"]


def torchvision_net(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(pytest.importorskip("torchvision").models, name)(weights=None, **options)


def timm_net(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: pytest.importorskip("timm").create_model(name, pretrained=False, **options)


LIBRARY = {
    "torchvision resnet50": (torchvision_net("resnet50", num_classes=10), "fc"),
    "torchvision vit_b_16": (torchvision_net("vit_b_16", num_classes=10, image_size=32), "heads.head"),
    "torchvision convnext_tiny": (torchvision_net("convnext_tiny", num_classes=10), "classifier.2"),
    "timm vit": (timm_net("vit_tiny_patch16_224", num_classes=10, img_size=32), "head"),
    "timm tf_efficientnet_lite0": (timm_net("tf_efficientnet_lite0", num_classes=10), "classifier"),
    "timm convnext": (timm_net("convnext_atto", num_classes=10), "head.fc"),
}


@pytest.fixture(scope="module", params=list(LIBRARY))
def library(request: pytest.FixtureRequest) -> tuple[nn.Module, str]:
    build, head = LIBRARY[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Truncated normals for 86 million weights take longer than all tests here together.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.init, "trunc_normal_", lambda tensor, std=0.02, **_: tensor.data.normal_(0, std))
            net = build()
        torch.nn.init.normal_(net.get_submodule(head).weight, std=0.1)
    return net.eval(), head


def pictures(n: int = 2) -> Tensor:
    return torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(5))


# -- the head --------------------------------------------------------------------------------------------------------


def test_the_head_of_a_library_net_is_found_with_its_features(library: Any) -> None:
    net, head = library
    classifier = Classifier(net, statistics="source")
    assert classifier.head_name == head
    x = pictures()
    forward = classifier.forward(x)
    with torch.no_grad():
        torch.testing.assert_close(forward.logits, net(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(classifier.head(forward.features), forward.logits, rtol=1e-4, atol=1e-5)
    assert forward.features.shape == (2, net.get_submodule(head).in_features)


def test_all_norm_layers_of_a_library_net_adapt_and_nothing_else(library: Any) -> None:
    net, _ = library
    classifier = Classifier(net)
    norms = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
    expected = {
        f"{path}.{key}"
        for path, part in net.named_modules()
        if isinstance(part, norms)
        for key, _ in part.named_parameters(recurse=False)
    }
    assert set(classifier.layout.shapes) == expected and expected
    forward = classifier.forward(pictures(), grad=True)
    (grads,) = classifier.gradients(forward.logits[:, 0].sum(), forward.version, ["adapted"]).values()
    assert all(grad.isfinite().all() for grad in grads)
    assert sum(bool(grad.any()) for grad in grads) > 0.9 * len(grads)


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_of_a_small_net_is_found_with_its_features(kind: str) -> None:
    net, x = nets.make(kind), nets.batch(kind)
    classifier = Classifier(net, statistics="source")
    assert classifier.head_name == nets.KINDS[kind].head
    forward = classifier.forward(x)
    with torch.no_grad():
        torch.testing.assert_close(forward.logits, nets.call(net, x), rtol=1e-12, atol=1e-12)
        assert torch.equal(net.get_submodule(classifier.head_name)(forward.features), forward.logits)
        assert torch.equal(classifier.head(forward.features), forward.logits)


class TwoHeads(nn.Module):
    """The last linear layer is not the one that gives the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.real = nn.Linear(6, nets.CLASSES)
        self.other = nn.Linear(6, nets.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.real(input=x) + 0 * self.other(x)


def test_a_wrong_head_is_refused_with_the_names_that_might_do() -> None:
    net, x = nets.trained(TwoHeads), nets.batch("tabular")
    with pytest.raises(errors.HeadNotFound, match=r"'other' does not turn.*head='…'.*real, other"):
        adapt(net, "tent").predict(x)
    assert torch.equal(Classifier(net, head="real").forward(x).logits, net(x))


def test_an_unknown_head_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(errors.HeadNotFound, match="Did you mean 'fc'"):
        Classifier(nets.make(), head="fcc")


def test_a_net_without_a_linear_layer_asks_for_the_name_of_its_head() -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(errors.HeadNotFound, match="head='…'"):
        Classifier(net)


def test_a_net_that_ends_in_a_softmax_is_told_to_leave_it_out() -> None:
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, nets.CLASSES), nn.Softmax(dim=1)).double()
    with pytest.raises(errors.HeadNotFound, match=r"does not return what layer '1' gives.*Leave out.*softmax"):
        Classifier(net).forward(nets.batch("tabular"))
    assert len(Classifier(net[:2]).forward(nets.batch("tabular")).logits) == 8


@pytest.mark.parametrize("method", ["tent", "hiltta"])
def test_a_net_with_a_single_logit_is_refused(method: str) -> None:
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 1)).double()
    with pytest.raises(errors.BadInput, match="one logit a sample"):
        adapt(net, method).predict(nets.batch("tabular"))


def test_a_head_that_is_applied_before_pooling_is_not_taken_for_one() -> None:
    class PerToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, nets.CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.norm(x)).mean(dim=1)

    with pytest.raises(errors.HeadNotFound, match="'fc'"):
        Classifier(nets.trained(PerToken)).forward(nets.batch("tokens"))


def test_a_wrapped_net_is_unwrapped_and_a_scripted_one_refused() -> None:
    net = nets.make()
    assert Classifier(nn.DataParallel(net)).model is net
    assert Classifier(torch.compile(net)).model is net
    with pytest.raises(errors.BadConfig, match="scripted"):
        Classifier(torch.jit.ScriptModule())


# -- which tensors adapt ---------------------------------------------------------------------------------------------

NORM = ("bn1.weight", "bn1.bias", "block.1.weight", "block.1.bias")


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("norm", NORM),
        ("head", ("fc.weight", "fc.bias")),
        ("head.bias", ("fc.bias",)),
        ("block", ("block.0.weight", "block.1.weight", "block.1.bias")),
        ("block.1", ("block.1.weight", "block.1.bias")),
        ("conv1.weight", ("conv1.weight",)),
        ("*.bias", ("bn1.bias", "block.1.bias", "fc.bias")),
        ("b*weight", ("bn1.weight", "block.0.weight", "block.1.weight")),
        (["norm", "head.bias"], (*NORM, "fc.bias")),
        (["norm", "!block"], ("bn1.weight", "bn1.bias")),
        (["norm", "!*.bias"], ("bn1.weight", "block.1.weight")),
        (["all", "!norm", "!head"], ("conv1.weight", "block.0.weight")),
        (["!norm", "norm"], NORM),
        (["norm", "!no.such.block"], NORM),
        ("all", tuple(name for name, _ in nets.make().named_parameters())),
    ],
)
def test_a_specification_names_tensors_in_the_order_of_the_model(spec: str | list[str], names: tuple[str, ...]) -> None:
    assert Classifier(nets.make(), adapt=spec).layout.groups == {"adapted": names}


def test_groups_take_each_tensor_once_and_the_first_group_has_it() -> None:
    layout = Classifier(nets.make(), adapt={"norm": "norm", "second": ["block", "head"]}).layout
    assert layout.groups == {"norm": NORM, "second": ("block.0.weight", "fc.weight", "fc.bias")}


@pytest.mark.parametrize("spec", ["layer4", ["norm", "!norm"], "*.wieght", []])
def test_a_specification_of_nothing_is_refused(spec: Any) -> None:
    with pytest.raises(errors.NothingToAdapt):
        Classifier(nets.make(), adapt=spec)


@pytest.mark.parametrize(("method", "option"), [("tent", "adapt"), ("wise", "norm"), ("hiltta", "norm")])
def test_a_net_without_norm_layers_is_told_what_else_can_adapt(method: str, option: str) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    with pytest.raises(errors.NothingToAdapt, match=f"{option}='head'"):
        adapt(net, method)
    adapter = adapt(net, method, **{option: "head"})
    adapter.learn(adapter.predict(nets.batch("tabular")))


@pytest.mark.parametrize(("spec", "names"), [("head", ("weight", "bias")), ("head.bias", ("bias",))])
def test_a_linear_layer_by_itself_is_all_head(spec: str, names: tuple[str, ...]) -> None:
    net = nn.Linear(6, 3).double()
    assert Classifier(net, adapt=spec).layout.groups["adapted"] == names
    for options in ({}, {"channels_last": True}):
        adapter = adapt(net, "wise", norm="bias", ratio=1.0, policy="uniform", entropy="all", lr=0.1, **options)
        out = adapter.predict(nets.batch("tabular"))
        adapter.learn(out, {query.id: 1 for query in out.queries})
        tensors, source = adapter.classifier.live.tensors, dict(net.named_parameters())
        assert not any(torch.equal(tensors[name], source[name]) for name in ("weight", "bias"))


def test_a_net_that_keeps_its_tensors_out_of_every_graph_is_told_so() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.body(x)
            return self.fc(x.detach())

    net = Frozen().double()
    adapter = adapt(net, "tent")
    with pytest.raises(errors.NothingToAdapt, match=r"body\.1\.weight.*adapt='head'"):
        adapter.learn(adapter.predict(nets.batch("tabular")))
    adapter = adapt(net, "tent", adapt="head")
    assert adapter.learn(adapter.predict(nets.batch("tabular"))).losses


def test_what_is_inside_a_block_called_head_can_be_named() -> None:
    class Timm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)
            self.head = nn.ModuleDict({"norm": nn.LayerNorm(6), "fc": nn.Linear(6, 3)})

        def forward(self, x: Tensor) -> Tensor:
            return self.head["fc"](self.head["norm"](self.norm(x)))

    net = Timm()
    assert Classifier(net, adapt="head").layout.groups["adapted"] == ("head.fc.weight", "head.fc.bias")
    assert Classifier(net, adapt="head.norm").layout.groups["adapted"] == ("head.norm.weight", "head.norm.bias")
    assert Classifier(net, adapt=["norm", "!head.norm"]).layout.groups["adapted"] == ("norm.weight", "norm.bias")


def test_tied_tensors_adapt_together_by_any_of_their_names() -> None:
    net, ids = nets.trained(nets.TiedNet), torch.arange(10).view(5, 2) % nets.CLASSES
    classifier = Classifier(net, adapt={"head": "head", "norm": "norm2"})
    assert classifier.layout.groups == {"head": ("words.weight",), "norm": ("norm1.weight", "norm1.bias")}
    forward = classifier.forward(ids, grad=True)
    grads = classifier.gradients(forward.logits.square().sum(), forward.version, ["head", "norm"])
    twin = copy.deepcopy(net)
    twin(ids).square().sum().backward()
    for own, theirs in [
        (grads["head"][0], twin.words.weight),
        (grads["norm"][0], twin.norm1.weight),
        (grads["norm"][1], twin.norm1.bias),
    ]:
        torch.testing.assert_close(own, theirs.grad, rtol=1e-12, atol=1e-12)
    # A new version reaches every place of a tied tensor.
    classifier.publish(classifier.source_flat() * 1.5)
    with torch.no_grad():
        for tensor in (twin.words.weight, twin.norm1.weight, twin.norm1.bias):
            tensor.mul_(1.5)
        torch.testing.assert_close(classifier.forward(ids).logits, twin(ids), rtol=1e-12, atol=1e-12)


def test_adapted_tensors_of_two_kinds_are_refused() -> None:
    net = nets.make(dtype=torch.float32)
    net.fc.double()
    with pytest.raises(errors.BadConfig, match="one dtype"):
        Classifier(net, adapt=["norm", "head"])


# -- statistics ------------------------------------------------------------------------------------------------------


class SlowNorm(nn.Module):
    """BatchNorm written out: mean and variance by their definitions, and what each mode makes of them."""

    def __init__(self, norm: _BatchNorm, mode: str, prior: int = 256, weight: float = 0.1) -> None:
        super().__init__()
        self.norm, self.mode, self.prior, self.ema_weight = norm, mode, prior, weight
        self.average = norm.running_mean.clone(), norm.running_var.clone()
        self.samples = 0

    def forward(self, x: Tensor) -> Tensor:
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        mean = x.mean(dim=dims)
        var = (x - mean.view(shape)).square().mean(dim=dims)
        if self.mode == "source":
            mean, var = self.norm.running_mean, self.norm.running_var
        elif self.mode == "mixed":
            share = self.samples / (self.samples + self.prior)
            mean = (1 - share) * self.norm.running_mean + share * mean.detach()
            var = (1 - share) * self.norm.running_var + share * var.detach()
        elif self.mode == "ema":
            mean = (1 - self.ema_weight) * self.average[0] + self.ema_weight * mean.detach()
            var = (1 - self.ema_weight) * self.average[1] + self.ema_weight * var.detach()
            self.average = mean, var
        scaled = (x - mean.view(shape)) / (var.view(shape) + self.norm.eps).sqrt()
        return self.norm.weight.view(shape) * scaled + self.norm.bias.view(shape)


def slow(net: nn.Module, mode: str, **options: Any) -> nn.Module:
    """A copy of the net with every BatchNorm written out."""
    twin = copy.deepcopy(net)
    for path, part in list(twin.named_modules()):
        if isinstance(part, _BatchNorm):
            parent, _, name = path.rpartition(".")
            setattr(twin.get_submodule(parent), name, SlowNorm(part, mode, **options))
    twin.register_forward_pre_hook(_count_samples)
    return twin


def _count_samples(net: nn.Module, args: tuple[Tensor]) -> None:
    for part in net.modules():
        if isinstance(part, SlowNorm):
            part.samples = len(args[0])


@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_what_their_formulas_say_with_their_gradients(kind: str, mode: Any) -> None:
    net = nets.make(kind)
    classifier, reference = Classifier(net, statistics=mode), slow(net, mode)
    for number, n in enumerate([8, 3, 5], 1):
        x = nets.batch(kind, number, n)
        forward = classifier.forward(x, grad=True)
        classifier.commit(forward.statistics)
        expected = reference(x)
        torch.testing.assert_close(forward.logits, expected, rtol=1e-10, atol=1e-10)
        (grads,) = classifier.gradients(forward.logits.square().sum(), forward.version, ["adapted"]).values()
        tensors = [t for name, t in reference.named_parameters() if ".norm." in name]
        for own, theirs in zip(grads, torch.autograd.grad(expected.square().sum(), tensors), strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
def test_batch_statistics_are_those_of_batch_norm_in_training_mode(kind: str) -> None:
    net, x = nets.make(kind), nets.batch(kind)
    twin = copy.deepcopy(net)
    for part in twin.modules():
        part.training = isinstance(part, _BatchNorm)
    forward = Classifier(net).forward(x, grad=True)
    assert torch.equal(forward.logits, twin(x))


@pytest.mark.parametrize(("prior", "weight"), [(0, 1.0), (5, 0.3)])
def test_prior_and_weight_of_the_mixtures_can_be_chosen(prior: int, weight: float) -> None:
    net, x = nets.make(), nets.batch()
    for mode in ("mixed", "ema"):
        own = Classifier(net, statistics=mode, prior=prior, ema_weight=weight).forward(x)  # type: ignore[arg-type]
        torch.testing.assert_close(own.logits, slow(net, mode, prior=prior, weight=weight)(x), rtol=1e-10, atol=1e-10)


def test_the_moving_average_takes_in_two_batches_predicted_first() -> None:
    net = nets.make()
    classifier = Classifier(net, statistics="ema")
    first, second = (classifier.forward(nets.batch(number=number)) for number in (1, 2))
    moments = [average(classifier.forward(nets.batch(number=number))) for number in (1, 2)]
    source = classifier.running
    classifier.commit(first.statistics)
    classifier.commit(second.statistics)
    expected = source
    for batch_moments in moments:
        expected = 0.9 * expected + 0.1 * batch_moments
    torch.testing.assert_close(classifier.running, expected, rtol=1e-12, atol=1e-12)


def average(forward: Any) -> Tensor:
    """The batch's own moments, read back from 0.9·before + 0.1·moments."""
    used = forward.statistics
    return (used.values - 0.9 * used.before) / 0.1


@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
@pytest.mark.parametrize("mode", ["batch", "mixed", "ema"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_late_sample_in_its_own_context_has_its_old_logits(kind: str, mode: Any, dtype: torch.dtype) -> None:
    classifier = Classifier(nets.make(kind, dtype=dtype), statistics=mode)
    asked = nets.batch(kind, 1, 4, dtype)
    forward = classifier.forward(asked)
    kept = Statistics(forward.statistics.values.clone(), forward.statistics.batch)
    classifier.commit(forward.statistics)
    classifier.forward(nets.batch(kind, 9, 8, dtype))
    for index in range(4):
        late = classifier.forward(asked[index : index + 1], statistics=kept, grad=True)
        torch.testing.assert_close(late.logits, forward.logits[index : index + 1], rtol=1e-6, atol=1e-6)
    assert torch.equal(kept.values, forward.statistics.values), "using statistics must not change them"


@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
def test_layers_that_keep_no_running_statistics_have_a_context_too(kind: str) -> None:
    net = nets.make(kind)
    for part in net.modules():
        if isinstance(part, _BatchNorm):
            part.track_running_stats, part.running_mean, part.running_var = False, None, None
    classifier, x = Classifier(net), nets.batch(kind)
    forward = classifier.forward(x)
    torch.testing.assert_close(forward.logits, net(x), rtol=1e-12, atol=1e-12)
    late = classifier.forward(x[2:3], statistics=forward.statistics)
    torch.testing.assert_close(late.logits, forward.logits[2:3], rtol=1e-9, atol=1e-9)
    for mode in ("mixed", "ema"):
        with pytest.raises(errors.BadConfig, match="statistics='batch'"):
            Classifier(net, statistics=mode).forward(x)


def test_a_late_sample_on_source_statistics_is_as_in_the_module() -> None:
    net, x = nets.make(), nets.batch(n=1)
    assert torch.equal(Classifier(net).forward(x, statistics="source").logits, net(x))


class Recurrent(nn.Module):
    """Goes through the same norm layer several times."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.fc = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, nets.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.norm(self.mix(x)))
        return self.fc(x)


@pytest.mark.parametrize("mode", [*MODES, "renorm"])
def test_a_layer_may_be_called_several_times(mode: Any) -> None:
    adapter = adapt(nets.trained(Recurrent), "tent", statistics=mode, lr=0.1)
    for number in range(1, 4):
        adapter.learn(adapter.predict(nets.batch("tabular", number)))
    assert not torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


def test_a_layer_called_again_gives_a_late_sample_one_variance() -> None:
    classifier = Classifier(nets.trained(Recurrent))
    used = classifier.forward(nets.batch("tabular")).statistics
    assert used is not None
    (late,) = classifier.forward(x := nets.batch("tabular", 2, n=1), statistics=used).logits
    net = copy.deepcopy(classifier.model)
    norm = net.norm
    norm.running_mean, norm.running_var = used.values[:6], used.values[6:] * (7 / 8)  # of 8 samples, biased
    torch.testing.assert_close(late, net(x)[0])


class Sometimes(nn.Module):
    """Leaves a norm layer out where the batch is small."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other, self.fc = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, nets.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.fc(self.other(x) if len(x) > 8 else x)


@pytest.mark.parametrize("mode", ["ema", "renorm"])
def test_a_layer_that_was_left_out_keeps_its_average(mode: Any) -> None:
    classifier = Classifier(nets.trained(Sometimes), statistics=mode)
    source = classifier.network.norms.source(mode)
    for number in range(1, 4):
        classifier.commit(classifier.forward(nets.batch("tabular", number)).statistics)
    assert classifier.running is not None
    assert torch.equal(classifier.running[12:], source[12:])
    assert not torch.equal(classifier.running[:12], source[:12])


@pytest.mark.parametrize("mode", ["mixed", "ema", "source"])
@pytest.mark.parametrize("kind", WITH_BATCH_NORM)
def test_single_samples_work_with_statistics_beyond_the_batch(kind: str, mode: Any) -> None:
    adapter = adapt(nets.make(kind), "tent", statistics=mode)
    for number in range(1, 6):
        out = adapter.predict(nets.batch(kind, number, 1))
        adapter.learn(out)
        assert out.logits.isfinite().all()


# -- classes, normalisation, shapes of inputs --------------------------------------------------------------------------


def test_predictions_over_some_of_the_classes_are_those_columns() -> None:
    net, x = nets.make(), nets.batch()
    forward = Classifier(net, statistics="source", classes=[4, 1, 2]).forward(x)
    assert torch.equal(forward.logits, net(x)[:, [4, 1, 2]])
    classifier = Classifier(net, statistics="source", classes=[4, 1, 2])
    classifier.forward(x)
    assert torch.equal(classifier.head(forward.features), forward.logits)


def test_labels_over_some_of_the_classes_are_numbers_within_them() -> None:
    net, x = nets.make(), nets.batch()
    adapter = adapt(
        net, "wise", ratio=1.0, policy="uniform", entropy="all", lr=0.1, classes=[4, 1, 2], statistics="batch"
    )
    out = adapter.predict(x)
    (query,) = out.queries
    with pytest.raises(errors.BadLabel, match="3"):
        adapter.learn(out, {query.id: 3})
    step = adapter.learn(out, {query.id: 2})
    twin = copy.deepcopy(net)
    for part in twin.modules():
        part.training = isinstance(part, _BatchNorm)
    expected = nn.functional.cross_entropy(twin(x)[query.index, [4, 1, 2]], torch.tensor(2))
    torch.testing.assert_close(step.losses["sup"], expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("classes", [[], [1], [0, 0], [-1, 2], [0, 5]])
def test_classes_that_the_model_does_not_have_are_refused(classes: list[int]) -> None:
    with pytest.raises(errors.BadConfig, match="class"):
        Classifier(nets.make(), classes=classes).forward(nets.batch())


@pytest.mark.parametrize("values", [([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]), ([0.5], [0.25])])
def test_normalisation_comes_before_the_model(values: tuple[list[float], list[float]]) -> None:
    net, x = nets.make(), nets.batch()
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in values)
    forward = Classifier(net, statistics="source", mean=values[0], std=values[1]).forward(x)
    torch.testing.assert_close(forward.logits, net((x - mean) / std), rtol=1e-6, atol=1e-6)
    assert torch.equal(forward.inputs, x), "a repeated forward must not normalise twice"


@pytest.mark.parametrize(
    "options",
    [{"mean": [0.5]}, {"std": [0.5]}, {"mean": [0.5], "std": [0.0]}, {"mean": [0.5, 0.5], "std": [0.5]}],
)
def test_half_a_normalisation_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.BadConfig, match="mean and std"):
        Classifier(nets.make(), **options)


def test_normalisation_of_other_inputs_than_pictures_is_refused() -> None:
    net, text = nets.make(), nets.make("text")
    with pytest.raises(errors.BadInput, match="2 channels, the inputs 3"):
        Classifier(net, mean=[0.5, 0.5], std=[1.0, 1.0]).forward(nets.batch())
    with pytest.raises(errors.BadInput, match="uint8"):
        Classifier(net, mean=[0.5], std=[1.0]).forward(torch.zeros(2, 3, 6, 6, dtype=torch.uint8))
    with pytest.raises(errors.BadConfig, match="tree"):
        Classifier(text, mean=[0.5], std=[1.0]).forward(nets.batch("text"))


class Pair(nn.Module):
    """Takes two tensors, the second of them in a list or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, nets.CLASSES)

    def forward(self, a: Tensor, b: Any) -> dict[str, Tensor] | Tensor:
        return self.fc(self.norm(a + (b if isinstance(b, Tensor) else b[0])))


def test_inputs_may_be_a_tree_of_tensors() -> None:
    net, x = nets.trained(Pair), nets.batch("tabular")
    expected = net(x, 2 * x)
    for tree in [(x, 2 * x), [x, [2 * x]], {"a": x, "b": 2 * x}, {"b": (2 * x,), "a": x}]:
        adapter = adapt(net, "tent")
        out = adapter.predict(Batch(tree))
        assert torch.equal(out.logits, expected)
        adapter.learn(out)


def test_a_part_of_a_tree_may_be_empty() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nets.make("tabular")

        def forward(self, x: Tensor, more: Tensor) -> Tensor:
            return self.net(torch.cat([x, more], dim=1))

    x = nets.batch("tabular")
    adapter = adapt(Wide(), "tent", statistics="batch")
    out = adapter.predict({"x": x, "more": x[:, :0]})
    assert torch.equal(out.logits, adapt(nets.make("tabular"), "tent", statistics="batch").predict(x).logits)
    adapter.learn(out)


def test_a_net_that_does_not_return_logits_is_refused() -> None:
    class Strange(nets.TabularNet):
        def forward(self, x: Tensor) -> Any:
            return {"scores": super().forward(x)}

    with pytest.raises(errors.BadInput, match=r"logits \[n, C\] or an object with .logits, not dict"):
        Classifier(nets.trained(Strange)).forward(nets.batch("tabular"))


def test_a_net_that_loses_a_batch_of_one_is_told_so() -> None:
    class Squeezing(nets.TabularNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze()

    adapter = adapt(nets.trained(Squeezing), "wise", ratio=1.0, policy="uniform")
    (query,) = adapter.predict(nets.batch("tabular")).queries
    with pytest.raises(errors.BadInput, match=r"not shape \[5\] for one sample.*squeeze\(\).*Late labels"):
        adapter.learn(adapter.predict(nets.batch("tabular")), {query.id: 0})


# -- replicas ----------------------------------------------------------------------------------------------------------


class InPlace(nets.TabularNet):
    """Normalises its inputs where they lie."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(0.5))


@pytest.mark.parametrize("grad", [False, True])
def test_a_net_that_writes_to_its_inputs_finds_them_unchanged(grad: bool) -> None:
    net, x = nets.trained(InPlace), nets.batch("tabular")
    classifier, kept = Classifier(net, adapt="all", statistics="source"), x.clone()
    expected = net(x.clone())
    for _ in range(3):
        forward = classifier.forward(x, grad=grad)
        assert torch.equal(forward.logits, expected) and torch.equal(x, kept)
        if grad:
            classifier.gradients(forward.logits.sum(), forward.version, ["adapted"])


class InPlaceByColumn(nets.TabularNet):
    """The same column by column, which also works where columns or rows share memory."""

    def forward(self, x: Tensor) -> Tensor:
        for column in range(x.shape[1]):
            x[:, column].sub_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("share", ["columns", "rows"])
def test_a_net_that_writes_to_inputs_may_take_expanded_ones(share: str) -> None:
    net = nets.trained(InPlaceByColumn)
    values, width = nets.batch("tabular")[:, 0].contiguous(), nets.batch("tabular").shape[1]
    x = values[:, None].expand(-1, width) if share == "columns" else values.unfold(0, width, 1)
    classifier, kept = Classifier(net, statistics="source"), x.clone()
    assert torch.equal(classifier.forward(x).logits, net(kept.clone())) and torch.equal(x, kept)


def test_a_net_with_lazy_layers_is_refused_with_what_to_do() -> None:
    net = nn.Sequential(nn.LazyLinear(8), nn.LayerNorm(8), nn.Linear(8, 3))
    with pytest.raises(errors.BadConfig, match="run it once on a batch"):
        Classifier(net)
    net(torch.zeros(2, 4))
    assert Classifier(net).forward(torch.zeros(2, 4)).logits.shape == (2, 3)


def test_a_net_that_cannot_be_copied_is_refused_with_what_to_do() -> None:
    net = nets.make()
    net.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(errors.BadConfig, match=r"cannot be copied.*lock.*Keep what cannot be"):
        Classifier(net)


@pytest.mark.parametrize("mode", [*MODES, "renorm"])
def test_synchronised_batch_norm_layers_run_as_plain_ones(mode: Any) -> None:
    net = nets.make()
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net))
    before = look(synchronised)
    results = []
    for each in (net, synchronised):
        adapter = adapt(each, "tent", statistics=mode, lr=0.1)
        for number in range(1, 4):
            out = adapter.predict(nets.batch(number=number))
            adapter.learn(out)
        results.append(out.logits)
    assert torch.equal(*results)
    assert same(look(synchronised), before)


@pytest.mark.parametrize("mode", [*MODES, "renorm"])
def test_norm_layers_may_be_kept_in_another_precision_than_the_rest(mode: Any) -> None:
    net = nets.make(dtype=torch.bfloat16)
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.float()
    adapter = adapt(net, "tent", statistics=mode, lr=0.1)
    for number in range(1, 4):
        out = adapter.predict(nets.batch(number=number, dtype=torch.bfloat16))
        adapter.learn(out)
    assert adapter.classifier.live.flat.dtype == torch.float32
    assert not torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())
    exported = adapter.export()(x := nets.batch(number=4, dtype=torch.bfloat16))
    if mode in ("batch", "source", "mixed"):
        assert torch.equal(exported, adapter.predict(x, ask=False, learn=False).logits)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Recomputing(nn.Module):
    """Recomputes its blocks in the backward, in eval mode too, if it is told to."""

    def __init__(self, named: str = "grad_checkpointing") -> None:
        super().__init__()
        self.blocks, self.fc = nn.ModuleList([Block(), Block()]), nn.Linear(6, nets.CLASSES)
        self.named = named
        setattr(self, named, False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if getattr(self, self.named) else block(x)
        return self.fc(x)


def test_a_net_that_recomputes_blocks_itself_learns_or_is_told() -> None:
    def learned(net: nn.Module) -> Tensor:
        adapter = adapt(net, "wise", ratio=1.0, policy="uniform", entropy="all", lr=0.1)
        for number in range(1, 4):
            out = adapter.predict(nets.batch("tabular", number))
            adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
        return adapter.classifier.live.flat

    net = nets.trained(Recomputing)
    expected = learned(net)
    net.grad_checkpointing = True  # type: ignore[assignment]
    assert torch.equal(learned(net), expected)
    assert net.grad_checkpointing is True
    other = nets.trained(lambda: Recomputing("another_name"))
    other.another_name = True  # type: ignore[assignment]
    with pytest.raises(errors.BadConfig, match="checkpointing=True"):
        learned(other)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_a_part_of_a_net_may_be_scripted() -> None:
    net = nn.Sequential(torch.jit.script(nn.Linear(6, 8)), nn.LayerNorm(8), nn.Linear(8, nets.CLASSES)).double()
    adapter, x = adapt(net, "tent", lr=0.1), nets.batch("tabular")
    out = adapter.predict(x)
    assert torch.equal(out.logits, net(x))
    adapter.learn(out)
    assert torch.equal(adapter.export()(x), adapter.predict(x, learn=False).logits)


class WithExtras(nets.BatchNormCnn):
    """Holds tensors in every place where a module can hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1000))
        self.plain = torch.ones(1000)
        self.listed = [torch.ones(1000), {"deep": torch.ones(1000)}]

    def forward(self, x: Tensor) -> Tensor:
        extra = self.scale.mean() + self.plain.mean() + self.listed[0].mean() + self.listed[1]["deep"].mean()
        return super().forward(x * extra.to(x) / 4)


def replicas(classifier: Classifier) -> list[nn.Module]:
    return [replica.module for replica in classifier.replicas.free]


def test_replicas_share_every_frozen_tensor() -> None:
    net = nets.trained(WithExtras)
    classifier = Classifier(net)
    gate = threading.Barrier(3)
    wait = classifier.network._call
    classifier.network._call = lambda *args: (gate.wait(), wait(*args))[1]  # type: ignore[method-assign]
    threads = [threading.Thread(target=classifier.forward, args=[nets.batch()]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replicas(classifier)) == 3, "three forwards at a time take three replicas"
    adapted = set(classifier.layout.shapes)
    for replica in replicas(classifier):
        for name, tensor in net.named_parameters():
            path, _, key = name.rpartition(".")
            shared = getattr(replica.get_submodule(path), key).data_ptr() == tensor.data_ptr()
            assert shared == (name not in adapted), name
        assert replica.get_buffer("scale").data_ptr() == net.scale.data_ptr()
        assert replica.plain.data_ptr() == net.plain.data_ptr()
        assert replica.listed[0].data_ptr() == net.listed[0].data_ptr()
        assert replica.listed[1]["deep"].data_ptr() == net.listed[1]["deep"].data_ptr()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [True, False])
def test_the_user_s_module_is_untouched_at_every_moment(mode: Any, training: bool) -> None:
    seen: list[dict[str, Any]] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(look(net))
            return x

    net = nets.make()
    net.block.append(Spy())
    net.train(training)
    net.fc.weight.requires_grad_(False)
    before = look(net)
    adapter = adapt(net, "wise", ratio=1.0, policy="uniform", lr=0.5, entropy="all", statistics=mode)
    for number in range(1, 5):
        out = adapter.predict(nets.batch(number=number))
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
    assert not torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())
    assert len(seen) >= 8 and all(same(moment, before) for moment in seen)
    assert same(look(net), before)


def test_dropout_is_off_though_the_user_trains() -> None:
    net = nets.make()
    expected = net(nets.batch())
    assert torch.equal(Classifier(net.train(), statistics="source").forward(nets.batch()).logits, expected)


# -- modes of the caller -----------------------------------------------------------------------------------------------


def run(contexts: Sequence[Callable[[], Any]], inside: Callable[[], Any] | None = None) -> list[Tensor]:
    adapter = adapt(nets.make(), "wise", ratio=1.0, policy="uniform", entropy="all", lr=0.1)
    logits = []
    for number, context in enumerate(contexts, 1):
        with context():
            x = nets.batch(number=number)
            out = adapter.predict(x)
            answers = {query.id: nets.truth(query) for query in out.queries}
            if inside is not None:
                adapter.learn(out, answers)
        if inside is None:
            adapter.learn(out, answers)
        logits.append(out.logits)
    return logits


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("learn_inside", [True, False])
def test_predict_and_learn_work_inside_no_grad_and_inference_mode(context: Any, learn_inside: bool) -> None:
    plain = run([torch.enable_grad] * 4)
    for own, expected in zip(run([context] * 4, context if learn_inside else None), plain, strict=True):
        assert torch.equal(own, expected)
        assert not own.is_inference() and not own.requires_grad


def test_a_prediction_under_autocast_can_be_learned_outside_of_it() -> None:
    adapter = adapt(nets.make(dtype=torch.float32), "wise", ratio=1.0, policy="uniform", lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = adapter.predict(nets.batch(dtype=torch.float32))
    adapter.learn(out, {query.id: 1 for query in out.queries})
    assert adapter.classifier.live.flat.dtype == torch.float32
    assert adapter.predict(nets.batch(dtype=torch.float32)).logits.dtype == torch.float32


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_half_precision_nets_adapt(mode: Any) -> None:
    adapter = adapt(nets.make(dtype=torch.bfloat16), "wise", ratio=1.0, policy="uniform", lr=0.1, statistics=mode)
    for number in range(1, 4):
        out = adapter.predict(nets.batch(number=number, dtype=torch.bfloat16))
        adapter.learn(out, {query.id: 1 for query in out.queries})
        assert out.logits.dtype == torch.bfloat16 and out.logits.isfinite().all()


@pytest.mark.parametrize("method", ["wise", "tent", "sar", "cotta", "hiltta", "simatta"])
def test_steps_that_half_precision_cannot_tell_add_up(method: str) -> None:
    options = {"ratio": 1.0, "policy": "uniform"} if method in ("wise", "hiltta", "simatta") else {}
    # Scores that differ in the last bit must not lead to other questions.
    options |= {"selector": "random"} if method == "wise" else {}
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        adapter = adapt(nets.make(dtype=dtype), method, statistics="batch", **options)
        for number in range(20):
            out = adapter.predict(nets.batch(number=number % 5, dtype=dtype))
            adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
        assert adapter.classifier.live.flat.dtype == dtype
        moved.append(adapter.update.optimizer.flat.detach() - adapter.classifier.source_flat().float())
        assert torch.equal(adapter.update.optimizer.flat.to(dtype), adapter.classifier.live.flat)
    assert torch.cosine_similarity(*moved, dim=0) > 0.95


def test_an_anchor_follows_slowly_in_half_precision_too() -> None:
    net = nets.make(dtype=torch.bfloat16)
    classifier, anchor = Classifier(net), Anchor(0.999)
    anchor.start(classifier.live)
    classifier.publish(classifier.live.flat + 1)
    for _ in range(100):
        anchor.follow(classifier.live)
    gone = (anchor.version.flat - classifier.source_flat())[: len(net.bn1.weight)]  # type: ignore[arg-type]
    torch.testing.assert_close(gone.float(), torch.full_like(gone, 1 - 0.999**100).float(), rtol=0, atol=0.01)


def test_repr_says_what_adapts() -> None:
    assert repr(Classifier(nets.make())) == (
        "Classifier(BatchNormCnn, head='fc', statistics='batch', adapted={'adapted': 4})"
    )
