"""Do losses, labels and the optimizer do what an update relies on?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from core import nets
from core.checks import same
from torch import Tensor

from wise_atta import Classifier, errors
from wise_atta.how import Average, Entropy, Labels, Late, Optimizer, remember
from wise_atta.model import Forward

LOGITS = torch.tensor([[9.0, 0, 0], [0, 0, 0], [0, 7, 0], [0, 0, 8], [1, 1, 0]], dtype=torch.float64)


def forward_of(logits: Tensor) -> tuple[Classifier, Forward]:
    classifier = Classifier(nets.make())
    return classifier, Forward(logits, logits, logits, classifier.live)


def slow_entropy(row: Tensor) -> float:
    return -sum(p * math.log(p) for p in row.softmax(dim=0).tolist())


# -- the entropy ------------------------------------------------------------------------------------------------------


def test_entropy_over_all_is_the_mean_over_the_batch_labelled_samples_included() -> None:
    expected = sum(map(slow_entropy, LOGITS)) / 5
    for labels in (Labels(), Labels([0, 2], [1, 1])):
        loss = Entropy()(*forward_of(LOGITS), labels)
        assert loss is not None and loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("rows", "kept"), [([], [0, 2, 3]), ([2], [0, 3]), ([1, 4], [0, 2, 3])])
def test_filtered_entropy_leaves_out_unsure_and_labelled_samples(rows: list[int], kept: list[int]) -> None:
    loss = Entropy(below=0.4)(*forward_of(LOGITS), Labels(rows, [0] * len(rows)))
    expected = sum(slow_entropy(LOGITS[i]) for i in kept) / len(kept)
    assert loss is not None and loss.item() == pytest.approx(expected, rel=1e-12)


def test_filtered_entropy_of_nothing_is_no_loss() -> None:
    assert Entropy(below=0.4)(*forward_of(LOGITS[[1, 4]]), Labels()) is None
    assert Entropy(below=0.4)(*forward_of(LOGITS[[0, 2]]), Labels([0, 1], [0, 1])) is None


def test_the_entropy_of_a_certain_sample_has_a_finite_gradient() -> None:
    logits = torch.tensor([[1000.0, 0, 0]], requires_grad=True)
    loss = Entropy()(*forward_of(logits), Labels())
    assert loss is not None
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize("below", [0, -1.0])
def test_a_threshold_that_nothing_can_pass_is_refused(below: float) -> None:
    with pytest.raises(errors.BadConfig, match="below"):
        Entropy(below=below)


# -- labels -----------------------------------------------------------------------------------------------------------


def test_the_supervised_loss_is_the_weighted_sum_over_the_number_of_labels() -> None:
    labels = Labels([4, 0], [1, 0], [0.5, 2.0])
    rows = LOGITS[[4, 0]]
    expected = (0.5 * -rows[0].log_softmax(0)[1] + 2.0 * -rows[1].log_softmax(0)[0]) / 2
    assert labels.loss(rows).item() == pytest.approx(expected.item(), rel=1e-12)


def test_prompt_samples_come_first_and_late_ones_through_a_forward_of_their_own() -> None:
    classifier = Classifier(nets.make(), statistics="source")
    forward = classifier.forward(nets.batch(), grad=True)
    late = Late(nets.batch(number=7, n=1), 3, 0.5, "source")
    labels = Labels([2, 5], [1, 0], late=[late])
    assert (labels.labels, labels.weights, len(labels)) == ([1, 0, 3], [1.0, 1.0, 0.5], 3)
    logits, features = labels.outputs(classifier, forward)
    expected = classifier.forward(late.inputs)
    assert torch.equal(logits.detach(), torch.cat([forward.logits[[2, 5]].detach(), expected.logits]))
    assert torch.equal(features.detach(), torch.cat([forward.features[[2, 5]].detach(), expected.features]))
    assert logits.requires_grad


def test_the_mask_is_true_at_the_labelled_rows() -> None:
    _, forward = forward_of(LOGITS)
    assert Labels([1, 3], [0, 0]).mask(forward).tolist() == [False, True, False, True, False]
    assert not Labels().mask(forward).any()


# -- the optimizer ----------------------------------------------------------------------------------------------------


def gradients(
    classifier: Classifier, number: int, groups: tuple[str, ...] = ("norm", "head")
) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(number)
    shapes = classifier.layout.shapes
    return {
        group: [torch.randn(shapes[name], dtype=torch.float64, generator=generator) for name in names]
        for group, names in classifier.layout.groups.items()
        if group in groups
    }


def two_groups(dtype: torch.dtype = torch.float64) -> Classifier:
    return Classifier(nets.make(dtype=dtype), adapt={"norm": "norm", "head": "head"})


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_steps_equal_torch_optim_on_the_single_tensors(kind: Any) -> None:
    classifier = two_groups()
    optimizer = Optimizer(classifier, kind=kind, lr=0.1)
    names = list(classifier.layout.shapes)
    plain = [torch.nn.Parameter(dict(classifier.model.named_parameters())[name].detach().clone()) for name in names]
    theirs = (
        torch.optim.SGD(plain, lr=0.1, momentum=0.9, nesterov=True)
        if kind == "sgd"
        else torch.optim.Adam(plain, lr=0.1)
    )
    for number, groups in enumerate([("norm", "head"), ("norm",), ("head",), ("norm", "head")]):
        grads = gradients(classifier, number, groups)
        optimizer.step(grads)
        given = {n: g for group in grads for n, g in zip(classifier.layout.groups[group], grads[group], strict=True)}
        for name, tensor in zip(names, plain, strict=True):
            tensor.grad = given.get(name)
        theirs.step()
        for name, tensor in zip(names, plain, strict=True):
            torch.testing.assert_close(classifier.live.tensors[name].detach(), tensor.detach(), rtol=1e-12, atol=1e-12)


def test_a_version_that_was_published_never_changes() -> None:
    classifier = two_groups()
    optimizer = Optimizer(classifier, lr=0.1)
    versions, values = [], []
    for number in range(4):
        optimizer.step(gradients(classifier, number))
        versions.append(classifier.live)
        values.append(classifier.live.flat.clone())
    optimizer.reset()
    assert all(torch.equal(version.flat, value) for version, value in zip(versions, values, strict=True))
    assert len({id(version) for version in versions}) == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_taken_as_zero_for_its_group(bad: float) -> None:
    classifier = two_groups()
    optimizer = Optimizer(classifier, lr=0.1, momentum=0.0)
    before = classifier.live.flat.clone()
    grads = gradients(classifier, 0)
    grads["norm"][1][2] = bad
    optimizer.step(grads)
    norm, head = (classifier.layout.slices[group] for group in ("norm", "head"))
    assert torch.equal(classifier.live.flat[norm], before[norm])
    assert not torch.equal(classifier.live.flat[head], before[head])


def test_a_step_that_is_not_published_is_seen_by_nobody() -> None:
    classifier = two_groups()
    optimizer = Optimizer(classifier, lr=0.1)
    live = classifier.live
    optimizer.step(gradients(classifier, 0), publish=False)
    assert classifier.live is live
    optimizer.move(optimizer.flat * 2)
    assert classifier.live is not live


def test_gradients_of_a_step_that_failed_are_none_of_the_next_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = two_groups()
    optimizer = Optimizer(classifier, lr=0.1)
    before = classifier.live.flat

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Optimizer, "_sgd", fail)
        optimizer.step(gradients(classifier, 0, ("head",)))
    optimizer.step(gradients(classifier, 1, ("norm",)))
    norm, head = (classifier.layout.slices[group] for group in ("norm", "head"))
    assert torch.equal(classifier.live.flat[head], before[head])
    assert not torch.equal(classifier.live.flat[norm], before[norm])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_what_is_taken_back_are_the_steps_since_then_with_their_momenta_and_no_others(
    kind: Any, dtype: torch.dtype
) -> None:
    classifier = two_groups(dtype)
    optimizer = Optimizer(classifier, kind=kind, lr=1e-6)
    second = Optimizer(classifier, kind=kind, lr=1e-6, share=optimizer)
    for number in range(3):
        optimizer.step(gradients(classifier, number))
        second.step(gradients(classifier, number))
    live, values = classifier.live, optimizer.flat.clone()
    states = optimizer.state_dict(), second.state_dict()
    assert not torch.equal(values, classifier.source_flat().float())
    for publish in (False, True):
        undo = remember(optimizer, second)
        optimizer.step(gradients(classifier, 3), publish=False)
        second.step(gradients(classifier, 4), publish=publish)
        assert not torch.equal(optimizer.flat, values)
        undo()
        assert torch.equal(optimizer.flat, values) and classifier.live is live
        assert same((optimizer.state_dict(), second.state_dict()), states)


class Several:
    """Is made of parts in a list, a tuple and a dict, and of itself."""

    def __init__(self) -> None:
        self.averages = [Average(), Average()]
        self.more = {"pair": (Average(), self)}

    def state_dict(self) -> dict[str, Any]:
        return {"averages": [average.state_dict() for average in [*self.averages, self.more["pair"][0]]]}


def test_parts_in_lists_and_dicts_are_taken_back_too() -> None:
    several = Several()
    before, undo = several.state_dict(), remember(several)
    for average in (*several.averages, several.more["pair"][0]):
        average.follow(torch.ones(()))
    undo()
    assert same(several.state_dict(), before)


@dataclass(frozen=True)
class Fixed:
    """Lets nobody set or delete what it holds, but notes what it has worked out."""

    average: Average

    @cached_property
    def doubled(self) -> Tensor:
        assert self.average.value is not None
        return 2 * self.average.value

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()


def test_what_a_part_that_cannot_be_changed_has_worked_out_is_taken_back_too() -> None:
    fixed = Fixed(Average())
    undo = remember(fixed)
    fixed.average.follow(torch.ones(()))
    assert fixed.doubled == 2
    undo()
    fixed.average.follow(torch.zeros(()))
    assert fixed.doubled == 0


def test_a_part_may_be_added_to_while_what_it_holds_is_noted() -> None:
    part: Any = Average()

    class Meanwhile(type):
        def __getattr__(cls, name: str) -> Any:
            part.added = "as by another thread, while this class is asked what it has"
            raise AttributeError(name)

    part.asked, part.below = Meanwhile("Asked", (), {})(), Average()
    undo = remember(part)
    part.below.follow(torch.ones(()))
    undo()
    assert part.below.value is None


@pytest.mark.parametrize("options", [{}, {"momentum": 0.0}, {"nesterov": False}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_its_rules_are_those_of_torch_optim_to_the_bit(kind: Any, options: dict[str, Any]) -> None:
    classifier = two_groups(torch.float32)
    optimizer = Optimizer(classifier, kind=kind, lr=0.01, **options)
    slices = classifier.layout.slices
    plain = {group: torch.nn.Parameter(classifier.source_flat()[where]) for group, where in slices.items()}
    decay, momentum = options.get("weight_decay", 0.0), options.get("momentum", 0.9)
    theirs = (
        torch.optim.SGD(
            plain.values(),
            lr=0.01,
            momentum=momentum,
            nesterov=options.get("nesterov", momentum > 0),
            weight_decay=decay,
        )
        if kind == "sgd"
        else torch.optim.Adam(plain.values(), lr=0.01, weight_decay=decay)
    )
    for number, groups in enumerate([("norm", "head"), ("norm",), ("head",), ("norm", "head")]):
        generator = torch.Generator().manual_seed(number)
        given = {group: torch.randn(plain[group].shape, generator=generator) for group in groups}
        optimizer.step(given)
        for group, part in plain.items():
            part.grad = None if group not in given else given[group].clone()
        theirs.step()
        for group, part in plain.items():
            assert same(optimizer.flat[slices[group]], part.detach())
    assert same(optimizer.state_dict()["optimizer"], theirs.state_dict()["state"]), "as older states have it"


def test_reset_forgets_momentum_and_returns_to_the_source() -> None:
    classifier = two_groups()
    optimizer = Optimizer(classifier, lr=0.1)
    start = optimizer.state_dict()
    for number in range(3):
        optimizer.step(gradients(classifier, number))
    after = classifier.live.flat
    optimizer.reset()
    assert same(optimizer.state_dict(), start)
    for number in range(3):
        optimizer.step(gradients(classifier, number))
    assert torch.equal(classifier.live.flat, after)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_state_resumes_to_the_bit_and_is_not_written_to(kind: Any) -> None:
    classifier, other = two_groups(), two_groups()
    optimizer, resumed = Optimizer(classifier, kind=kind, lr=0.1), Optimizer(other, kind=kind, lr=0.1)
    for number in range(3):
        optimizer.step(gradients(classifier, number))
    state, copy = optimizer.state_dict(), optimizer.state_dict()
    resumed.load_state_dict(state)
    for number in range(3, 6):
        optimizer.step(gradients(classifier, number))
        resumed.step(gradients(other, number))
    assert torch.equal(classifier.live.flat, other.live.flat)
    assert same(state, copy)


def test_a_state_of_other_tensors_is_refused() -> None:
    optimizer, other = Optimizer(two_groups()), Optimizer(Classifier(nets.make()))
    before = optimizer.state_dict()
    with pytest.raises(errors.StateMismatch, match="values"):
        optimizer.load_state_dict(other.state_dict())
    assert same(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"lr": math.nan}, {"lr": math.inf}, {"momentum": 1.0}, {"momentum": -0.1}, {"kind": "adamw"}],
)
def test_an_optimizer_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.BadConfig):
        Optimizer(two_groups(), **options)
