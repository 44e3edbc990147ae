"""Does eata hold back what mattered to the source model, and say so when it has no source data?"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from methods import small
from torch import Tensor
from torch.nn import functional

import wise_atta as wa

SOURCE = small.batches(3, seed=7)


def adapt(**options: Any) -> wa.Adapter:
    return wa.adapt(small.net(), "eata", **({"source": SOURCE, "lr": 0.01, "epsilon": 0.9} | options))


def plain_fisher(source: list[Tensor]) -> list[Tensor]:
    model = small.plain(small.net())
    parameters = small.norm_parameters(model)
    total = [torch.zeros_like(p) for p in parameters]
    for x in source:
        logits = model(x)
        loss = functional.cross_entropy(logits, logits.argmax(1))
        total = [t + g**2 for t, g in zip(total, torch.autograd.grad(loss, parameters), strict=True)]
    return [t / len(source) for t in total]


def test_steps_are_those_of_plain_autograd() -> None:
    adapter = adapt(fisher_weight=50.0)
    model, threshold, mean = small.plain(small.net()), 0.4 * math.log(small.CLASSES), None
    parameters, fisher = small.norm_parameters(model), plain_fisher(SOURCE)
    origin = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)
    for x in small.batches(3):
        logits = model(x)
        h, p = small.entropy(logits), logits.softmax(1).detach()
        keep = h < threshold
        if mean is not None:
            keep &= functional.cosine_similarity(mean[None], p) < 0.9
        mean = p[keep].mean(0) if mean is None else 0.9 * mean + 0.1 * p[keep].mean(0)
        loss = ((threshold - h[keep]).exp().detach() * h[keep]).mean()
        for f, now, then in zip(fisher, parameters, origin, strict=True):
            loss = loss + 50.0 * (f * (now - then) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    small.run(adapter, small.batches(3))
    small.assert_same_values(adapter, model)


def test_a_heavier_penalty_stays_nearer_to_the_source() -> None:
    moved = []
    for weight in (0.0, 1e4):
        adapter = adapt(fisher_weight=weight, lr=1e-4)
        small.run(adapter, small.batches(6))
        moved.append((adapter.classifier.live.flat - adapter.classifier.source_flat()).norm().item())
    assert moved[1] < 0.6 * moved[0]


@pytest.mark.parametrize("source", [None, SOURCE[0], wa.Batch(SOURCE[0]), []])
def test_missing_source_data_is_an_error_before_the_stream(source: Any) -> None:
    with pytest.raises(wa.errors.BadConfig, match="source data"):
        adapt(source=source)


def test_source_data_with_nan_is_refused() -> None:
    with pytest.raises(wa.errors.NotFinite, match="source data"):
        adapt(source=[SOURCE[0] * math.nan])


def test_source_data_may_be_a_stream_and_is_read_no_further_than_needed() -> None:
    def stream() -> Any:
        for x in SOURCE[:2]:
            yield wa.Batch(x)
        raise AssertionError("read too far")

    adapter = adapt(source=stream(), fisher_samples=30)
    fisher = adapter.state_dict()["update"]["objective"]["fisher"]
    expected = torch.cat([f.flatten() for f in plain_fisher([SOURCE[0], SOURCE[1][:6]])])
    torch.testing.assert_close(fisher, expected, rtol=1e-12, atol=0)
    assert adapter.classifier.work == wa.model.Work(forwards=2, gradient_forwards=2, backwards=2)


def test_no_step_where_eta_takes_none() -> None:
    adapter = wa.adapt(small.net(sharpness=0.01), "eata", source=SOURCE)
    ((_, step),) = small.run(adapter, small.batches(1))
    assert step.losses == {"skipped": 1}


def test_a_saved_run_goes_on_to_the_same_bits_whatever_source_data_the_new_one_had() -> None:
    sources = iter([SOURCE, SOURCE, SOURCE[:1]])
    small.assert_goes_on_after_saving(lambda: adapt(source=next(sources), fisher_weight=50.0), small.batches(6))


def test_reset_keeps_the_fisher_information() -> None:
    small.assert_reset_is_a_new_start(adapt(fisher_weight=50.0), small.batches(3))
