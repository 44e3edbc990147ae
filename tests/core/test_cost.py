"""What does a batch cost? Forwards and backwards, counted in kernels below the level of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core import nets
from core.count import Kernels
from torch import Tensor, nn

from wise_atta import Adapter, adapt
from wise_atta.model import Classifier, Forward, Version, Work

N = 8
GRAD, PLAIN, LATE = (True, N), (False, N), (True, 1)
# A forward that follows one of the same inputs: of the net's two convolutions the first is known from there.
BESIDE = 0.5


def wise(**options: Any) -> Adapter:
    given = {"policy": "uniform", "ratio": 0.5, "entropy": "all", "statistics": "batch"}
    return adapt(nets.make(), "wise", **(given | options))


def play(adapter: Adapter, number: int, answer: bool = True) -> tuple[Kernels, Work]:
    """One predict and one learn, with prompt answers or none."""
    with Kernels() as kernels:
        out = adapter.predict(nets.batch(number=number))
        step = adapter.learn(out, {query.id: nets.truth(query) for query in out.queries} if answer else {})
    return kernels, step.work


def test_the_counter_sees_what_a_plain_training_step_costs() -> None:
    net = nets.make()
    with Kernels() as kernels:
        with torch.no_grad():
            net(nets.batch())
        net(nets.batch()).sum().backward()
    assert kernels.forwards() == {GRAD: 1, PLAIN: 1}
    assert kernels.backwards["convolution_backward"] == 2


@pytest.mark.parametrize("statistics", ["batch", "source", "mixed", "ema"])
def test_an_unselected_batch_costs_one_forward_with_gradients_and_a_selected_one_one_more_without(
    statistics: str,
) -> None:
    adapter = wise(statistics=statistics)
    play(adapter, 1)
    selected, work = play(adapter, 2)
    assert selected.forwards() == {GRAD: 1, PLAIN: BESIDE}
    assert work == Work(forwards=2, gradient_forwards=1, backwards=1)
    unselected, work = play(adapter, 3)
    assert unselected.forwards() == {GRAD: 1}
    assert work == Work(forwards=1, gradient_forwards=1, backwards=1)
    # The input of the first convolution needs no gradient and its weight does not adapt: one backward of the second.
    assert selected.backwards["convolution_backward"] == unselected.backwards["convolution_backward"] == 1


def test_the_very_first_batch_costs_no_more_than_the_others() -> None:
    kernels, _ = play(wise(), 1)
    assert kernels.forwards() == {GRAD: 1}


def test_the_head_is_learned_from_the_features_of_the_same_forward() -> None:
    adapter = wise(ratio=1.0)
    play(adapter, 1)
    kernels, _ = play(adapter, 2)
    heads = {key[1:]: n for key, n in kernels.calls.items() if key[0] == "addmm"}
    assert heads == {GRAD: 1, PLAIN: 1, LATE: 1}, "the forward, the anchor's, and the labelled row once more"


@pytest.mark.parametrize(("selector", "anchor"), [("drift", BESIDE), ("max-entropy", 0), ("margin", 0), ("random", 0)])
def test_only_a_selector_that_looks_at_the_anchor_pays_for_it(selector: str, anchor: float) -> None:
    kernels, _ = play(wise(ratio=1.0, selector=selector), 1)
    assert kernels.forwards().get(PLAIN, 0) == anchor


@pytest.mark.parametrize("utility", ["mean-drift", "topk-drift"])
def test_a_drift_utility_runs_the_anchor_on_every_batch_and_once_only(utility: str) -> None:
    adapter = wise(utility=utility)
    for number in range(1, 5):
        kernels, _ = play(adapter, number)
        assert kernels.forwards() == {GRAD: 1, PLAIN: BESIDE}


def test_in_light_mode_an_unselected_batch_costs_one_forward_without_gradients_and_nothing_else() -> None:
    adapter = wise(only_selected=True)
    unselected, work = play(adapter, 1)
    assert unselected.forwards() == {PLAIN: 1} and not unselected.backwards
    assert work == Work(forwards=1)
    selected, work = play(adapter, 2)
    assert selected.forwards() == {PLAIN: 2, GRAD: 1}, "the prediction, the anchor, and the forward that learns"
    assert work == Work(forwards=3, gradient_forwards=1, backwards=1)


def test_a_late_label_costs_one_forward_of_one_sample_in_learn_and_none_in_predict() -> None:
    adapter = wise(ratio=1.0, policy="uniform")
    first = adapter.predict(nets.batch(number=1))
    adapter.learn(first)
    with Kernels() as predicting:
        second = adapter.predict(nets.batch(number=2))
    with Kernels() as learning:
        step = adapter.learn(second, {query.id: 1 for query in first.queries})
    assert predicting.forwards() == {GRAD: 1, PLAIN: BESIDE}
    assert learning.forwards() == {LATE: 1}
    assert step.late == 1 and step.work == Work(forwards=3, gradient_forwards=2, backwards=1)


@pytest.mark.parametrize("method", ["source", "bn"])
def test_a_method_that_does_not_learn_costs_one_forward_without_gradients(method: str) -> None:
    kernels, work = play(adapt(nets.make(), method), 1)
    assert kernels.forwards() == {PLAIN: 1} and not kernels.backwards
    assert work == Work(forwards=1)


def test_tent_costs_one_forward_and_one_backward() -> None:
    kernels, work = play(adapt(nets.make(), "tent"), 1)
    assert kernels.forwards() == {GRAD: 1} and kernels.backwards["convolution_backward"] == 1
    assert work == Work(forwards=1, gradient_forwards=1, backwards=1)


def test_plain_inference_costs_one_forward_without_gradients_and_keeps_nothing() -> None:
    adapter = wise(ratio=1.0)
    with Kernels() as kernels:
        out = adapter.predict(nets.batch(), ask=False, learn=False)
    assert kernels.forwards() == {PLAIN: 1}
    assert out._unlearned is None


def test_a_shadow_costs_the_source_s_forward_on_top() -> None:
    kernels, _ = play(wise(shadow=True), 1)
    assert kernels.forwards() == {GRAD: 1, PLAIN: 1}


def test_learning_an_older_prediction_repeats_its_forward_and_counts_it() -> None:
    adapter = wise(ratio=0.1)
    older = adapter.predict(nets.batch(number=1))
    adapter.predict(nets.batch(number=2))
    with Kernels() as kernels:
        step = adapter.learn(older)
    assert kernels.forwards() == {GRAD: 1}
    assert step.work == Work(forwards=2, gradient_forwards=2, backwards=1)


def test_supervising_a_block_costs_a_second_forward_and_backward_on_a_selected_batch() -> None:
    adapter = wise(ratio=1.0, block="block")
    kernels, work = play(adapter, 1)
    assert kernels.forwards() == {GRAD: 1 + BESIDE, PLAIN: BESIDE}
    assert work == Work(forwards=3, gradient_forwards=2, backwards=2)


def test_the_published_update_costs_a_second_forward_on_a_selected_batch() -> None:
    adapter = wise(policy="paced", preset="authors", ratio=1.0, length=100, selector="max-entropy")
    kernels, work = play(adapter, 1)
    assert kernels.forwards() == {GRAD: 1 + BESIDE}
    assert work == Work(forwards=2, gradient_forwards=2, backwards=2)


class Early(nn.Module):
    """A net that does something to its first layer's output, or calls it in its own way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "input written over":
            x *= self.norm.weight.mean()
        if self.how == "by keyword":
            x = self.conv(input=x)
        elif self.how == "twice":
            once, x = self.conv(x), self.conv(x)
            x = x + once.sub_(0.3)
        else:
            x = self.conv(x * 2 if self.how == "another input" else x)
        if self.how == "written over":
            x.add_(1)
        if self.how == "written over without gradients":
            x = x.sub(0.3) if torch.is_grad_enabled() else x.sub_(0.3)
        return self.head(self.norm(self.second(x)).relu().mean(dim=(2, 3)))


