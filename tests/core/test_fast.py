"""Do the fast ways of running a network say the same as the plain one, and refuse what they cannot do?"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import timm
import torch
from core import nets
from core.checks import look, same
from core.count import Kernels
from core.fast import METHODS
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from wise_atta import Adapter, adapt, errors, who
from wise_atta.engine.ahead import Notes, Slopes, prepare
from wise_atta.engine.graphs import Graphs
from wise_atta.engine.precision import straight
from wise_atta.how import Descend, Entropy, Labels, LikelihoodRatio, Sums
from wise_atta.model import Classifier, Forward, Version
from wise_atta.when import Always, BudgetPaced


def make(method: str = "wise", kind: str = "batch-norm", **options: Any) -> Adapter:
    chosen: dict[str, Any] = {"lr": 0.01, **METHODS[method]}
    if method in ("eatta", "wise"):
        chosen["annotator"] = who.Oracle(nets.truth)
    return adapt(nets.make(kind, dtype=torch.float32), method, **(chosen | options))


def play(adapter: Adapter, steps: int = 12, kind: str = "batch-norm", n: int = 8) -> list[Tensor]:
    return [adapter.step(nets.batch(kind, 1 + number % 8, n=n, dtype=torch.float32)).logits for number in range(steps)]


def distance(a: Adapter, b: Adapter) -> float:
    return (a.classifier.live.flat - b.classifier.live.flat).abs().max().item()


def moved(adapter: Adapter) -> float:
    return (adapter.classifier.live.flat - adapter.classifier.source_flat()).abs().max().item()


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_after_fifty_steps_the_fast_sums_agree_with_the_plain_ones(method: str) -> None:
    plain, fast = make(method), make(method, precision="fp32")
    ours, theirs = play(plain, 50), play(fast, 50)
    assert moved(plain) > 1e-3
    assert distance(plain, fast) < 1e-5
    torch.testing.assert_close(theirs[-1], ours[-1], rtol=1e-4, atol=1e-4)
    assert plain.counts == fast.counts


LABELLED = {
    "simatta": {"e_l": 1.0, "e_h": 0.5, "steps": 2, "labels": 1, "ratio": 0.5},
    "hiltta": {"labels": 1, "ratio": 0.5},
    "cema": {"queue": 2, "replayed": 3, "alone": 3, "ready": 2, "below": 2.0, "epsilon": 0.9},
    "eatta": {"lr": 0.01, "labels": 2, "ratio": 1.0},
    "wise": {"lr": 0.01, "labels": 2, "ratio": 1.0, "policy": "uniform"},
}
UNLABELLED = {name: {"lr": 0.01, **METHODS[name]} for name in ("tent", "eta", "roid")}


def learned(method: str, kind: str, sizes: list[int], late: int, **fast: Any) -> tuple[list[Tensor], list[Any]]:
    """Outputs, and which losses each batch brought and which labels it learned; refused sizes are left out."""
    options = {**(LABELLED | UNLABELLED)[method], **fast}
    if method == "cema":
        options["teacher"] = nets.make(kind, dtype=torch.float32, seed=5)
    elif method in LABELLED:
        options["annotator"] = who.Delayed(who.Oracle(nets.truth), who.Between(0, late))
    adapter = adapt(nets.make(kind, dtype=torch.float32), method, **options)
    outputs, steps = [], []
    adapter.on_step(lambda step: steps.append((step.number, set(step.losses), step.learned)))
    for number, n in enumerate(sizes):
        with contextlib.suppress(errors.SingleSample):
            outputs.append(adapter.step(nets.batch(kind, number, n, torch.float32)).logits)
    return outputs, steps


@pytest.mark.parametrize("kind", ["batch-norm", "tokens"])
@pytest.mark.parametrize("method", [*LABELLED, *UNLABELLED])
def test_batches_of_any_size_are_learned_the_same_way_fast_and_plain(method: str, kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    for late in (0, 2) if method in LABELLED else (0,):
        sizes = [4, *torch.randint(1, 7, (12,), generator=draw).tolist()]
        outputs, steps = learned(method, kind, sizes, late)
        for fast in ({"precision": "fp32"}, {"channels_last": True}):
            quick, done = learned(method, kind, sizes, late, **fast)
            assert done == steps
            torch.testing.assert_close(quick, outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", list(nets.KINDS))
@pytest.mark.parametrize("options", [{"channels_last": True}, {"checkpointing": ["norm"]}, {"precision": "bf16"}])
def test_every_kind_of_net_runs_every_way(kind: str, options: dict[str, Any]) -> None:
    if "checkpointing" in options:
        first = next(name for name, module in nets.make(kind).named_modules() if name and "norm" in str(module).lower())
        options = {"checkpointing": [first]}
    plain, fast = make(kind=kind), make(kind=kind, **options)
    before = look(fast.classifier.model)
    ours, theirs = play(plain, 3, kind), play(fast, 3, kind)
    tolerance = 0.1 * float(ours[0].abs().max()) if "precision" in options else 1e-4
    assert (ours[0] - theirs[0]).abs().max() < tolerance
    assert theirs[0].dtype == torch.float32 and moved(fast) > 0
    assert same(look(fast.classifier.model), before)


@pytest.mark.parametrize("statistics", ["batch", "source", "mixed", "ema", "renorm"])
def test_bf16_keeps_statistics_losses_and_adapted_tensors_in_float32(statistics: str) -> None:
    adapter = make(statistics=statistics, precision="bf16")
    steps = []
    adapter.on_step(steps.append)
    play(adapter, 4)
    running = adapter.classifier.running
    assert running is None or running.dtype == torch.float32
    assert adapter.classifier.live.flat.dtype == torch.float32
    assert all(loss.dtype == torch.float32 for step in steps for loss in step.losses.values())


def test_a_step_smaller_than_bf16_can_tell_is_not_lost() -> None:
    adapter = make(lr=1e-5, precision="bf16")
    play(adapter, 2)
    assert 0 < moved(adapter) < 2**-9


def test_convolutions_run_in_bf16_and_the_head_does_not() -> None:
    seen: dict[str, set[torch.dtype]] = {}

    class Dtypes(Kernels):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.setdefault(func.overloadpacket.__name__, set()).update(
                arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()
            )
            return super().__torch_dispatch__(func, types, args, kwargs)

    adapter = make(precision="bf16")
    play(adapter, 1)
    with Dtypes():
        play(adapter, 1)
    assert seen["convolution"] == {torch.bfloat16}
    assert seen["addmm"] == {torch.float32}


def test_a_tied_head_keeps_its_precision_under_bf16() -> None:
    net = nets.trained(nets.TiedNet, dtype=torch.float32)
    adapter = adapt(net, "tent", precision="bf16", head="out")
    out = adapter.step(torch.tensor([[0, 1], [2, 3], [4, 0]]))
    assert out.logits.dtype == torch.float32


def test_frozen_tensors_are_converted_once_for_all_replicas() -> None:
    classifier = make(precision="bf16", channels_last=True).classifier
    first, second = classifier.replicas.make(), classifier.replicas.make()
    pairs = zip(first.module.named_parameters(), second.module.named_parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for (name, a), (_, b) in pairs if name not in classifier.layout.shapes)


@pytest.mark.parametrize("method", ["roid", "wise"])
def test_one_kept_sample_is_normalised_by_its_batch(method: str) -> None:
    results = []
    for options in ({}, {"precision": "fp32"}, {"channels_last": True}):
        seen = LikelihoodRatio(augment=lambda inputs, generator: inputs + 0.1)
        chosen = {"objective": seen} if method == "wise" else {"augment": seen.augment}
        adapter, losses = make(method, "tabular", **chosen, **options), []
        adapter.on_step(lambda step, losses=losses: losses.append(dict(step.losses)))
        play(adapter, 4, "tabular", n=2)
        results.append(losses)
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


# -- the slope ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", [None, 0.4, 1e-9])
@pytest.mark.parametrize("rows", [[], [0], [1, 3], [0, 1, 2, 3, 4, 5]])
def test_the_prepared_loss_is_the_plain_one_with_its_gradient(below: float | None, rows: list[int]) -> None:
    logits = 3 * torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    objective, labels = Entropy(below), Labels(rows, [0] * len(rows))
    model, results = Classifier(nets.make()), []
    prepared = prepare(objective, logits)
    assert prepared is not None
    prepared.kept = prepared.keep.tolist()
    for notes in (None, Notes(prepared)):
        z = logits.clone().requires_grad_(True)
        forward = Forward(logits, z, logits, Version(torch.zeros(0), model.layout), notes=notes)
        loss = (notes or Sums)(model, objective, forward, labels).unlabelled()
        results.append((None, None) if loss is None else (loss.value, torch.autograd.grad(loss.graph, z)[0]))
    (loss, slope), (quick, quick_slope) = results
    if loss is None:
        assert quick is None
    else:
        torch.testing.assert_close(quick, loss)
        torch.testing.assert_close(quick_slope, slope)


def test_the_slope_of_the_labels_is_the_gradient_of_their_loss() -> None:
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    labels = Labels([4, 1], [2, 0], weights=[0.5, 2.0])
    (wanted,) = torch.autograd.grad(labels.loss(logits[labels.rows]), logits)
    model, objective = Classifier(nets.make()), Entropy()
    forward = Forward(
        logits, logits, logits, Version(torch.zeros(0), model.layout), notes=Notes(prepare(objective, logits.detach()))
    )
    torch.testing.assert_close(torch.stack(Slopes(model, objective, forward, labels)._slopes), wanted[labels.rows])


@pytest.mark.parametrize("options", [{}, {"precision": "fp32"}])
def test_norm_tensors_stay_where_only_labelled_samples_are_sure(options: dict[str, Any]) -> None:
    adapter = make(policy="always", labels=3, ratio=3.0, supervise_norm=False, annotator=None, **options)
    adapter.learn(adapter.predict(nets.batch(dtype=torch.float32)))
    norm = adapter.classifier.layout.slices["norm"]
    before = adapter.classifier.live.flat[norm].clone()
    out = adapter.predict(nets.batch(number=2, n=3, dtype=torch.float32))
    step = adapter.learn(out, {query.id: 0 for query in out.queries})
    assert set(step.losses) == {"sup"}
    assert torch.equal(adapter.classifier.live.flat[norm], before)


def test_a_rule_without_labels_leaves_labelled_samples_out() -> None:
    results = []
    for options in ({}, {"precision": "fp32"}):
        update = Descend(Entropy(below=0.9), lr=0.1)
        classifier = Classifier(nets.make(dtype=torch.float32), adapt=update.adapts, **options)
        questions = who.Questions(annotator=who.Oracle(nets.truth))
        results.append(Adapter(classifier, update, policy=Always(2), labels=2, questions=questions))
    torch.testing.assert_close(play(results[1], 6, n=4), play(results[0], 6, n=4))
    assert moved(results[0]) > 1e-3 and distance(*results) < 1e-5


@pytest.mark.parametrize("train_head", ["full", "bias", "none"])
def test_the_head_learns_the_same_in_closed_form(train_head: str) -> None:
    options = {"train_head": train_head, "labels": 2, "ratio": 2.0, "policy": "always"}
    plain, fast = make(**options), make(**options, precision="fp32")
    play(plain, 20)
    play(fast, 20)
    assert moved(plain) > 1e-3 and distance(plain, fast) < 1e-5
    heads = [name for name in plain.classifier.layout.shapes if name.startswith(plain.classifier.head_name)]
    assert len(heads) == {"full": 2, "bias": 1, "none": 0}[train_head]


def _tied(head: nn.Linear) -> nn.Module:
    body = nn.Linear(8, nets.CLASSES)
    body.weight = head.weight
    return nn.Sequential(body, nn.Linear(nets.CLASSES, 8), nn.LayerNorm(8), head)


def _hooked(head: nn.Linear) -> nn.Module:
    head.register_forward_hook(lambda module, args, output: 3 * output)
    return nn.Sequential(nn.LayerNorm(8), head)


HEADS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "tied": _tied,
    "hooked": _hooked,
    "weight_norm": lambda head: nn.Sequential(nn.LayerNorm(8), nn.utils.weight_norm(head)),
    "spectral_norm": lambda head: nn.Sequential(nn.LayerNorm(8), nn.utils.spectral_norm(head)),
    "parametrized": lambda head: nn.Sequential(nn.LayerNorm(8), nn.utils.parametrizations.weight_norm(head)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("build", HEADS.values(), ids=list(HEADS))
def test_a_head_that_is_more_than_a_product_learns_the_same(build: Callable[[nn.Linear], nn.Module]) -> None:
    torch.manual_seed(0)
    net = build(nn.Linear(8, nets.CLASSES)).eval()
    ways: tuple[dict[str, Any], ...] = {}, {"precision": "fp32"}
    results = [adapt(net, "wise", policy="always", lr=0.1, entropy="all", **way) for way in ways]
    for adapter in results:
        for x in torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0)):
            out = adapter.predict(x)
            adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
    assert moved(results[0]) > 1e-2 and distance(*results) < 1e-5


@pytest.mark.parametrize("training", [True, False])
def test_a_straight_call_of_batch_norm_is_the_layer_s_own(training: bool) -> None:
    results = []
    for change in (lambda norm: None, straight):
        norm = nn.BatchNorm2d(3, momentum=1.0).train(training)
        change(norm)
        results.append((norm(nets.batch(dtype=torch.float32)), norm.running_mean, norm.running_var))
    assert same(*results)


# -- what the host need not be waited for ------------------------------------------------------------------------------


class Told(BudgetPaced):
    """Grants what it is told to, and foresees nothing of it."""

    wishes: ClassVar[list[int]] = []

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        return self.wishes.pop(0), 0.0, 0.0

    def _bounds(self, want: int, units: int) -> tuple[int, int]:
        return 0, 0


def steps_of(adapter: Adapter, n: int = 4) -> list[tuple[int, int, int]]:
    """Forwards and backwards of each predict, and backwards of each learn."""
    results = []
    for number in range(1, n + 1):
        before = adapter.classifier.work.forwards, adapter.classifier.work.backwards
        out = adapter.predict(nets.batch(number=number, dtype=torch.float32))
        between = adapter.classifier.work.forwards, adapter.classifier.work.backwards
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
        after = adapter.classifier.work.backwards
        results.append((between[0] - before[0], between[1] - before[1], after - between[1]))
    return results


ACTIVATIONS = [nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Mish, nn.ReLU6, nn.SiLU]


class NormAct(nn.BatchNorm2d):
    """A norm layer that holds its activation, as timm's do, but relies on its being in place."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__(4)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.act(out)
        return out


