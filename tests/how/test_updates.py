"""Do updates move tensors as plain autograd and torch.optim would on a copy of the net?

Every reference is written out for one run: a deep copy, BatchNorm in training mode, the paper's losses, torch.optim.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core import nets
from methods import active
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta import Adapter, Answer, adapt, errors, how

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)


# -- the plain way ----------------------------------------------------------------------------------------------------


def on_batch_statistics(net: nn.Module) -> nn.Module:
    for part in net.modules():
        part.training = isinstance(part, _BatchNorm)
    return net


def norm_tensors(net: nn.Module) -> list[nn.Parameter]:
    return [p for part in net.modules() if isinstance(part, NORMS) for p in part.parameters(recurse=False)]


def sgd(tensors: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=lr, momentum=0.9, nesterov=True)


def entropies(logits: Tensor) -> Tensor:
    p = logits.softmax(dim=1)
    return -(p * p.log()).sum(dim=1)


def mean_entropy(logits: Tensor, labelled: list[int], filtered: bool) -> Tensor | None:
    hs = entropies(logits)
    if not filtered:
        return hs.mean()
    sure = [h for i, h in enumerate(hs) if h.item() < 0.4 * math.log(nets.CLASSES) and i not in labelled]
    return torch.stack(sure).mean() if sure else None


def cross_entropy(logits: Tensor, answers: dict[int, tuple[int, float]]) -> Tensor:
    """(1/|Q|) Σ w·(−log p_y)."""
    losses = [-weight * logits[row].log_softmax(dim=0)[label] for row, (label, weight) in answers.items()]
    return torch.stack(losses).sum() / len(losses)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step on the optimizer's own tensors; no gradient is left anywhere."""
    tensors = optimizer.param_groups[0]["params"]
    for tensor, grad in zip(tensors, torch.autograd.grad(loss, tensors, retain_graph=True), strict=True):
        tensor.grad = grad
    optimizer.step()
    optimizer.zero_grad()


class Plain:
    """A copy of the net with its features at hand."""

    def __init__(self, kind: str) -> None:
        self.net = on_batch_statistics(copy.deepcopy(nets.make(kind)))
        self.head = self.net.get_submodule(nets.KINDS[kind].head)
        self.head.register_forward_pre_hook(lambda _, args: setattr(self, "features", args[0].detach()))
        self.features = torch.empty(0)

    def __call__(self, x: Any) -> Tensor:
        return nets.call(self.net, x)


