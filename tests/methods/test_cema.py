"""Does cema send what a teacher can help with, adapt that teacher, and learn from it, at the price that was said?"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from core.checks import same
from methods import active, small
from torch import Tensor, nn
from torch.nn import functional

import wise_atta as wa

SMALL = {"queue": 6, "replayed": 9, "alone": 10, "ready": 12, "size": 20, "below": 0.9, "epsilon": 0.95, "lr": 0.01}


def rotate(stored: int, count: int, counter: int) -> list[int]:
    """A draw that a plain loop can repeat."""
    return [(5 * counter + i) % stored for i in range(count)]


def cema(**options: Any) -> wa.Adapter:
    return active.adapt("cema", **({"teacher": small.net(seed=5), "draw": rotate} | SMALL | options))


class Renormed(nn.Module):
    """BatchNorm by batch renormalisation, written out."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = norm
        self.running: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        sigma = (var + self.norm.eps).sqrt()
        self.last = mean.detach(), var.detach()
        y = (x - mean[:, None, None]) / sigma[:, None, None]
        if self.running is not None:
            own = (self.running[1] + self.norm.eps).sqrt()
            r, d = (sigma / own).detach(), ((mean - self.running[0]) / own).detach()
            y = y * r[:, None, None] + d[:, None, None]
        return y * self.norm.weight[:, None, None] + self.norm.bias[:, None, None]

    def follow(self) -> None:
        now = self.running or self.last
        self.running = tuple(0.9 * old + 0.1 * new for old, new in zip(now, self.last, strict=True))  # type: ignore[assignment]


