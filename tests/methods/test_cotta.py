"""Does cotta's student follow its teacher, score the teacher's word, and return a little to the source?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from methods import small
from torch import Tensor

import wise_atta as wa


def darker(x: Tensor, generator: torch.Generator) -> Tensor:
    return x * (0.5 + 0.5 * torch.rand((), generator=generator, dtype=torch.float64))


def every_third(shapes: Mapping[str, torch.Size], generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.arange(shape.numel()).view(shape) % 3 / 3 for name, shape in shapes.items()}


class Darkening:
    """The views of a batch, one darker than the other: the same ones whenever they are made."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        self.calls += 1
        return x * (1 - 0.1 * ((self.calls - 1) % 4))


def adapt(**options: Any) -> wa.Adapter:
    return wa.adapt(small.net(), "cotta", **({"lr": 0.01, "views": 4, "augment": Darkening()} | options))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_steps_and_scores_are_those_of_plain_autograd(threshold: float, symmetric: bool) -> None:
    adapter = adapt(threshold=threshold, symmetric=symmetric, draws=every_third, teacher_momentum=0.9)
    student, teacher, source = (small.plain(small.net()) for _ in range(3))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    draws = every_third({name: p.shape for name, p in student.named_parameters()}, torch.Generator())
    expected = []
    for x in small.batches(3):
        with torch.no_grad():
            view = Darkening()
            target = teacher(x) if threshold == 0 else sum(teacher(view(x)) for _ in range(4)) / 4
        expected.append(target)
        one, two = target.log_softmax(1), student(x).log_softmax(1)
        loss = -(one.exp() * two).sum(1).mean()
        if symmetric:
            loss = 0.5 * loss - 0.5 * (two.exp() * one).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for (name, s), t, o in zip(
                student.named_parameters(), teacher.parameters(), source.parameters(), strict=True
            ):
                t.copy_(0.9 * t + 0.1 * s)
                s[draws[name] < 0.001] = o[draws[name] < 0.001]
    for (logits, _), other in zip(small.run(adapter, small.batches(3)), expected, strict=True):
        torch.testing.assert_close(logits, other, rtol=0, atol=1e-11)
    small.assert_same_values(adapter, student)
    for name, tensor in adapter.anchor.version.tensors.items():
        torch.testing.assert_close(tensor, dict(teacher.named_parameters())[name].detach(), rtol=0, atol=1e-12)


def test_all_weights_adapt() -> None:
    assert [*adapt().classifier.layout.shapes] == [name for name, _ in small.net().named_parameters()]


def test_views_are_made_only_where_the_source_model_is_unsure() -> None:
    x = small.batches(1)[0]
    confidence = small.plain(small.net())(x).softmax(1).amax(1).mean().item()
    for threshold, forwards in [(confidence - 1e-6, 3), (confidence + 1e-6, 2 + 32)]:
        ((_, step),) = small.run(adapt(views=32, threshold=threshold), [x])
        assert step.work == wa.model.Work(forwards=forwards, gradient_forwards=1, backwards=1)


def test_plain_inference_scores_the_target_and_changes_nothing() -> None:
    adapter, stream = adapt(threshold=1.0, augment=darker), small.batches(2)
    small.run(adapter, stream[:1])
    before = str(adapter.state_dict())
    out = adapter.predict(stream[1], ask=False, learn=False)
    assert str(adapter.state_dict()) == before
    assert torch.equal(out.logits, adapter.predict(stream[1]).logits)


def test_the_exported_model_is_the_teacher() -> None:
    adapter, stream = adapt(threshold=0.0), small.batches(3)
    small.run(adapter, stream[:2])
    torch.testing.assert_close(adapter.export()(stream[2]), adapter.predict(stream[2]).logits)


def test_restoring_everything_brings_the_student_home_but_not_the_teacher() -> None:
    adapter = adapt(restore=1.0)
    small.run(adapter, small.batches(2))
    source = adapter.classifier.source_flat()
    assert torch.equal(adapter.classifier.live.flat, source)
    assert not torch.equal(adapter.anchor.version.flat, source)


def test_about_the_asked_share_of_values_returns() -> None:
    adapter = adapt(restore=0.3)
    small.run(adapter, small.batches(1))
    live, source = adapter.classifier.live.tensors, adapter.classifier.source().tensors
    same = torch.cat([(live[name] == source[name]).flatten() for name in live])
    assert 0.25 < same.double().mean() < 0.35


def test_an_older_prediction_is_learned_with_its_target_made_again() -> None:
    adapter, stream = adapt(threshold=1.0), small.batches(2)
    first, second = adapter.predict(stream[0]), adapter.predict(stream[1])
    assert adapter.learn(second).work.forwards == 1 + 1 + 4
    # The graph of the older one was dropped: its student forward, source forward and views are run once more.
    assert adapter.learn(first).work.forwards == 2 * (1 + 1 + 4)


def test_the_seed_decides_views_and_restoring() -> None:
    def values(seed: int) -> Tensor:
        adapter = wa.adapt(small.net(), "cotta", views=2, threshold=1.0, restore=0.1, seed=seed)
        small.run(adapter, small.batches(2))
        return adapter.classifier.live.flat

    assert torch.equal(values(0), values(0))
    assert not torch.equal(values(0), values(1))


def test_a_student_without_a_teacher_is_refused() -> None:
    update = wa.methods.cotta().update
    with pytest.raises(wa.errors.BadConfig, match="teacher"):
        wa.Adapter(wa.Classifier(small.net(), adapt=update.adapts), update)


def test_a_saved_run_goes_on_to_the_same_bits() -> None:
    def make() -> wa.Adapter:
        return wa.adapt(small.net(), "cotta", views=2, threshold=1.0, restore=0.1, preset="cifar10-c")

    small.assert_goes_on_after_saving(make, small.batches(4))


def test_reset_brings_the_teacher_back() -> None:
    small.assert_reset_is_a_new_start(adapt(augment=darker, threshold=1.0), small.batches(2))