class Relies(nn.Module):
    """Activations in place: two whose input nobody else sees, and four on which the rest of the net relies."""

    def __init__(self, activation: type[nn.ReLU6]) -> None:
        super().__init__()
        last, first, own, self.shared, self.alone = (activation(inplace=True) for _ in range(5))
        hidden = timm.layers.BatchNormAct2d(4, act_layer=activation)
        self.seen = nn.Sequential(nn.Conv2d(3, 4, 3), hidden, nn.Conv2d(4, 4, 1), last)
        self.first = nn.Sequential(first, nn.Conv2d(4, 4, 1), self.shared)
        self.own = NormAct(own)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.seen(x)
        x = x + self.first(2 * x - 1)
        kept = self.own(2 * x - 1)
        self.alone(kept)
        self.shared(kept)
        logits: Tensor = self.head(kept.mean(dim=(2, 3)))
        return logits


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_in_place_copy_nothing_for_the_backward(activation: type[nn.ReLU6]) -> None:
    torch.manual_seed(0)
    net = Relies(activation).eval()
    x = torch.randn(6, 3, 8, 8)
    classifier = Classifier(net, statistics="batch")
    with classifier.replicas.take(classifier.live.tensors) as replica:
        seen: Any = replica.module.get_submodule("seen")
    with Kernels() as kernels:
        forward = classifier.forward(x, grad=True)
    # Those that the net relies on are left as they are, and copy: the first, the shared one twice, the lone one
    # and the own one. The inputs are copied too, in the very first forward: the net may write to them.
    assert kernels.copies == 5 + 1 and not (seen[1].act.inplace or seen[3].inplace)
    assert torch.equal(classifier.forward(x).logits, forward.logits)
    assert seen[1].act.inplace and seen[3].inplace
    assert all(layer.inplace for layer in net.modules() if isinstance(layer, activation))
    # The gradients are those of the net as it is.
    norm: Any = net.seen[1]
    norm.train()
    net.own.train()
    own = net(x)
    torch.testing.assert_close(own, forward.logits, rtol=0, atol=0)
    due = torch.autograd.grad(own.square().sum(), [norm.weight, norm.bias, net.own.weight, net.own.bias])
    gradients = classifier.gradients(forward.logits.square().sum(), forward.version, ["adapted"])["adapted"]
    assert all(torch.equal(grad, other) for grad, other in zip(gradients, due, strict=True))