def renormed(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    made.norms = nn.ModuleList(Renormed(norm) for norm in model.norms)
    return made


def follow(model: nn.Module) -> None:
    for norm in model.norms:
        norm.follow()


def trust(h: Tensor, e0: float) -> Tensor:
    return (e0 - h).exp().detach()


def test_steps_are_those_of_plain_autograd() -> None:
    adapter = cema(epsilon=0.5)
    done = active.steps(adapter, stream := small.batches(6, n=16))
    student, teacher = renormed(small.net()), renormed(small.net(seed=5))
    e0 = 0.9 * math.log(small.CLASSES)
    of_student = torch.optim.SGD(small.norm_parameters(student), lr=0.01, momentum=0.9)
    of_teacher = torch.optim.SGD(small.norm_parameters(teacher), lr=2.5e-4, momentum=0.9)
    queue: list[Tensor] = []
    stored: list[Tensor] = []
    mean, count, kinds = None, 0, []

    def distil(samples: list[Tensor]) -> None:
        nonlocal count
        x = torch.stack(samples)
        with torch.no_grad():
            t = teacher(x)
        z = student(x)
        h, weight = small.entropy(z), trust(small.entropy(t), e0)
        kl = functional.kl_div(z.log_softmax(1), t.softmax(1), reduction="none").sum(1)
        ce = functional.cross_entropy(z, t.argmax(1), reduction="none")
        of_student.zero_grad()
        (3 * trust(h, e0) * h + 3 * weight * kl + weight * ce).mean().backward()
        of_student.step()
        count += 1

    def past(wanted: int) -> list[Tensor]:
        if len(stored) < 12:
            return []
        return [stored[place] for place in rotate(len(stored), min(wanted, len(stored)), count)]

    for x, (out, _) in zip(stream, done, strict=True):
        with torch.no_grad():
            logits = student(x)
        follow(student)
        torch.testing.assert_close(out.logits, logits, rtol=0, atol=1e-10)
        p = logits.softmax(1)
        keep = small.entropy(logits) < e0
        if mean is not None:
            keep &= functional.cosine_similarity(mean[None], p) < 0.5
        if keep.any():
            mean = p[keep].mean(0) if mean is None else 0.9 * mean + 0.1 * p[keep].mean(0)
        assert active.rows(out) == keep.nonzero().flatten().tolist()
        queue += list(x[keep])
        taught = len(queue) >= 6
        while len(queue) >= 6:
            sent, queue = queue[:6], queue[6:]
            t = teacher(torch.stack(sent))
            follow(teacher)
            h = small.entropy(t)
            of_teacher.zero_grad()
            (trust(h, e0) * h).mean().backward()
            of_teacher.step()
            distil([*sent, *past(9)])
            stored = [*stored, *sent][-20:]
        alone = not keep.any() and bool(past(10))
        if alone:
            distil(past(10))
        kinds.append("taught" if taught else "alone" if alone else "nothing")
    assert set(kinds) == {"taught", "alone", "nothing"} and count > 6
    small.assert_same_values(adapter, unwrapped(student))


def unwrapped(model: nn.Module) -> nn.Module:
    model.norms = nn.ModuleList(norm.norm for norm in model.norms)
    return model


def test_sent_samples_wait_as_open_questions_until_the_queue_is_full() -> None:
    adapter = cema(queue=30, ready=1)
    x = small.batches(1, n=16)[0]
    out = adapter.step(x)
    sent = len(out.sent)
    assert 0 < sent < 30 and not out.queries and len(adapter.open) == sent
    while adapter.counts.learned == 0:
        adapter.step(x + 0.01 * adapter.number)
    assert adapter.counts.learned == adapter.counts.answered == 30
    assert len(adapter.open) == adapter.counts.asked - 30


def test_labels_of_the_teacher_are_charged_and_recorded() -> None:
    adapter = cema()
    done = [step for _, step in active.steps(adapter, small.batches(3, n=16))]
    assert adapter.policy.spent == adapter.counts.asked == sum(len(step.asked) for step in done) > 0
    assert sum(len(step.learned) for step in done) == adapter.counts.learned > 0


def test_a_teacher_that_costs_nothing_is_not_rationed_and_not_charged() -> None:
    adapter = cema(cost=0, ratio=0.1, labels=2)
    done = [step for _, step in active.steps(adapter, small.batches(3, n=16))]
    assert adapter.policy.spent == 0 and [len(step.asked) for step in done] == [2, 2, 2]


@pytest.mark.parametrize("policy", ["uniform", "paced", "random"])
def test_a_budget_holds_for_the_teacher(policy: str) -> None:
    adapter = cema(policy=policy, ratio=0.5, labels=2)
    for x in small.batches(12, n=16):
        adapter.step(x)
        assert adapter.policy.spent <= adapter.number // 2
    assert adapter.policy.spent == adapter.counts.asked > 0


def test_of_too_many_the_least_sure_are_sent() -> None:
    x = small.batches(1, n=16)[0]
    every, some = (cema(labels=labels).predict(x) for labels in (None, 3))
    entropy = every.view.entropy
    assert len(every.sent) > 3
    best = sorted(active.rows(every), key=lambda row: -float(entropy[row]))[:3]
    assert active.rows(some) == sorted(best)


def test_the_forwards_of_the_teacher_are_counted() -> None:
    adapter = cema(queue=16, below=1.1, epsilon=1.1)
    ((_, step),) = active.steps(adapter, small.batches(1, n=16))
    # Predict; the teacher to adapt and to answer; the student to learn.
    assert step.work == wa.model.Work(forwards=4, gradient_forwards=2, backwards=2)


def test_nothing_sent_and_nothing_stored_is_no_step_and_counted() -> None:
    adapter = cema(below=1e-9)
    done = active.steps(adapter, small.batches(2, n=16))
    assert sum(float(step.losses["skipped"]) for _, step in done) == 2
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


def test_it_resumes_to_the_same_bits_with_queue_buffer_and_teacher() -> None:
    active.assert_resumes(lambda: cema(queue=7, draw=None))


def test_reset_brings_the_teacher_back_too() -> None:
    adapter = cema()
    active.steps(adapter, small.batches(3, n=16))
    tutor = adapter.update.tutor
    assert not torch.equal(tutor.model.live.flat, tutor.model.source_flat()) and tutor.model.running is not None
    adapter.reset()
    assert torch.equal(tutor.model.live.flat, tutor.model.source_flat()) and tutor.model.running is None
    assert len(adapter.update.replay) == 0 and adapter.classifier.running is None


def test_a_teacher_stays_with_its_adapter_when_another_is_refused() -> None:
    teacher = small.net(seed=5)
    method, twin = (wa.methods.cema(teacher=teacher, draw=rotate, **SMALL) for _ in range(2))
    with pytest.raises(wa.errors.BadConfig, match="classes"):
        wa.adapt(nn.Sequential(nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, 3)).double(), method)
    first, other = (wa.adapt(small.net(), each) for each in (method, twin))
    for number, x in enumerate(small.batches(4, n=16)):
        first.step(x)
        other.step(x)
        if number == 1:
            before = first.state_dict()
            with pytest.raises(wa.errors.BadConfig, match="another adapter"):
                wa.adapt(small.net(seed=3), method)
            assert same(first.state_dict(), before)
    assert same(first.state_dict(), other.state_dict())


