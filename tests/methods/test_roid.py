"""Does roid weigh, agree with its view, stay near the source, and score corrected logits?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from methods import small
from torch import Tensor, nn

import wise_atta as wa


def mirrored(x: Tensor, generator: torch.Generator) -> Tensor:
    return x.flip(-1) * 0.9


def adapt(**options: Any) -> wa.Adapter:
    return wa.adapt(small.net(), "roid", **({"lr": 0.01, "augment": mirrored} | options))


def corrected(logits: Tensor) -> Tensor:
    n, classes = logits.shape
    prior = logits.softmax(1).mean(0)
    gamma = max(1 / n, 1 / classes) / prior.max()
    return logits * (prior + gamma) / (1 + gamma * classes)


def test_steps_and_scores_are_those_of_plain_autograd() -> None:
    adapter = adapt()
    model = small.plain(small.net())
    parameters = small.norm_parameters(model)
    origin = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)
    mean = torch.full((small.CLASSES,), 1 / small.CLASSES, dtype=torch.float64)
    expected = []
    for x in small.batches(3):
        z = model(x)
        expected.append(corrected(z.detach()))
        p = z.softmax(1)
        with torch.no_grad():
            d = torch.stack([1 - (mean @ row) / (mean.norm() * row.norm()) for row in p])
            d = (d - d.min()) / (d.max() - d.min())
            c = -small.entropy(z)
            c = (c - c.min()) / (c.max() - c.min())
            w = torch.exp(d * c * 3)
            keep = ~(d < d.mean())
            mean = 0.9 * mean + 0.1 * p.mean(0)
        view = model(mirrored(x[keep], torch.Generator()))
        loss = torch.zeros((), dtype=torch.float64)
        for weight, logits, other in zip(w[keep], z[keep], view, strict=True):
            clipped = logits.softmax(0).clamp(max=0.99)
            loss = loss - weight * (clipped * torch.log(clipped / (1 - clipped) + 1e-5)).sum()
            one, two = logits.log_softmax(0), other.log_softmax(0)
            loss = loss - weight * 0.5 * ((one.exp() * two).sum() + (two.exp() * one).sum())
        optimizer.zero_grad()
        (loss / len(x)).backward()
        optimizer.step()
        with torch.no_grad():
            for now, then in zip(parameters, origin, strict=True):
                now.copy_(0.99 * now + 0.01 * then)
    done = small.run(adapter, small.batches(3))
    for (logits, _), other in zip(done, expected, strict=True):
        torch.testing.assert_close(logits, other, rtol=0, atol=1e-10)
    small.assert_same_values(adapter, model)


def test_a_batch_costs_two_forwards_and_one_backward() -> None:
    ((_, step),) = small.run(adapt(), small.batches(1))
    assert step.work == wa.model.Work(forwards=2, gradient_forwards=2, backwards=1)
    ((_, step),) = small.run(adapt(consistency=False), small.batches(1))
    assert step.work == wa.model.Work(forwards=1, gradient_forwards=1, backwards=1)


def test_plain_inference_is_corrected_too_and_changes_nothing() -> None:
    adapter, stream = adapt(), small.batches(2)
    small.run(adapter, stream[:1])
    before = adapter.state_dict()
    out = adapter.predict(stream[1], ask=False, learn=False)
    assert torch.equal(out.logits, adapter.predict(stream[1]).logits)
    torch.testing.assert_close(out.logits, corrected(adapter.classifier.forward(stream[1]).logits))
    assert str(before["update"]) == str(adapter.state_dict()["update"])


def test_without_correction_the_scored_logits_are_the_models_own() -> None:
    x = small.batches(1)[0]
    torch.testing.assert_close(adapt(correct_prior=False).predict(x).logits, small.plain(small.net())(x).detach())


def test_a_full_pull_stays_at_the_source() -> None:
    adapter = adapt(pull=1.0)
    small.run(adapter, small.batches(2))
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


@pytest.mark.parametrize("n", [2, 3])
def test_a_batch_of_equal_pictures_gives_no_nan(n: int) -> None:
    adapter = adapt()
    ((logits, step),) = small.run(adapter, [small.batches(1)[0][:1].expand(n, -1, -1, -1)])
    assert logits.isfinite().all() and step.losses["loss"].isfinite()
    assert adapter.classifier.live.flat.isfinite().all()


def test_a_single_kept_sample_is_normalised_by_the_batch_it_comes_from() -> None:
    table = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    adapter = wa.adapt(table, "roid", augment=lambda x, generator: x + 0.1)
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ((_, step),) = small.run(adapter, [x])
    assert step.losses["loss"].isfinite() and step.work.forwards == 2


def test_a_view_depends_on_the_seed_and_the_batch_number_alone() -> None:
    def drawn(stream: list[Tensor], seed: int) -> list[float]:
        found = []

        def note(x: Tensor, generator: torch.Generator) -> Tensor:
            found.append(torch.rand((), generator=generator).item())
            return x

        small.run(adapt(augment=note, seed=seed), stream)
        return found

    one = drawn(small.batches(3), seed=0)
    assert len(set(one)) == 3
    assert one == drawn(small.batches(3, n=8, seed=5), seed=0) != drawn(small.batches(3), seed=1)


def test_inputs_that_are_no_pictures_need_a_view_of_their_own_and_leave_no_trace() -> None:
    table = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    adapter = wa.adapt(table, "roid")
    out = adapter.predict(torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    before = str(adapter.state_dict())
    with pytest.raises(wa.errors.BadInput, match="give a function"):
        adapter.learn(out)
    assert str(adapter.state_dict()) == before


def test_a_saved_run_goes_on_to_the_same_bits() -> None:
    small.assert_goes_on_after_saving(lambda: wa.adapt(small.net(), "roid", lr=0.01), small.batches(6))


def test_reset_forgets_the_mean_prediction() -> None:
    small.assert_reset_is_a_new_start(wa.adapt(small.net(), "roid", lr=0.01), small.batches(3))


def test_wise_without_anybody_to_ask_can_be_roid_to_the_bit() -> None:
    base: dict[str, Any] = {"objective": "roid", "lambda_ent": 1.0, "pull": 0.01, "correct_prior": True}
    wise = wa.adapt(small.net(), "wise", policy="never", lr=0.01, statistics="batch", **base)
    roid = wa.adapt(small.net(), "roid", lr=0.01)
    ours, theirs = (small.run(adapter, small.batches(4)) for adapter in (wise, roid))
    for (logits, _), (others, _) in zip(ours, theirs, strict=True):
        assert torch.equal(logits, others)
    tensors = roid.classifier.live.tensors
    assert tensors and all(torch.equal(wise.classifier.live.tensors[name], tensor) for name, tensor in tensors.items())
    assert wise.policy.spent == 0