def test_the_backward_begins_in_predict_where_nothing_is_asked() -> None:
    assert steps_of(make(policy="uniform", annotator=None, precision="fp32")) == [(1, 1, 0), (2, 0, 1)] * 2
    assert steps_of(make("tent", precision="fp32"), 2) == [(1, 1, 0)] * 2
    assert steps_of(make(policy="uniform", annotator=None), 2) == [(1, 0, 1), (2, 0, 1)], "the plain way waits"


def test_it_does_not_where_a_late_answer_may_come() -> None:
    adapter = make(policy="uniform", annotator=None, precision="fp32")
    for number in (1, 2):
        out = adapter.predict(nets.batch(number=number, dtype=torch.float32))
        adapter.learn(out)
    assert len(out.queries) == 1
    before = adapter.classifier.work.backwards
    late = adapter.predict(nets.batch(number=3, dtype=torch.float32))
    assert adapter.classifier.work.backwards == before
    step = adapter.learn(late, {out.queries[0].id: 1})
    assert step.late == 1 and adapter.classifier.work.backwards == before + 1


def test_a_prediction_that_is_never_learned_has_changed_nothing() -> None:
    adapter = make("tent", precision="fp32")
    play(adapter, 3)
    before = adapter.update.state_dict()
    adapter.predict(nets.batch(number=4, dtype=torch.float32))
    assert same(adapter.update.state_dict(), before)
    bad = nets.batch(number=5, dtype=torch.float32)
    bad[0] = torch.nan
    with pytest.raises(errors.NotFinite):
        adapter.predict(bad)
    assert same(adapter.update.state_dict(), before)


