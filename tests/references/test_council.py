"""Is the council's reference what its equations say? Its parts against closed forms, the whole on the toy stream."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import islice

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from wise_atta.reference import council
from wise_atta.reference.council import Constants, Judge, Learner, Memory, Mixture, Student
from wise_atta.reference.toy import classifier, pictures, toy

NUMBERS = torch.Generator().manual_seed(7)
PINNED = -50277.464683
CONSTANTS = [field.name for field in fields(Constants)]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=NUMBERS, dtype=torch.float64)


def layer() -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(3).double().eval()
    with torch.no_grad():
        for tensor in (made.weight, made.bias, made.running_mean):
            tensor.copy_(normal(3))
        made.running_var.copy_(normal(3).exp())
    return made


def pooled(batches: int = 40, **options: object) -> Tensor:
    """What the council yields on the toy stream."""
    made = toy()
    options = {"ratio": 0.5, **options}
    return torch.cat(list(council.run(made.model, made.stream[:batches], made.answer, **options)))


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_a_share_of_one_is_batch_norm_on_the_batch() -> None:
    norm, x = layer(), normal(5, 3, 4, 4)
    expected = functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)
    torch.testing.assert_close(Mixture(norm, 1.0)(x), expected, rtol=0, atol=1e-12)


def test_a_share_of_zero_is_the_source_layer() -> None:
    norm, x = layer(), normal(5, 3, 4, 4)
    torch.testing.assert_close(Mixture(norm, 0.0)(x), norm(x), rtol=0, atol=1e-12)


def test_half_a_share_has_the_moments_of_both_samples_together() -> None:
    source, x = normal(6, 3, 4, 4) * 2 + 1, normal(6, 3, 4, 4)
    norm = nn.BatchNorm2d(3, affine=False).double().eval()
    norm.running_mean = source.mean((0, 2, 3))
    norm.running_var = source.var((0, 2, 3), correction=0)
    both = functional.batch_norm(torch.cat([x, source]), None, None, training=True, eps=norm.eps)
    torch.testing.assert_close(Mixture(norm, 0.5)(x), both[:6], rtol=0, atol=1e-12)


@pytest.mark.parametrize("own", [None, 2])
def test_gradients_flow_through_the_statistics(own: int | None) -> None:
    mixture = Mixture(layer(), 0.3)
    mixture.own = own
    x = normal(4, 3, 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(mixture, (x,))
    held = Mixture(layer(), 0.0)
    assert not torch.allclose(*(torch.autograd.grad(m(x).square().sum(), x)[0] for m in (mixture, held)))


def test_remembered_samples_do_not_move_the_statistics_of_the_batch() -> None:
    student = Student(classifier(), council.LIGHT[0], "fc", Constants())
    x, old = pictures(1, 8)[0], pictures(2, 16, shift=1.0)[0]
    torch.testing.assert_close(student.look(x, old)[:8], student.look(x, old[:0]), rtol=0, atol=1e-12)


# ---- learner ---------------------------------------------------------------------------------------------------------


def test_a_first_step_is_as_long_as_its_share_of_each_tensor() -> None:
    student = Student(classifier(), Learner(1.0, 0.01, early=True), "fc", Constants())
    before = [p.detach().clone() for p in student.tensors]
    x, labels = pictures(1, 16)
    student.learn(student.look(x, x[:4]), 16, labels[:4])
    assert 0 < len(before) < len(list(student.model.parameters()))
    for old, new in zip(before, student.tensors, strict=True):
        assert float((new - old).detach().norm()) == pytest.approx(0.01 * float(old.norm()), abs=1e-9)


def test_the_step_follows_the_joint_loss() -> None:
    """Finite differences of entropy − diversity·H(mean p) + μ·CE agree in sign and size with the direction taken."""
    how, constants = Learner(0.5, 1e-6, diversity=0.7), Constants(supervised=0.4)
    student, (x, labels) = Student(classifier(), how, "fc", constants), pictures(3, 16)

    def loss() -> float:
        with torch.no_grad():
            logits = student.look(x, x[:4])
            p = logits[:16].softmax(dim=1)
            mean = p.mean(dim=0)
            entropies = -(p * p.log()).sum(dim=1).mean() + 0.7 * (mean * mean.log()).sum()
            return float(entropies + 0.4 * functional.cross_entropy(logits[16:], labels[:4]))

    before = [p.detach().clone() for p in student.tensors]
    first = loss()
    logits = student.look(x, x[:4])
    p = logits[:16].softmax(dim=1)
    mean = p.mean(dim=0)
    total = -(p * p.log()).sum(dim=1).mean() + 0.7 * (mean * mean.log()).sum()
    total = total + 0.4 * functional.cross_entropy(logits[16:], labels[:4])
    gradients = torch.autograd.grad(total, student.tensors)
    student.learn(student.look(x, x[:4]), 16, labels[:4])
    moved = [new - old for new, old in zip(student.tensors, before, strict=True)]
    slope = sum(float((g * d).detach().sum()) for g, d in zip(gradients, moved, strict=True))
    assert slope < 0
    assert loss() - first == pytest.approx(slope, rel=1e-3)


def test_a_small_batch_takes_a_small_step() -> None:
    moved = []
    for n in (4, 16):
        student = Student(classifier(), council.LIGHT[0], "fc", Constants())
        before = student.tensors[0].detach().clone()
        x = pictures(1, n)[0]
        student.learn(student.look(x, x[:0]), n, torch.zeros(0, dtype=torch.long))
        moved.append(float((student.tensors[0].detach() - before).norm()))
    assert moved[0] == pytest.approx(moved[1] / 4)


# ---- judge and memory ------------------------------------------------------------------------------------------------


def test_the_judge_is_the_tempered_posterior_of_two_members() -> None:
    judge = Judge(torch.tensor([1.0, 0.0], dtype=torch.float64), Constants())
    said = [(0.9, 0.2), (0.5, 0.001), (0.3, 0.6)]
    for pair in said:
        judge.add(torch.tensor(pair, dtype=torch.float64).log())
    odds = 1.0
    for age, (a, b) in zip((2, 1, 0), said, strict=True):
        odds += 0.3 * 2 ** (-age / 100) * (max(math.log(a), -4) - max(math.log(b), -4))
    expected = 1 / (1 + math.exp(-odds))
    assert float(judge.weights(torch.zeros(2))[0]) == pytest.approx(expected, abs=1e-12)


def test_a_set_of_classes_is_judged_by_its_mass() -> None:
    log_p = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]], dtype=torch.float64).log()
    torch.testing.assert_close(council.log_mass(log_p, {0, 2}).exp(), torch.tensor([0.8, 0.9], dtype=torch.float64))
    torch.testing.assert_close(council.log_mass(log_p, [1]), log_p[:, 1])


def test_members_that_agree_do_not_disagree() -> None:
    log_p = normal(1, 6, 4).log_softmax(dim=2)
    torch.testing.assert_close(council.disagreement(log_p.expand(3, -1, -1)), torch.zeros(6, dtype=torch.float64))
    assert bool((council.disagreement(normal(3, 6, 4).log_softmax(dim=2)) > 0).all())


def test_the_memory_is_bounded_and_keeps_rare_classes() -> None:
    memory = Memory(10)
    for i in range(100):
        memory.add(torch.full((1,), float(i)), 1 if i in (3, 4) else 0)
    assert len(memory.samples) == 10
    assert memory.labels.count(1) == 2
    assert [float(x) for x, label in zip(memory.samples, memory.labels, strict=True) if label == 0][-1] == 99


def test_a_draw_repeats_samples_evenly() -> None:
    memory = Memory(10)
    for i in range(5):
        memory.add(torch.full((1,), float(i)), i)
    _, labels = memory.draw(torch.zeros(1, 1), 16, torch.Generator().manual_seed(0))
    assert sorted(labels.bincount().tolist()) == [3, 3, 3, 3, 4]


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_labels_never_outrun_the_budget() -> None:
    made, asked = toy(20), []
    run = council.run(made.model, made.stream, lambda t, i: (asked.append(t), made.answer(t, i))[1], 0.3)
    for t, _ in enumerate(islice(run, 20), start=1):
        assert len([s for s in asked if s < t]) <= math.floor(0.3 * (t - 1) + 1e-9) + 1
    assert asked[0] == 1


def test_without_labels_nobody_is_asked() -> None:
    made = toy(5)
    list(council.run(made.model, made.stream, made.answer, ratio=0.0, credit=0))
    assert made.asked == 0


def test_answers_that_never_come_change_nothing() -> None:
    torch.testing.assert_close(pooled(10, delay=100), pooled(10, ratio=0.0, credit=0), rtol=0, atol=0)


def test_a_late_answer_is_judged_by_what_was_predicted_then() -> None:
    """With members that never learn, the weights are those of a prompt answer as soon as it has come."""
    options = {"learners": (), "ratio": 0.0}
    prompt, late = pooled(10, **options), pooled(10, delay=3, **options)
    assert not torch.allclose(prompt[32 : 4 * 32], late[32 : 4 * 32])
    torch.testing.assert_close(prompt[4 * 32 :], late[4 * 32 :], rtol=0, atol=1e-12)


def test_a_set_of_one_class_is_that_class() -> None:
    made = toy()
    sets = council.run(made.model, made.stream[:10], lambda t, i: {made.answer(t, i)}, 0.5)
    torch.testing.assert_close(torch.cat(list(sets)), pooled(10), rtol=0, atol=0)


def test_a_network_without_batch_norm_has_no_bn_member() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.LayerNorm(16), nn.Linear(16, 10)).double()
    made = toy(6)
    out = torch.cat(list(council.run(model, made.stream, made.answer, 1.0, head="3")))
    assert out.shape == (192, 10)
    torch.testing.assert_close(out.exp().sum(dim=1), torch.ones(192, dtype=torch.float64))


def test_the_model_given_is_not_changed() -> None:
    made = toy(5)
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    list(council.run(made.model, made.stream, made.answer))
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.model.state_dict().items())


def test_the_default_is_this_one() -> None:
    """Any constant that moves, moves this number."""
    assert float(pooled().sum()) == pytest.approx(PINNED, abs=1e-3)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_moves_by_a_tenth_is_seen(name: str) -> None:
    default = getattr(Constants(), name)
    # Whole numbers move by the least that is a tenth; bounds move to where the toy stream meets them.
    moved = {"replay": 14, "capacity": 15, "full": 40}.get(name, default * 1.1)
    assert not torch.allclose(pooled(constants=replace(Constants(), **{name: moved})), pooled(), rtol=0, atol=1e-6)