def beside(how: str, adapt_too: tuple[str, ...] = ()) -> tuple[Classifier, Tensor, Forward, Version]:
    """A forward with its graph, and other values for a second one."""
    model = Classifier(Early(how).eval(), adapt=["norm", *adapt_too], mean=[0.5], std=[0.25])
    model.repeats = True
    inputs = torch.rand(4, 3, 8, 8)
    live = model.forward(inputs, grad=True)
    return model, inputs, live, Version(live.version.flat + 0.5, model.layout)


@pytest.mark.parametrize(
    ("how", "adapt_too", "shared"),
    [
        ("plain", (), True),
        ("written over", (), False),
        ("written over without gradients", (), True),
        ("input written over", (), False),
        ("another input", (), False),
        ("by keyword", (), False),
        ("twice", (), False),
        ("plain", ("conv.bias",), False),
    ],
)
def test_what_the_first_layer_gave_is_taken_over_where_it_is_the_same(
    how: str, adapt_too: tuple[str, ...], shared: bool
) -> None:
    model, inputs, live, moved = beside(how, adapt_too)
    whole = 1.5 if how == "twice" else 1
    with Kernels() as kernels:
        found = [model.forward(inputs, version=moved, beside=live) for _ in range(3)]
    with Kernels() as alone:
        plain = model.forward(inputs, version=moved)
    assert alone.forwards() == {(False, 4): whole}
    # Where it is written over when it serves for the first time, the others do without it.
    least = 0.5 + 1 + 1 if how == "written over without gradients" else 3 * 0.5 if shared else 3 * whole
    assert kernels.forwards() == {(False, 4): least}
    assert all(torch.equal(each.logits, plain.logits) for each in found) and not torch.equal(plain.logits, live.logits)
    with Kernels() as others:
        model.forward(inputs.clone(), version=moved, beside=live)
    assert others.forwards() == {(False, 4): whole}, "other inputs, though they are equal"
    live.logits.sum().backward()