def test_a_grant_that_was_not_foreseen_costs_one_forward() -> None:
    results = []
    for options in ({}, {"precision": "fp32"}):
        adapter = make(policy=Told(0.5), ratio=None, annotator=None, **options)
        Told.wishes[:] = [0, 1, 0, 1]
        steps_of(adapter)
        assert adapter.counts.learned == 2
        results.append(adapter)
    assert moved(results[0]) > 1e-3 and distance(*results) < 1e-5


@pytest.mark.parametrize("selector", ["drift", "max-entropy", "margin", "random", "perturbation"])
def test_a_batch_that_is_certain_to_be_asked_about_is_read_once(selector: str) -> None:
    results = []
    for options in ({}, {"precision": "fp32"}):
        adapter, sent = make(policy="uniform", selector=selector, **options), []
        plain = adapter.classifier.send
        adapter.classifier.send = lambda numbers, plain=plain, sent=sent: sent.append(len(numbers)) or plain(numbers)  # type: ignore[method-assign]
        asked = []
        adapter.on_step(lambda step, asked=asked: asked.append(step.asked))
        play(adapter, 6)
        results.append((asked, sent))
    (asked, sent), (quick_asked, quick_sent) = results
    assert asked == quick_asked and sum(map(len, asked)) == 3, "the same questions"
    assert sent == [2] * 6 and quick_sent == [2 + 8, 2 + 8 + 8] * 3


