"""Does eta learn from reliable, new samples, and from nothing else?"""

from __future__ import annotations

import math

import torch
from methods import small
from torch.nn import functional

import wise_atta as wa


def test_steps_are_those_of_plain_autograd() -> None:
    source = small.net()
    adapter = wa.adapt(source, "eta", lr=0.01, epsilon=0.5)
    model, stream, mean = small.plain(source), small.batches(4), None
    optimizer = torch.optim.SGD(small.norm_parameters(model), lr=0.01, momentum=0.9, nesterov=True)
    threshold = 0.4 * math.log(small.CLASSES)
    redundant = 0
    for x in stream:
        logits = model(x)
        h, p = small.entropy(logits), logits.softmax(1).detach()
        keep = h < threshold
        if mean is not None:
            new = functional.cosine_similarity(mean[None], p).abs() < 0.5
            redundant += int((keep & ~new).sum())
            keep &= new
        mean = p[keep].mean(0) if mean is None else 0.9 * mean + 0.1 * p[keep].mean(0)
        optimizer.zero_grad()
        ((threshold - h[keep]).exp().detach() * h[keep]).mean().backward()
        optimizer.step()
    small.run(adapter, stream)
    assert redundant > 0, "the second filter must matter here"
    small.assert_same_values(adapter, model)


def test_a_batch_of_unsure_samples_is_skipped_and_counted() -> None:
    adapter = wa.adapt(small.net(sharpness=0.01), "eta")
    ((logits, step),) = small.run(adapter, small.batches(1))
    assert logits.isfinite().all()
    assert step.losses == {"skipped": 1} and step.work.backwards == 0
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())
    assert adapter.state_dict()["update"]["objective"]["mean"]["value"] is None


def test_what_was_seen_before_is_redundant() -> None:
    x = small.batches(1)[0]
    adapter = wa.adapt(small.net(), "eta", lr=0.0, epsilon=1e-6)
    first, again = (step for _, step in small.run(adapter, [x, x]))
    assert "loss" in first.losses and "skipped" in again.losses


def test_a_skipped_batch_leaves_the_mean_prediction_alone() -> None:
    x = small.batches(1)[0]
    adapter = wa.adapt(small.net(), "eta", epsilon=1e-6)
    small.run(adapter, [x])
    before = adapter.state_dict()["update"]["objective"]["mean"]["value"]
    small.run(adapter, [x])
    assert torch.equal(adapter.state_dict()["update"]["objective"]["mean"]["value"], before)


def test_a_saved_run_goes_on_to_the_same_bits() -> None:
    small.assert_goes_on_after_saving(lambda: wa.adapt(small.net(), "eta", lr=0.01, epsilon=0.5), small.batches(6))


def test_reset_forgets_the_mean_prediction() -> None:
    small.assert_reset_is_a_new_start(wa.adapt(small.net(), "eta", lr=0.01, epsilon=0.3), small.batches(3))
