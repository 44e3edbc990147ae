"""Does simatta train all weights on its two kinds of anchors, and ask where no old anchor is?"""

from __future__ import annotations

import pytest
import torch
from methods import active, small
from torch import nn
from torch.nn import functional

import wise_atta as wa
from wise_atta import who


def rotate(stored: int, count: int, counter: int) -> list[int]:
    """A draw that a plain loop can repeat."""
    return [(7 * counter + i) % stored for i in range(count)]


@pytest.mark.parametrize("size", [300, 20])
def test_steps_are_those_of_plain_autograd(size: int) -> None:
    adapter = active.adapt("simatta", lr=0.01, e_l=0.3, steps=4, batch=8, most=5, size=size, draw=rotate)
    done = active.steps(adapter, stream := small.batches(5))
    source, model = small.net(), small.net()
    pseudo, queried = [], []
    for t, (x, (out, step)) in enumerate(zip(stream, done, strict=True)):
        torch.testing.assert_close(out.logits, model(x).detach(), rtol=0, atol=1e-10)
        with torch.no_grad():
            logits = source(x)
        h = small.entropy(logits)
        sure = [int(row) for row in h.argsort()[:5] if h[row] < 0.3]
        pseudo = [*pseudo, *((x[row], int(logits[row].argmax())) for row in sure)][-size:]
        queried = [*queried, *((x[q.index], active.truth(q)) for q in out.queries)][-size:]
        alpha = len(queried) / (len(queried) + len(pseudo))
        assert float(step.losses["alpha"]) == pytest.approx(alpha)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for i in range(4):
            losses = []
            for kept in (pseudo, queried):
                chosen = [kept[place] for place in rotate(len(kept), 8, 4 * t + i)]
                targets = torch.tensor([label for _, label in chosen])
                losses.append(functional.cross_entropy(model(torch.stack([x for x, _ in chosen])), targets))
            optimizer.zero_grad()
            ((1 - alpha) * losses[0] + alpha * losses[1]).backward()
            optimizer.step()
    assert len(pseudo) > 10 and len(queried) == min(15, size)
    small.assert_same_values(adapter, model)


def test_features_of_old_anchors_are_those_of_the_trained_model() -> None:
    adapter = active.adapt("simatta", lr=0.01)
    active.steps(adapter, small.batches(2))
    queried = adapter.update.queried
    inputs = torch.stack([kept.inputs for kept in queried.kept])
    torch.testing.assert_close(queried.features, adapter.classifier.forward(inputs).features, rtol=0, atol=1e-10)
    assert queried.places == [(1, q) for _, q in queried.places[:3]] + [(2, q) for _, q in queried.places[3:]]


def test_only_unsure_samples_are_asked_about_and_the_rest_of_the_grant_is_not_charged() -> None:
    x = small.batches(1)[0]
    entropy = small.entropy(small.net()(x)).detach()
    bound = float(entropy.sort(descending=True).values[:3].mean())
    adapter = active.adapt("simatta", e_h=bound)
    out = adapter.predict(x)
    assert 0 < len(out.queries) < 3 and adapter.policy.spent == len(out.queries)
    assert all(entropy[row] >= bound for row in active.rows(out))


def test_a_batch_without_candidates_asks_nothing_and_pays_nothing() -> None:
    adapter = active.adapt("simatta", e_h=10.0)
    done = active.steps(adapter, small.batches(3))
    assert all(not out.queries for out, _ in done) and adapter.policy.spent == 0


def test_without_any_anchor_there_is_no_step() -> None:
    adapter = active.adapt("simatta", e_l=0.0, policy="never")
    done = active.steps(adapter, small.batches(2))
    assert sum(float(step.losses["skipped"]) for _, step in done) == 2
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


@pytest.mark.parametrize("options", [{"e_l": 0.0}, {"policy": "never", "e_l": 0.5}])
def test_one_kind_of_anchor_is_enough(options: dict[str, object]) -> None:
    adapter = active.adapt("simatta", lr=0.01, **options)
    ((_, step),) = active.steps(adapter, small.batches(1))
    assert float(step.losses["alpha"]) in (0.0, 1.0)
    flat = adapter.classifier.live.flat
    assert flat.isfinite().all() and not torch.equal(flat, adapter.classifier.source_flat())


def test_late_labels_become_anchors_too_with_the_weight_of_their_cluster() -> None:
    late = who.Delayed(who.Oracle(active.truth), batches=2)
    adapter = active.adapt("simatta", annotator=late, lr=0.01)
    active.steps(adapter, small.batches(4))
    assert [batch for batch, _ in adapter.update.queried.places] == [1, 1, 1, 2, 2, 2]
    weights = {(batch, row): weight for batch, row, weight in adapter.selector.state_dict()["weights"]}
    assert set(adapter.update.queried.places) <= set(weights) and max(weights.values()) > 1


@pytest.mark.parametrize("statistics", ["batch", "renorm"])
@pytest.mark.parametrize("labels", [1, 3])
def test_an_anchor_that_is_left_over_has_features_where_one_sample_has_no_statistics(
    statistics: str, labels: int
) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    adapter = wa.adapt(net, "simatta", statistics=statistics, ratio=float(labels), labels=labels, batch=2, e_h=0.0)
    for number in range(1, 4):
        out = adapter.predict(torch.randn(8, 4, generator=torch.Generator().manual_seed(number)))
        adapter.learn(out, {query.id: query.index % 3 for query in out.queries})
        features = adapter.update.queried.features
        assert len(features) == len(adapter.update.queried) == labels * number and features.isfinite().all()


def test_an_answer_weighs_as_it_says() -> None:
    def answer(weight: float) -> torch.Tensor:
        annotator = who.Oracle(active.truth)
        annotator.reply = lambda query: wa.Answer(active.truth(query), weight=weight)  # type: ignore[method-assign]
        adapter = active.adapt("simatta", annotator=annotator, e_l=0.0, lr=1e-3, steps=1)
        active.steps(adapter, small.batches(1))
        return adapter.classifier.live.flat - adapter.classifier.source_flat()

    torch.testing.assert_close(answer(2.0), 2 * answer(1.0), rtol=1e-9, atol=1e-12)


def test_forwards_are_one_to_predict_one_of_the_source_one_a_step_and_those_of_the_anchors() -> None:
    done = active.steps(active.adapt("simatta", steps=10, batch=2), small.batches(1))
    assert done[0][1].work == wa.model.Work(1 + 1 + 10 + 2, 10, 10)


@pytest.mark.parametrize("policy", ["uniform", "paced"])
def test_it_resumes_to_the_same_bits_buffers_included(policy: str) -> None:
    active.assert_resumes(lambda: active.adapt("simatta", lr=0.01, e_l=0.3, steps=3, size=10, policy=policy, ratio=2.0))


def test_a_buffer_that_keeps_nothing_is_an_error_before_the_stream() -> None:
    with pytest.raises(wa.errors.BadConfig, match="size 0"):
        active.adapt("simatta", size=0)
    with pytest.raises(wa.errors.BadConfig, match="steps"):
        active.adapt("simatta", steps=0)