def compare(adapter: Adapter, plain: nn.Module) -> None:
    source = dict(adapter.classifier.model.named_parameters())
    for name, tensor in plain.named_parameters():
        live = adapter.classifier.live.tensors.get(name, source[name])
        torch.testing.assert_close(live.detach(), tensor.detach(), **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


# -- tent -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(nets.KINDS))
def test_tent_equals_torch_optim_on_a_copy(kind: str) -> None:
    adapter, plain = adapt(nets.make(kind), "tent", lr=0.1), Plain(kind)
    optimizer = sgd(norm_tensors(plain.net), lr=0.1)
    for number in range(1, 6):
        x = nets.batch(kind, number)
        out = adapter.predict(x)
        logits = plain(x)
        torch.testing.assert_close(out.logits, logits.detach(), **TOLERANCE)
        adapter.learn(out)
        step(optimizer, entropies(logits).mean())
        compare(adapter, plain.net)


@pytest.mark.parametrize(
    ("options", "build"),
    [
        ({"optimizer": "adam", "lr": 0.01}, lambda tensors: torch.optim.Adam(tensors, lr=0.01)),
        ({"momentum": 0.0, "lr": 0.1}, lambda tensors: torch.optim.SGD(tensors, lr=0.1)),
        ({"nesterov": False, "lr": 0.1}, lambda tensors: torch.optim.SGD(tensors, lr=0.1, momentum=0.9)),
    ],
)
def test_tent_takes_every_optimizer_that_it_offers(options: dict[str, Any], build: Callable[..., Any]) -> None:
    adapter, plain = adapt(nets.make(), "tent", **options), Plain("batch-norm")
    optimizer = build(norm_tensors(plain.net))
    for number in range(1, 6):
        x = nets.batch(number=number)
        adapter.learn(adapter.predict(x))
        step(optimizer, entropies(plain(x)).mean())
    compare(adapter, plain.net)


def test_all_tensors_can_take_the_step() -> None:
    adapter, plain = adapt(nets.make(), "tent", lr=0.05, adapt="all"), Plain("batch-norm")
    optimizer = sgd(list(plain.net.parameters()), lr=0.05)
    for number in range(1, 4):
        x = nets.batch(number=number)
        adapter.learn(adapter.predict(x))
        step(optimizer, entropies(plain(x)).mean())
    compare(adapter, plain.net)


def test_a_pull_takes_the_tensors_part_of_the_way_back() -> None:
    net = nets.make()
    update = how.Descend(lr=0.2, pull=0.25)
    adapter = Adapter(wise_classifier(net, update), update)
    plain = Plain("batch-norm")
    tensors = norm_tensors(plain.net)
    source, optimizer = [tensor.detach().clone() for tensor in tensors], sgd(tensors, lr=0.2)
    for number in range(1, 5):
        x = nets.batch(number=number)
        adapter.learn(adapter.predict(x))
        step(optimizer, entropies(plain(x)).mean())
        with torch.no_grad():
            for tensor, start in zip(tensors, source, strict=True):
                tensor.copy_(0.75 * tensor + 0.25 * start)
    compare(adapter, plain.net)


def wise_classifier(net: nn.Module, update: how.Update) -> Any:
    from wise_atta import Classifier

    return Classifier(net, adapt=update.adapts)


# -- the two steps of the paper ---------------------------------------------------------------------------------------


def answered(adapter: Adapter, x: Any) -> tuple[Any, dict[str, Answer], dict[int, tuple[int, float]]]:
    """A prediction, answers to its questions, and the same answers by row."""
    out = adapter.predict(x)
    answers = {q.id: Answer(nets.truth(q), weight=1 + 0.5 * (q.index % 3)) for q in out.queries}
    rows = {q.index: (nets.truth(q), answers[q.id].weight) for q in out.queries}
    return out, answers, rows


CASES: dict[str, dict[str, Any]] = {
    "eq. 1, entropy over all": {"entropy": "all"},
    "eq. 1, entropy filtered": {"entropy": "filtered"},
    "one label a batch": {"ratio": 1.0},
    "three labels a batch": {"ratio": 3.0, "labels": 3},
    "other weights": {"lambda_sup": 0.3, "lambda_ent": 1.7, "lambda_head": 0.5, "entropy": "all"},
    "two learning rates": {"head_lr": 0.02},
    "head's bias": {"train_head": "bias"},
    "no head": {"train_head": "none"},
    "supervision off the norm tensors": {"supervise_norm": False},
    "only selected": {"only_selected": True},
    "a pull to the source": {"pull": 0.25},
}


@pytest.mark.parametrize("kind", ["batch-norm", "tokens"])
@pytest.mark.parametrize("case", list(CASES))
def test_the_two_steps_equal_torch_optim_on_a_copy(case: str, kind: str) -> None:
    options = {"ratio": 0.5, "labels": 1, "policy": "uniform", "lr": 0.1} | CASES[case]
    adapter, plain = adapt(nets.make(kind), "wise", statistics="batch", **options), Plain(kind)
    trained = {"full": list(plain.head.parameters()), "bias": [plain.head.bias], "none": []}
    head = trained[options.get("train_head", "full")]
    first = sgd(norm_tensors(plain.net), lr=0.1)
    second = sgd(head, lr=options.get("head_lr", 0.1)) if head else None
    filtered = options.get("entropy", "filtered") == "filtered"
    tensors = [*norm_tensors(plain.net), *head]
    source, pull = [tensor.detach().clone() for tensor in tensors], options.get("pull", 0.0)
    labelled = 0
    for number in range(1, 7):
        x = nets.batch(kind, number)
        out, answers, rows = answered(adapter, x)
        logits = plain(x)
        torch.testing.assert_close(out.logits, logits.detach(), **TOLERANCE)
        adapter.learn(out, answers)
        labelled += len(rows)

        if not rows and options.get("only_selected"):
            continue
        terms = []
        loss_ent = mean_entropy(logits, list(rows), filtered)
        if loss_ent is not None:
            terms.append(options.get("lambda_ent", 0.1) * loss_ent)
        if rows and options.get("supervise_norm", True):
            terms.append(options.get("lambda_sup", 0.9) * cross_entropy(logits, rows))
        if terms:
            step(first, torch.stack(terms).sum())
        if rows and second is not None:
            again = plain.head(plain.features)
            step(second, options.get("lambda_head", 1.0) * cross_entropy(again, rows))
        with torch.no_grad():
            for tensor, start in zip(tensors, source, strict=True):
                tensor.copy_((1 - pull) * tensor + pull * start)
        compare(adapter, plain.net)
    assert labelled == int(6 * options["ratio"])


def test_a_block_takes_the_second_step_in_place_of_the_head() -> None:
    adapter = adapt(
        nets.make(),
        "wise",
        ratio=0.5,
        lr=0.1,
        head_lr=0.03,
        block="block",
        statistics="batch",
        policy="uniform",
        entropy="all",
    )
    plain = Plain("batch-norm")
    first, second = sgd(norm_tensors(plain.net), lr=0.1), sgd(list(plain.net.block.parameters()), lr=0.03)
    for number in range(1, 7):
        x = nets.batch(number=number)
        out, answers, rows = answered(adapter, x)
        logits = plain(x)
        adapter.learn(out, answers)
        loss = 0.1 * entropies(logits).mean()
        if not rows:
            step(first, loss)
            continue
        step(first, loss + 0.9 * cross_entropy(logits, rows))
        step(second, cross_entropy(plain(x), rows))
    compare(adapter, plain.net)


def test_a_pull_comes_after_the_step_of_a_block() -> None:
    options: dict[str, Any] = {"ratio": 1.0, "policy": "uniform", "lr": 0.1, "pull": 1.0, "statistics": "batch"}
    adapter = adapt(nets.make(), "wise", block="block", **options)
    out, answers, _ = answered(adapter, nets.batch())
    adapter.learn(out, answers)
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


def test_a_block_resumes_with_momenta_of_its_own() -> None:
    options = {"block": "norms", "ratio": 1.0, "policy": "uniform", "lr": 0.01}
    active.assert_resumes(lambda: active.adapt("wise", **options))


def test_the_published_rule_has_no_block() -> None:
    with pytest.raises(errors.BadConfig, match="not a block"):
        adapt(nets.make(), "wise", preset="authors", length=6, block="block")


@pytest.mark.parametrize("option", [{"pull": 0.01}, {"correct_prior": True}])
def test_the_published_rule_stays_as_published(option: dict[str, Any]) -> None:
    with pytest.raises(errors.BadConfig, match="the published rule has no pull"):
        adapt(nets.make(), "wise", preset="authors", length=6, **option)


def test_the_published_sequence_equals_torch_optim_on_a_copy() -> None:
    options: dict[str, Any] = {"preset": "authors", "length": 6, "ratio": 0.5, "lr": 0.05, "head_lr": 0.02}
    adapter, plain = adapt(nets.make(), "wise", statistics="batch", **options), Plain("batch-norm")
    tensors = norm_tensors(plain.net)
    # One momentum a tensor over all kinds of step, so one optimizer whose groups sit out where they have no gradient.
    optimizer = sgd([*tensors, plain.head.bias], lr=0.05)

    def move(loss: Tensor, moved: list[nn.Parameter], lr: float) -> None:
        for tensor, grad in zip(moved, torch.autograd.grad(loss, moved, retain_graph=True), strict=True):
            tensor.grad = grad
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

    labelled = 0
    for number in range(1, 7):
        x = nets.batch(number=number)
        out, answers, rows = answered(adapter, x)
        logits = plain(x)
        adapter.learn(out, answers)
        labelled += len(rows)
        loss_ent = mean_entropy(logits, list(rows), filtered=True)
        if not rows:
            if loss_ent is not None:
                move(0.1 * loss_ent, [*tensors, plain.head.bias], 0.02)
            continue
        loss = 0.15 * cross_entropy(logits, rows)
        move(loss if loss_ent is None else loss + 1.7 * loss_ent, tensors, 0.05)
        move(0.15 * cross_entropy(plain(x), rows), [*tensors, plain.head.bias], 0.02)
        compare(adapter, plain.net)
    assert labelled == 3


# -- late labels ------------------------------------------------------------------------------------------------------


def moments(net: nn.Module, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Mean and biased variance of what reaches every BatchNorm layer."""
    found: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, args: tuple[Tensor]) -> None:
        rows = args[0].transpose(0, 1).flatten(1)
        found.append((rows.mean(dim=1), (rows - rows.mean(dim=1, keepdim=True)).square().mean(dim=1)))

    handles = [part.register_forward_pre_hook(note) for part in net.modules() if isinstance(part, _BatchNorm)]
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()
    return found


def forward_with(net: nn.Module, statistics: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """A forward in which BatchNorm layers use the given statistics."""
    norms = [part for part in net.modules() if isinstance(part, _BatchNorm)]
    for norm, (mean, var) in zip(norms, statistics, strict=True):
        norm.training, norm.running_mean, norm.running_var = False, mean.clone(), var.clone()
    logits: Tensor = net(x)
    on_batch_statistics(net)
    return logits


@pytest.mark.parametrize("context", ["own", "current", "source"])
@pytest.mark.parametrize("kind", ["batch-norm", "tabular", "folded"])
def test_late_labels_are_learned_in_their_context(context: Any, kind: str) -> None:
    adapter = adapt(
        nets.make(kind), "wise", ratio=1.0, policy="uniform", lr=0.1, entropy="all", context=context, statistics="batch"
    )
    plain = Plain(kind)
    first, second = sgd(norm_tensors(plain.net), lr=0.1), sgd(list(plain.head.parameters()), lr=0.1)
    source = [(n.running_mean.clone(), n.running_var.clone()) for n in plain.net.modules() if isinstance(n, _BatchNorm)]
    asked: list[tuple[Any, Tensor, list[tuple[Tensor, Tensor]]]] = []
    for number in range(1, 7):
        x = nets.batch(kind, number)
        out = adapter.predict(x)
        (query,) = out.queries
        asked.append((query, x[query.index : query.index + 1], moments(plain.net, x)))
        # The labels of the second and third batch come with the fourth, out of order; that of the fourth is prompt.
        arrived = {4: [asked[2], asked[1], asked[3]]}.get(number, []) if number >= 4 else []
        answers = {q.id: Answer(nets.truth(q), weight=0.5 + q.batch) for q, _, _ in arrived}
        record = adapter.learn(out, answers)
        assert record.late == (2 if number == 4 else 0)

        logits = plain(x)
        features, loss = plain.features, 0.1 * entropies(logits).mean()
        if not arrived:
            step(first, loss)
            continue
        current, losses, rows = moments(plain.net, x), [], []
        for late, sample, own in arrived:
            if late.batch == number:
                row, feature = logits[late.index], features[late.index]
            else:
                used = {"own": own, "current": current, "source": source}[context]
                row = forward_with(plain.net, used, sample)[0]
                feature = plain.features[0]
            losses.append(-(0.5 + late.batch) * row.log_softmax(dim=0)[nets.truth(late)])
            rows.append((feature, nets.truth(late), 0.5 + late.batch))
        step(first, loss + 0.9 * torch.stack(losses).sum() / 3)
        again = [-weight * plain.head(feature).log_softmax(dim=0)[label] for feature, label, weight in rows]
        step(second, torch.stack(again).sum() / 3)
    compare(adapter, plain.net)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_no_update_moves_nothing_and_needs_no_graph() -> None:
    adapter = adapt(nets.make(), "bn")
    out = adapter.predict(nets.batch())
    assert adapter.learn(out).losses == {}
    assert adapter.classifier.live.flat.numel() == 0


def test_an_update_serves_one_adapter() -> None:
    method = how.Descend()
    net = nets.make()
    first = Adapter(wise_classifier(net, method), method)
    with pytest.raises(errors.BadConfig, match="another adapter"):
        Adapter(wise_classifier(net, method), method)
    first.learn(first.predict(nets.batch()))
    assert not torch.equal(first.classifier.live.flat, first.classifier.source_flat())


def test_a_batch_without_a_confident_sample_takes_no_step_and_says_so() -> None:
    net = nets.make()
    with torch.no_grad():
        net.fc.weight.zero_()
        net.fc.bias.zero_()
    adapter = adapt(net, "wise", ratio=0.1)
    record = adapter.learn(adapter.predict(nets.batch()))
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())
    assert "skipped" in record.losses


def test_tensors_that_are_all_norm_leave_the_second_step_empty() -> None:
    adapter = adapt(nets.make(), "wise", ratio=1.0, policy="uniform", norm="all", lr=0.1, entropy="all")
    out = adapter.predict(nets.batch())
    adapter.learn(out, {query.id: 1 for query in out.queries})
    assert not torch.equal(adapter.classifier.live.tensors["fc.weight"], adapter.classifier.model.fc.weight)


@pytest.mark.parametrize(
    "options",
    [
        {"train_head": "half"},
        {"lambda_sup": -1},
        {"lambda_ent": -0.1},
        {"lr": -1e-3},
        {"entropy": "some"},
        {"block": "nowhere"},
        {"momentum": -0.5},
        {"lr": float("nan")},
        {"head_lr": -1.0},
        {"pull": 1.5},
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.WiseAttaError):
        adapt(nets.make(), "wise", **options)


def test_losses_are_recorded_detached() -> None:
    adapter = adapt(nets.make(), "wise", ratio=1.0, policy="uniform")
    out = adapter.predict(nets.batch())
    losses = adapter.learn(out, {query.id: 1 for query in out.queries}).losses
    assert set(losses) == {"ent", "sup"} and not any(loss.requires_grad for loss in losses.values())