def test_gradients_beside_another_forward_are_those_of_a_fresh_one() -> None:
    model, inputs, live, moved = beside("plain")
    found = []
    for given in (live, live, None):
        again = model.forward(inputs, version=moved, grad=True, beside=given)
        found.append(model.gradients(again.logits.square().sum(), moved, ["adapted"])["adapted"])
    for one, two, fresh in zip(*found, strict=True):
        assert torch.equal(one, fresh) and torch.equal(two, fresh) and fresh.abs().sum() > 0


def test_what_was_computed_under_autocast_serves_under_autocast_alone() -> None:
    model, inputs, _, moved = beside("plain")
    with torch.autocast("cpu", torch.bfloat16):
        live = model.forward(inputs, grad=True)
        with Kernels() as kernels:
            model.forward(inputs, version=moved, beside=live)
    with Kernels() as outside:
        found = model.forward(inputs, version=moved, beside=live)
    assert kernels.forwards() == {(False, 4): 0.5} and outside.forwards() == {(False, 4): 1}
    assert torch.equal(found.logits, model.forward(inputs, version=moved).logits)


@pytest.mark.parametrize(("repeats", "grad"), [(False, True), (True, False)])
def test_a_forward_that_no_other_follows_keeps_nothing_of_its_first_layer(repeats: bool, grad: bool) -> None:
    model = Classifier(Early("plain").eval())
    model.repeats = repeats
    assert model.forward(torch.rand(4, 3, 8, 8), grad=grad).first is None


@pytest.mark.parametrize(("method", "repeats"), [("tent", False), ("bn", False), ("sar", True), ("wise", True)])
def test_methods_say_whether_they_run_the_same_inputs_again(method: str, repeats: bool) -> None:
    assert adapt(nets.make(), method).classifier.repeats is repeats
