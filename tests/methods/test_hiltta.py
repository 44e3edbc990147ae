"""Does hiltta try every learning rate from the same state, keep what the labels favour, and then learn from them?"""

from __future__ import annotations

import copy

import pytest
import torch
from methods import active, small
from torch import Tensor, nn
from torch.nn import functional

import wise_atta as wa

RATES = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3)


def scaled(values: list[Tensor]) -> Tensor:
    stacked = torch.stack(values)
    return (stacked - stacked.min()) / (stacked.max() - stacked.min())


def test_steps_are_those_of_plain_autograd_with_a_copy_for_every_candidate() -> None:
    adapter = active.adapt("hiltta", rates=RATES, supervised_lr=1e-3)
    done = active.steps(adapter, stream := small.batches(5, seed=4))
    source, model, scores, chosen = small.plain(small.net()), small.plain(small.net()), None, []
    momenta: dict[str, object] = {}
    adam: dict[str, object] = {}

    def optimizer_of(net: nn.Module, lr: float) -> torch.optim.SGD:
        made = torch.optim.SGD(small.norm_parameters(net), lr=lr, momentum=0.9, nesterov=True)
        if momenta:
            made.load_state_dict({**made.state_dict(), "state": copy.deepcopy(momenta)})
        return made

    for x, (out, _) in zip(stream, done, strict=True):
        rows, y = active.rows(out), active.labels(out)
        rest = [row for row in range(len(x)) if row not in rows]
        tried, apart, wrong = [], [], []
        for rate in RATES:
            net = copy.deepcopy(model)
            net.zero_grad()
            optimizer = optimizer_of(net, rate)
            small.entropy(net(x[rest])).mean().backward()
            optimizer.step()
            tried.append((net, optimizer.state_dict()["state"]))
            with torch.no_grad():
                logits, reference = net(x), source(x)
            apart.append(functional.mse_loss(logits[rest].softmax(1), reference[rest].softmax(1)))
            wrong.append(functional.cross_entropy(logits[rows], y))
        new = scaled(apart) + scaled(wrong)
        scores = new if scores is None else 0.5 * scores + 0.5 * new
        chosen.append(int(scores.argmin()))
        model, momenta = tried[chosen[-1]]
        model.zero_grad()
        supervised = torch.optim.Adam(model.parameters(), lr=1e-3)
        if adam:
            supervised.load_state_dict({**supervised.state_dict(), "state": copy.deepcopy(adam)})
        functional.cross_entropy(model(x)[rows], y).backward()
        supervised.step()
        adam = supervised.state_dict()["state"]
    assert [round(float(step.losses["rate"]), 6) for _, step in done] == [RATES[c] for c in chosen]
    assert len(set(chosen)) > 1
    small.assert_same_values(adapter, model)


def test_it_asks_for_unsure_samples_far_from_each_other() -> None:
    out = active.adapt("hiltta").predict(small.batches(1)[0])
    assert len(set(active.rows(out))) == 3
    assert active.rows(out) == wa.what.KMargin().pick(out.view, 3)


def test_without_a_label_it_takes_the_best_rate_so_far_and_at_first_the_first() -> None:
    adapter = active.adapt("hiltta", rates=RATES, labels=3, ratio=1.5)
    done = [step for _, step in active.steps(adapter, small.batches(4))]
    assert [len(step.asked) for step in done] == [0, 3, 0, 3]
    rates = [round(float(step.losses["rate"]), 6) for step in done]
    assert rates[0] == RATES[0] and rates[2] == rates[1]
    assert [step.work.forwards for step in done[:2]] == [1, 1 + 1 + 1 + len(RATES) + 1]
    assert [step.work.backwards for step in done[:2]] == [1, 2]


def test_it_wraps_any_objective() -> None:
    adapter = active.adapt("hiltta", objective=wa.how.ReliableEntropy(epsilon=0.9), rates=RATES)
    active.steps(adapter, small.batches(2))
    assert adapter.update.objective.redundancy.value is not None


def test_where_the_objective_has_nothing_to_learn_only_the_labels_teach() -> None:
    adapter = active.adapt("hiltta", objective=wa.how.Entropy(below=1e-9), ratio=1.5)
    (_, skipped), (_, taught) = active.steps(adapter, small.batches(2))
    assert set(skipped.losses) == {"skipped"} and set(taught.losses) == {"sup"}
    assert adapter.classifier.live.flat.isfinite().all()


def test_a_batch_that_is_labelled_to_the_last_sample_still_teaches() -> None:
    adapter = active.adapt("hiltta", labels=4, ratio=4)
    ((_, step),) = active.steps(adapter, small.batches(1, n=4))
    assert set(step.losses) == {"sup"} and adapter.classifier.live.flat.isfinite().all()


def test_the_supervised_step_moves_all_weights_and_the_other_norm_tensors_alone() -> None:
    unlabelled, labelled = (active.adapt("hiltta", policy=policy) for policy in ("never", "uniform"))
    for adapter, expected in ((unlabelled, False), (labelled, True)):
        active.steps(adapter, small.batches(1))
        where = adapter.classifier.layout.slices["rest"]
        moved = not torch.equal(adapter.classifier.live.flat[where], adapter.classifier.source_flat()[where])
        assert moved is expected


@pytest.mark.parametrize("options", [{}, {"optimizer": "adam"}, {"policy": "paced", "ratio": 2.0}])
def test_it_resumes_to_the_same_bits(options: dict[str, object]) -> None:
    active.assert_resumes(lambda: active.adapt("hiltta", rates=RATES, supervised_lr=1e-3, **options))


def test_no_candidate_is_an_error_before_the_stream() -> None:
    with pytest.raises(wa.errors.BadConfig, match="no learning rate"):
        active.adapt("hiltta", rates=())
    with pytest.raises(wa.errors.BadConfig, match="learning rate"):
        active.adapt("hiltta", rates=(1e-3, -1.0))


def test_a_rate_that_diverges_is_the_worst_and_spoils_no_later_choice() -> None:
    adapter = active.adapt("hiltta", rates=[1e-3, 1e300])
    steps = [step for _, step in active.steps(adapter, small.batches(4, seed=4))]
    assert [float(step.losses["rate"]) for step in steps] == pytest.approx([1e-3] * 4)
    assert adapter.update.scores.value.isfinite().all()