# -- recomputed blocks -------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Pictures through four blocks with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, nets.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.more, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm2(self.more(self.norm(self.conv(x)).relu()))


def chain(method: str = "wise", **options: Any) -> Adapter:
    chosen = METHODS[method] | {"lr": 0.01, "annotator": who.Oracle(nets.truth)}
    return adapt(nets.trained(Chain, dtype=torch.float32), method, **(chosen | options))


def kept(adapter: Adapter) -> int:
    """Bytes that a forward keeps for its backward."""
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        adapter.predict(nets.batch(dtype=torch.float32))
    return total


@pytest.mark.parametrize("statistics", ["batch", "source", "mixed", "ema", "renorm"])
@pytest.mark.parametrize("method", ["wise", "eatta"])
def test_recomputed_blocks_give_the_same_bits(method: str, statistics: str) -> None:
    plain, less = chain(method, statistics=statistics), chain(method, statistics=statistics, checkpointing=True)
    assert same(play(plain, 6), play(less, 6))
    assert distance(plain, less) == 0 and moved(plain) > 0


def test_recomputed_blocks_keep_a_fraction_of_the_activations() -> None:
    assert kept(chain(checkpointing=True)) < 0.3 * kept(chain())


def test_a_replica_whose_blocks_will_run_again_is_kept_apart() -> None:
    adapter = chain(checkpointing=True)
    out = adapter.predict(nets.batch(dtype=torch.float32))
    for number in (2, 3):
        adapter.predict(nets.batch(number=number, dtype=torch.float32), ask=False, learn=False)
    adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
    alone = chain()
    again = alone.predict(nets.batch(dtype=torch.float32))
    alone.learn(again, {query.id: nets.truth(query) for query in again.queries})
    assert distance(adapter, alone) == 0
    play(adapter, 6)
    assert 1 <= len(adapter.classifier.replicas.free) <= 3, "leased ones come back, so that there are never many"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
        ({"graphs": True}, "graphs=True needs a CUDA device, the model is on cpu: move the model there first"),
        ({"checkpointing": True, "compile": True}, "leave them out, or leave checkpointing out"),
        ({"checkpointing": ["nowhere"]}, "unknown layer to recompute 'nowhere'"),
        ({"compile": True, "statistics": "mixed"}, "needs statistics='batch' or 'source', not 'mixed'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.BadConfig, match=message):
        chain(**options)


@pytest.mark.parametrize(("version", "old"), [("2.4.1+cu121", True), ("2.5.0", False), ("2.11.0", False)])
def test_an_old_torch_compiles_nothing(version: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(errors.BadConfig, match="needs torch") if old else contextlib.nullcontext():
        make("tent", compile=True)


def test_a_net_without_blocks_says_how_to_name_layers() -> None:
    with pytest.raises(errors.BadConfig, match="found no chain of blocks in this model: name the layers"):
        make(checkpointing=True)


def test_a_model_in_double_precision_is_not_narrowed() -> None:
    with pytest.raises(errors.BadConfig, match=r"needs a model in float32, this one is torch\.float64"):
        adapt(nets.make(), "tent", precision="bf16")


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["batch-norm", "tabular"])
@pytest.mark.parametrize("method", ["tent", "eatta", "wise"])
def test_a_compiled_net_agrees_with_the_plain_one(method: str, kind: str) -> None:
    plain, fast = make(method, kind), make(method, kind, compile=True)
    play(plain, 4, kind)
    play(fast, 4, kind)
    assert moved(plain) > 1e-3 and distance(plain, fast) < 1e-4


def test_a_net_is_compiled_where_nothing_but_torch_was_imported() -> None:
    net = "net = torch.nn.Sequential(torch.nn.LayerNorm(2), torch.nn.Linear(2, 2))"
    script = f"import torch, wise_atta; {net}; wise_atta.adapt(net, 'tent', compile=True)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# -- when a shape is recorded ------------------------------------------------------------------------------------------


class Noted:
    """Stands in for what needs a GPU: which shapes were recorded, and which recording is in use."""

    made: ClassVar[list[int]] = []
    busy = False

    def __init__(self, network: Any, views: Any, inputs: Tensor, *rest: Any) -> None:
        self.made.append(len(inputs))

    def fits(self) -> bool:
        return not self.busy

    def replay(self, inputs: Tensor, flat: Tensor, running: None) -> tuple[Tensor, Tensor, list[Tensor]]:
        return inputs, inputs, []

    recorded = None


@pytest.mark.parametrize(
    ("sizes", "made"),
    [
        ([8, 8, 8, 8], [8]),
        ([8, 5, 8, 7, 8, 5, 8, 5, 8, 5], [8]),
        ([8, 8, 8, 3], [8]),
        ([8, 8, 8, 4, 4, 4, 4], [8, 4]),
        ([8, 4, 3, 2, 1], []),
    ],
    ids=["one size", "views of some samples", "a last partial batch", "another size for good", "no size twice"],
)
def test_the_shape_that_comes_again_is_recorded(
    sizes: list[int], made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wise_atta.engine.graphs.Recording", Noted)
    monkeypatch.setattr(Noted, "made", [])
    graphs = Graphs(lambda *arguments: None, lambda flat: {})
    ran = [graphs.run(torch.zeros(n, 2), torch.zeros(1), None, False) is not None for n in sizes]
    assert Noted.made == made
    assert ran[:2] == [False, False] and any(ran) == bool(made)


def test_a_plan_beside_another_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wise_atta.engine.graphs.Recording", Noted)
    monkeypatch.setattr(Noted, "made", [])
    graphs = Graphs(lambda *arguments: None, lambda flat: {})
    flat = torch.zeros(1)
    for _ in range(3):
        graphs._recording(torch.zeros(8, 2), flat, None, True, None)
    first = graphs._recordings["graph"][1]
    for _ in range(2):
        graphs._recording(torch.zeros(8, 2), flat, None, False, first)
    gone = weakref.ref(first)
    for _ in range(3):
        graphs._recording(torch.zeros(4, 2), flat, None, True, None)
    del first
    assert Noted.made == [8, 4] and gone() is None, "the memory of a recording is not kept by who once read it"