def test_neither_module_is_touched() -> None:
    student, teacher = small.net(), small.net(seed=5)
    before = [copy.deepcopy(net.state_dict()) for net in (student, teacher)]
    active.steps(cema(model=student, teacher=teacher), small.batches(3, n=16))
    for net, state in zip((student, teacher), before, strict=True):
        assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())


def test_a_classifier_can_teach_with_its_own_normalisation() -> None:
    teacher = wa.Classifier(small.net(seed=5), mean=[0.5] * 3, std=[0.2] * 3, statistics="source")
    adapter = cema(teacher=teacher, mean=[0.1] * 3, std=[0.9] * 3)
    active.steps(adapter, small.batches(2, n=16))
    assert adapter.update.tutor.model is teacher and not torch.equal(teacher.live.flat, teacher.source_flat())


def test_a_plain_module_is_normalised_as_the_student_is() -> None:
    adapter = cema(mean=[0.1] * 3, std=[0.9] * 3)
    x = small.batches(1)[0]
    expected = wa.Classifier(small.net(seed=5), mean=[0.1] * 3, std=[0.9] * 3).forward(x).logits
    torch.testing.assert_close(adapter.update.tutor.logits(x), expected)


class OtherClasses(small.Net):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, small.CLASSES + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": None}, "give teacher="),
        ({"teacher": "resnet"}, "a module or a Classifier"),
        ({"teacher": OtherClasses().double()}, "7 classes and the student 6"),
        ({"teacher": wa.Classifier(OtherClasses().double(), classes=[0, 1, 2])}, "3 classes and the student 6"),
        ({"size": 0}, "size 0"),
        ({"size": 10, "ready": 256}, "never holds the 256"),
        ({"above": 0.5, "below": 0.4}, "above < below"),
        ({"cost": -1}, "cost"),
        ({"cost": 2}, "cost"),
    ],
)
def test_what_cannot_work_is_an_error_before_the_stream(options: dict[str, Any], message: str) -> None:
    with pytest.raises(wa.errors.BadConfig, match=message):
        cema(**options)


def test_the_text_of_the_paper_lowers_the_upper_bound_with_the_mean_entropy() -> None:
    stream = small.batches(4, n=16)
    constant, lowered = (wa.what.Band(below=0.9, epsilon=1.1, lower=lower) for lower in (False, True))
    views = [active.adapt("eatta").predict(x).view for x in stream]
    entropies, first = [], None
    for view in views:
        entropies += view.entropy.tolist()
        mean = sum(entropies) / len(entropies)
        first = mean if first is None else first
        bound = 0.9 * math.log(small.CLASSES) * min(1.0, mean / first)
        assert lowered.pick(view, 16) == (view.entropy < bound).nonzero().flatten().tolist()
        assert constant.pick(view, 16) == (view.entropy < 0.9 * math.log(6)).nonzero().flatten().tolist()


class NormAndRelu(nn.BatchNorm2d):
    """One layer that normalises and then cuts at 0, as some libraries have it."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(super().forward(x))


def test_a_layer_that_does_more_than_normalise_is_renormalised_inside() -> None:
    torch.manual_seed(0)

    def net(*norm: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), *norm, nn.Flatten(), nn.Linear(4 * 4 * 4, 5))

    apart, one = net(nn.BatchNorm2d(4), nn.ReLU()), net(NormAndRelu(4))
    one[0].load_state_dict(apart[0].state_dict())
    one[3].load_state_dict(apart[4].state_dict())
    options = {"adapt": "norm", "statistics": "renorm"}
    both = [wa.Classifier(model.double(), **options) for model in (apart, one)]
    for batch in torch.randn(3, 8, 3, 6, 6, dtype=torch.float64) * torch.arange(1.0, 4.0).view(3, 1, 1, 1, 1):
        forwards = [model.forward(batch, grad=True) for model in both]
        torch.testing.assert_close(forwards[0].logits, forwards[1].logits)
        gradients = [
            model.gradients(f.logits.square().sum(), f.version, list(model.layout.groups))
            for model, f in zip(both, forwards, strict=True)
        ]
        torch.testing.assert_close(gradients[0], gradients[1])
        for model, forward in zip(both, forwards, strict=True):
            model.commit(forward.statistics)
