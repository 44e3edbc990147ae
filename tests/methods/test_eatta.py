"""Does eatta balance its label against entropy, and ask where the prediction trembles?"""

from __future__ import annotations

import math

import pytest
import torch
from methods import active, small
from torch.nn import functional

import wise_atta as wa
from wise_atta import rng
from wise_atta.how import balance

THRESHOLD = 0.4 * math.log(small.CLASSES)


def test_steps_are_those_of_plain_autograd() -> None:
    adapter = active.adapt("eatta", lr=0.01)
    done = active.steps(adapter, stream := small.batches(5))
    model, weights = small.plain(small.net()), None
    parameters = small.norm_parameters(model)
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)
    for x, (out, _) in zip(stream, done, strict=True):
        (row,), logits = active.rows(out), model(x)
        h = small.entropy(logits)
        keep = (h < THRESHOLD) & (torch.arange(len(x)) != row)
        ent, ce = h[keep].mean(), functional.cross_entropy(logits[[row]], active.labels(out))
        norms = [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)]).norm()
            for loss in (ent, ce)
        ]
        new = torch.stack([2 * norms[1], 2 * norms[0]]) / sum(norms)
        weights = new if weights is None else 0.8 * weights + 0.2 * new
        optimizer.zero_grad()
        (weights[0] * ent + weights[1] * ce).backward()
        optimizer.step()
    assert weights is not None and 0.05 < (weights[0] / weights[1]).item() != 1
    small.assert_same_values(adapter, model)


def test_it_asks_for_the_sample_whose_confidence_moves_most_under_noise() -> None:
    x, model = small.batches(1)[0], small.plain(small.net())
    out = active.adapt("eatta", seed=3).predict(x)
    captured = []
    model.fc.register_forward_pre_hook(lambda module, args: captured.append(args[0]))
    logits = model(x)
    noise = torch.randn(captured[0].shape, generator=rng.torch_cpu(3, "perturbation", 1), dtype=torch.float64)
    best = logits.argmax(1, keepdim=True)
    moved = model.fc(captured[0] + 0.01 * noise).softmax(1).gather(1, best) - logits.softmax(1).gather(1, best)
    assert active.rows(out) == [int(moved.abs().argmax())]


def test_a_batch_without_a_label_steps_on_entropy_by_the_weight_that_stands() -> None:
    adapter = active.adapt("eatta", lr=0.01, momentum=0.0, ratio=0.5, selector="random")
    before, after = small.batches(2)
    (unasked, _), (asked, _) = active.steps(adapter, [before, after])
    assert not unasked.queries and asked.queries
    weight = adapter.update.weights.value[0].item()
    assert weight != 1
    flat = adapter.classifier.live.flat.clone()
    forward = adapter.classifier.forward(before, grad=True)
    loss = adapter.update.objective(adapter.classifier, forward, wa.how.Labels())
    (gradients,) = adapter.classifier.gradients(loss, forward.version, ["adapted"]).values()
    adapter.learn(adapter.predict(before, ask=False))
    moved = adapter.classifier.layout.views(flat - adapter.classifier.live.flat)
    for found, gradient in zip(moved.values(), gradients, strict=True):
        torch.testing.assert_close(found, 0.01 * weight * gradient, rtol=1e-9, atol=1e-12)


def test_a_label_in_a_batch_without_a_sure_sample_is_learned_alone() -> None:
    adapter = active.adapt("eatta", below=1e-9)
    ((_, step),) = active.steps(adapter, small.batches(1))
    assert set(step.losses) == {"sup"} and adapter.update.weights.value is None
    assert not torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


@pytest.mark.parametrize("options", [{}, {"channels_last": True}])
def test_labels_of_the_only_sure_samples_are_learned_alone(options: dict[str, bool]) -> None:
    adapter = active.adapt("eatta", below=2.0, labels=2, ratio=2, **options)
    ((_, step),) = active.steps(adapter, small.batches(1, n=2))
    assert set(step.losses) == {"sup"} and adapter.update.weights.value is None
    assert not torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


def test_nothing_sure_and_nothing_asked_is_no_step_and_counted() -> None:
    adapter = active.adapt("eatta", below=1e-9, policy="never")
    done = active.steps(adapter, small.batches(2))
    assert sum(float(step.losses["skipped"]) for _, step in done) == 2
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


def test_a_batch_costs_one_forward_and_a_backward_for_each_loss() -> None:
    done = active.steps(active.adapt("eatta", ratio=0.5), small.batches(2))
    assert [step.work for _, step in done] == [wa.model.Work(1, 1, 1), wa.model.Work(1, 1, 2)]


@pytest.mark.parametrize(("policy", "spent"), [("uniform", 6), ("always", 24), ("never", 0)])
def test_three_labels_a_batch_become_three_when_allowed(policy: str, spent: int) -> None:
    adapter = active.adapt("eatta", policy=policy, labels=3, **({"ratio": 0.75} if policy == "uniform" else {}))
    done = active.steps(adapter, small.batches(8))
    assert adapter.policy.spent == adapter.counts.learned == spent
    assert {len(out.queries) for out, _ in done} <= {0, 3}


def test_it_resumes_to_the_same_bits() -> None:
    active.assert_resumes(lambda: active.adapt("eatta", lr=0.01, ratio=0.7, policy="paced"))


def test_more_labels_than_a_batch_holds_are_refused_before_anything_is_learned() -> None:
    adapter = active.adapt("eatta", labels=25, ratio=25)
    with pytest.raises(wa.errors.BadConfig, match="labels=25 a batch, but the first batch has 24 samples"):
        adapter.predict(small.batches(1)[0])
    assert adapter.number == adapter.policy.spent == 0


def test_presets_hold_the_published_rates() -> None:
    rates = {name: wa.methods.eatta(preset=f"imagenet-{name}").update.lr for name in "crka"}
    assert rates == {"c": 2.5e-4, "r": 1e-3, "k": 1e-3, "a": 5e-3}
    assert wa.methods.eatta(preset="cifar10-c").update.kind == "adam"


def test_losses_without_any_gradient_leave_both_weights_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = active.adapt("eatta", below=9.0)
    monkeypatch.setattr(balance, "_norm", lambda gradients: torch.zeros((), dtype=torch.float64))
    active.steps(adapter, small.batches(2))
    assert adapter.counts.learned > 0 and adapter.update.weights.value.tolist() == [1.0, 1.0]
