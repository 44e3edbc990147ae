"""Does the guard bring a collapsed model back, and leave a healthy one alone?"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import pytest
import torch
from core.checks import same, saved
from torch import Tensor, nn
from torch.nn import functional

import wise_atta as wa
from wise_atta import who
from wise_atta.prediction import Step
from wise_atta.view import View

CLASSES = 8
Stream = list[tuple[Tensor, Tensor]]


def draw(labels: Tensor, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Pictures of eight patterns in noise."""
    patterns = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    return patterns[labels] + noise * torch.randn(len(labels), 1, 8, 8, generator=generator), labels


def mixed(batches: int, noise: float = 1.2, n: int = 32) -> Stream:
    """Classes in random order."""
    labels = torch.randint(CLASSES, (batches, n), generator=torch.Generator().manual_seed(1))
    return [draw(labels[t], noise, seed=t) for t in range(batches)]


def in_order(batches: int, noise: float, n: int = 32, length: int = 10) -> Stream:
    """One class after the other, `length` batches each."""
    return [draw(torch.full((n,), t // length % CLASSES), noise, seed=t) for t in range(batches)]


@functools.cache
def net() -> nn.Module:
    """A small BatchNorm net, trained on clear patterns."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for t in range(80):
        x, y = draw(torch.arange(64) % CLASSES, 0.5, seed=1000 + t)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def run(stream: Stream, method: str = "tent", **options: Any) -> tuple[float, list[Step], wa.Adapter]:
    """Share of right predictions over the last half, the records, the adapter."""
    adapter = wa.adapt(net(), method, **options)
    steps, right = [], []
    for x, y in stream:
        out = adapter.predict(x)
        right.append((out.logits.argmax(1) == y).double().mean().item())
        steps.append(adapter.learn(out, {query.id: int(y[query.index]) for query in out.queries}))
    half = right[len(right) // 2 :]
    return sum(half) / len(half), steps, adapter


# Tent at these rates drives the net to one class.
COLLAPSING = [{"lr": 2.0}, {"lr": 0.1, "statistics": "source"}]


@pytest.mark.parametrize("options", COLLAPSING)
def test_a_collapsed_model_is_brought_back(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    stream = mixed(100, 2.0)
    without, _, _ = run(stream, **options)
    with caplog.at_level(logging.WARNING, logger="wise_atta.guard"):
        guarded, steps, adapter = run(stream, guard=wa.Guard(window=96), **options)
    assert without < 0.25 and guarded > without + 0.15
    trips = [step for step in steps if step.tripped]
    assert adapter.guard is not None and len(trips) == adapter.guard.trips == len(caplog.records) > 0
    assert f"batch {trips[0].number}: collapse" in caplog.text and str(trips[0].tripped) in caplog.text


def seen(logits: Tensor) -> View:
    """A batch as a guard sees it, with these predictions."""
    return View(1, logits, logits, head=lambda features: features, anchor=lambda: logits)


@pytest.mark.parametrize("batches", [2, 12])
def test_the_teacher_of_a_student_goes_back_too_with_its_statistics(batches: int) -> None:
    teacher = {"teacher": net(), "queue": 4, "replayed": 3, "alone": 3, "ready": 2, "below": 2.0}
    adapter = wa.adapt(net(), "cema", guard=wa.Guard(window=32, every=2), **teacher)
    guard, tutor, found = adapter.guard, adapter.update.tutor, []
    assert guard is not None
    for x, _ in mixed(batches):
        found.append((adapter.classifier.running, tutor.model.running, tutor.model.live.flat))
        adapter.step(x)
    assert tutor.model.running is not found[0][1]
    guard.load_state_dict(saved(guard.state_dict()))
    good = guard._good.batch
    assert (good > 0) == (batches > 2)
    guard.rescue(batches)
    assert same((adapter.classifier.running, tutor.model.running, tutor.model.live.flat), found[good])


# A limit, what an alarm by it says, and a batch of 32 that raises it: the predicted classes, and how sure.
SIGNS = [
    ("share", "class 0 is", [0] * 20 + [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5], 4.0),
    ("classes", "classes share", [0, 1, 2] * 10 + [0, 1], 4.0),
    ("entropy", "entropy", list(range(8)) * 4, 40.0),
]
OFF = {"share": 1.0, "classes": 0.0, "entropy": 0.0}


@pytest.mark.parametrize(("part", "sign", "classes", "sure"), SIGNS)
def test_each_sign_of_collapse_is_enough(part: str, sign: str, classes: list[int], sure: float) -> None:
    collapsed = sure * functional.one_hot(torch.tensor(classes), CLASSES).float()
    even = 4.0 * functional.one_hot(torch.arange(32) % CLASSES, CLASSES).float()
    # The source is sure of other classes than those above, so that it does not speak for them.
    x = draw((torch.tensor(classes) + 1) % CLASSES, 0.1, seed=0)[0]
    others = {name: off for name, off in OFF.items() if name != part}
    for limits, expected in ((others, sign), (OFF, "None")):
        guard = wa.Guard(window=32, **limits)
        wa.adapt(net(), "tent", guard=guard)
        assert guard.check(seen(even), x) is None
        assert expected in str(guard.check(seen(collapsed), x))
        assert guard.trips == (expected == sign)


def checked(guard: wa.Guard, number: int, classes: list[int], sure: float = 4.0) -> str | None:
    """What the guard says of a batch with these predictions, of pictures that the source sees as they are."""
    logits = sure * functional.one_hot(torch.tensor(classes), CLASSES).float()
    view = View(number, logits, logits, head=lambda features: features, anchor=lambda: logits)
    return guard.check(view, draw(torch.tensor(classes), 0.1, seed=0)[0])


EVEN = list(range(CLASSES)) * 4
# By the limit that they come near: half as far as an alarm, where the others are off.
UNEASY = {
    "share": ([0] * 12 + [1, 2, 3, 4, 5, 6, 7] * 2 + [1, 2, 3, 4, 5, 6], 4.0),
    "classes": ([0, 1, 2, 3, 4] * 6 + [0, 1], 4.0),
    "entropy": (EVEN, 7.2),
}


@pytest.mark.parametrize("part", UNEASY)
def test_a_batch_half_way_to_an_alarm_raises_none_and_is_no_snapshot_either(part: str) -> None:
    guard = wa.Guard(window=32, every=1, **{name: off for name, off in OFF.items() if name != part})
    wa.adapt(net(), "tent", guard=guard)
    assert checked(guard, 1, EVEN) is None and guard.state_dict()["next"]["batch"] == 0
    assert checked(guard, 2, *UNEASY[part]) is None and guard.state_dict()["next"]["batch"] == 0
    assert checked(guard, 3, EVEN) is None and guard.state_dict()["next"]["batch"] == 2


def test_what_is_usual_is_read_off_no_fewer_than_32_predictions() -> None:
    guard = wa.Guard(window=64)
    wa.adapt(net(), "tent", guard=guard)
    checked(guard, 1, EVEN[:31])
    assert not guard.state_dict()["usual"]
    checked(guard, 2, EVEN[31:])
    assert guard.state_dict()["usual"]["classes"] == pytest.approx(8.0)


@pytest.mark.parametrize(("right", "overrules"), [(7, False), (8, True)])
def test_audits_overrule_a_suspicion_from_half_way_between_their_limit_and_all_right(
    right: int, overrules: bool
) -> None:
    guard = wa.Guard(window=32, audits=10, agree=1.0)
    wa.adapt(net(), "tent", guard=guard)
    for _ in range(10):
        guard.audit(True)
    checked(guard, 1, EVEN)
    for number in range(10):
        guard.audit(number < right)
    collapsed = 4.0 * functional.one_hot(torch.zeros(32, dtype=torch.long), CLASSES).float()
    assert (guard.check(seen(collapsed), draw(torch.tensor(EVEN), 0.1, seed=0)[0]) is None) is overrules


def test_an_alarm_with_an_honest_reason_is_looked_into_again_only_after_a_while() -> None:
    guard = wa.Guard(window=32, every=3)
    adapter = wa.adapt(net(), "tent", guard=guard)
    checked(guard, 1, EVEN)
    forwards = []
    for number in range(2, 9):
        before = adapter.classifier.work.forwards
        assert checked(guard, number, [0] * 32) is None
        forwards.append(adapter.classifier.work.forwards - before)
    assert [n > 0 for n in forwards] == [True, False, False, True, False, False, True]


def test_a_collapse_after_a_new_good_state_leads_there_and_not_to_the_source() -> None:
    adapter = wa.adapt(net(), "tent", lr=1e-2, guard=wa.Guard(window=64, every=4))
    guard, number, found = adapter.guard, 0, []
    for _ in range(2):
        for x, _ in mixed(16):
            adapter.learn(adapter.predict(x))
        number = adapter.number
        guard.rescue(number + 1)
        assert guard.state_dict()["next"] is None, "what was seen since the good state is not trusted either"
        found.append(guard._good.batch)
    assert 0 < found[0] <= 16 < found[1] <= number


HEALTHY = {
    "clear": (lambda: mixed(60, 0.5), {"lr": 1e-2}),
    "noisy": (lambda: mixed(60, 1.2), {"lr": 1e-2}),
    "very noisy": (lambda: mixed(60, 2.0), {"lr": 1e-3}),
    "labels": (lambda: mixed(60, 1.2), {"method": "wise", "ratio": 0.5}),
    "roid": (lambda: mixed(40, 1.2), {"method": "roid", "lr": 1e-3, "consistency": False}),
    "small batches": (lambda: mixed(150, 1.2, n=4), {"lr": 1e-3, "statistics": "ema"}),
    "sorted, clear": (lambda: in_order(80, 0.5), {"lr": 1e-2}),
    "sorted, clear, source statistics": (lambda: in_order(80, 0.5), {"lr": 1e-2, "statistics": "source"}),
    "sorted, noisy": (lambda: in_order(80, 1.2), {"lr": 1e-3}),
    "sorted after mixed": (lambda: [*mixed(30), *in_order(40, 0.5, length=20)], {"lr": 1e-3}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_is_left_alone(name: str) -> None:
    stream, options = HEALTHY[name]
    adapters = [wa.adapt(net(), **({"method": "tent", "guard": guard} | options)) for guard in (False, True)]
    for x, y in stream():
        for adapter in adapters:
            out = adapter.predict(x)
            adapter.learn(out, {query.id: int(y[query.index]) for query in out.queries})
    assert adapters[1].guard.trips == 0
    assert torch.equal(adapters[0].classifier.live.flat, adapters[1].classifier.live.flat)


def test_a_calm_stream_costs_no_forward() -> None:
    _, steps, _ = run(mixed(40), lr=1e-3, guard=True)
    assert {step.work.forwards for step in steps} == {1}


def test_it_returns_to_a_state_that_was_calm_for_a_while() -> None:
    adapter = wa.adapt(net(), "tent", lr=1e-2, guard=wa.Guard(window=64, every=4))
    flats = []
    for x, _ in mixed(20):
        flats.append(adapter.classifier.live.flat)
        adapter.learn(adapter.predict(x))
    # Calm batches number 4, 8, … 20 take snapshots of the tensors that predicted them; the last but one is good.
    adapter.update.restore({"flat": ruined(adapter)})
    trip = None
    for x, _ in mixed(20):
        out = adapter.predict(x)
        tripped = adapter.learn(out).tripped
        trip = trip or tripped
        if tripped:
            break
    assert trip is not None and "predictions" in trip
    good = adapter.guard._good  # what it went back to
    assert good.batch == 15 and torch.equal(good.update["flat"], flats[15])


def ruined(adapter: wa.Adapter) -> Tensor:
    """Tensors with which one class wins whatever the picture."""
    flat = adapter.classifier.source_flat()
    views = adapter.classifier.layout.views(flat)
    for name, view in views.items():
        view.fill_(0.0 if name.endswith("weight") else 3.0)
    return flat


def test_a_second_collapse_without_a_good_state_between_leads_to_the_source() -> None:
    adapter = wa.adapt(net(), "tent", lr=1e-2, guard=wa.Guard(window=64, every=4))
    stream = mixed(40)
    for x, _ in stream[:20]:
        adapter.learn(adapter.predict(x))
    for trips in (1, 2):
        adapter.update.restore({"flat": ruined(adapter)})
        for x, _ in stream[20:24]:
            out = adapter.predict(x)
            if adapter.learn(out).tripped:
                break
        assert adapter.guard is not None and adapter.guard.trips == trips
    assert adapter.guard._good.batch == 0
    assert torch.equal(adapter.guard._good.update["flat"], adapter.classifier.source_flat())


@pytest.mark.parametrize("statistics", ["ema", "renorm"])
@pytest.mark.parametrize("calm", [2, 20])
def test_statistics_that_a_faulty_sensor_spoiled_are_brought_back(statistics: Any, calm: int) -> None:
    adapter = wa.adapt(net(), "bn", statistics=statistics, guard=wa.Guard(window=64, every=4))
    stream, right = mixed(calm + 16, 0.5), []
    for number, (x, y) in enumerate(stream):
        faulty = calm <= number < calm + 3
        out = adapter.predict(100 * x + 300 if faulty else x)
        right.append((out.logits.argmax(1) == y).double().mean().item())
        adapter.learn(out)
    assert adapter.guard is not None and adapter.guard.trips >= 1
    assert min(right[-4:]) > 0.9


def test_anchor_and_statistics_come_back_with_the_tensors() -> None:
    adapter = wa.adapt(net(), "wise", statistics="ema", guard=wa.Guard(window=64, every=4))
    stream = mixed(20)
    for x, _ in stream:
        adapter.learn(adapter.predict(x, ask=False))
    good = adapter.guard._good
    adapter.guard._return("test", 21)
    assert adapter.anchor is not None and torch.equal(adapter.anchor.version.flat, good.anchor)
    assert adapter.classifier.running is good.running and torch.equal(adapter.classifier.live.flat, good.update["flat"])


def test_logits_that_are_no_numbers_are_answered_from_the_last_good_state() -> None:
    adapter = wa.adapt(net(), "tent", guard=True)
    x = mixed(1)[0][0]
    expected = adapter.predict(x, learn=False).logits
    adapter.update.restore({"flat": torch.full_like(adapter.classifier.source_flat(), math.nan)})
    out = adapter.predict(x)
    assert torch.equal(out.logits, expected)
    step = adapter.learn(out)
    assert "NaN" in str(step.tripped) and adapter.guard.trips == 1
    with pytest.raises(wa.errors.NotFinite, match="inputs"):
        adapter.predict(x * math.nan)
    assert adapter.guard.trips == 1


def test_audited_samples_raise_an_alarm_that_needs_no_other() -> None:
    guard = wa.Guard(audits=10)
    adapter = wa.adapt(net(), "tent", lr=1e-3, guard=guard)
    stream = mixed(6)
    for x, _ in stream[:3]:
        adapter.learn(adapter.predict(x))
        for _ in range(5):
            guard.audit(True)
    for _ in range(6):
        guard.audit(False)
    assert "audited" in str(adapter.learn(adapter.predict(stream[3][0])).tripped)
    assert guard.trips == 1


def test_audited_samples_that_are_right_overrule_every_suspicion() -> None:
    options = {"lr": 0.5, "statistics": "source"}
    for right, trips in ((True, False), (False, True)):
        adapter = wa.adapt(net(), "tent", guard=wa.Guard(audits=10), **options)
        for x, _ in mixed(40):
            adapter.learn(adapter.predict(x))
            for _ in range(5 * right):
                adapter.guard.audit(True)
        assert (adapter.guard.trips > 0) is trips


def test_its_state_goes_on_to_the_same_bits() -> None:
    options = {"lr": 0.5, "statistics": "source"}
    stream = mixed(60)
    whole, begun, resumed = (wa.adapt(net(), "tent", guard=True, **options) for _ in range(3))
    for x, _ in stream:
        whole.learn(whole.predict(x))
    for x, _ in stream[:25]:
        begun.learn(begun.predict(x))
    assert begun.guard.trips > 0
    resumed.load_state_dict(saved(begun.state_dict()))
    assert same(resumed.state_dict(), begun.state_dict())
    for x, _ in stream[25:]:
        resumed.learn(resumed.predict(x))
    assert whole.guard.trips > begun.guard.trips and same(resumed.state_dict(), whole.state_dict())


def test_a_state_without_a_guard_is_refused_by_a_guarded_adapter() -> None:
    with pytest.raises(wa.errors.StateMismatch, match="guard"):
        wa.adapt(net(), "tent", guard=True).load_state_dict(wa.adapt(net(), "tent").state_dict())


def test_reset_starts_it_anew_and_keeps_the_count() -> None:
    _, _, adapter = run(mixed(30), lr=0.5, statistics="source", guard=True)
    trips = adapter.guard.trips
    adapter.reset()
    fresh = wa.adapt(net(), "tent", lr=0.5, statistics="source", guard=True)
    assert trips > 0 and same(adapter.guard.state_dict(), fresh.guard.state_dict() | {"trips": trips})


@pytest.mark.parametrize("method", wa.methods.METHODS)
def test_it_goes_with_any_method(method: str) -> None:
    stream = mixed(3)
    needs = {"cotta": {"views": 2}, "eata": {"source": [stream[0][0]]}, "cema": {"teacher": net()}}.get(method, {})
    adapter = wa.adapt(net(), method, guard=True, annotator=who.Oracle(lambda query: query.index % CLASSES), **needs)
    for x, _ in stream:
        adapter.step(x)
    adapter.guard.rescue(4)
    assert adapter.guard.trips == 1 and torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


@pytest.mark.parametrize("options", [{"window": 0}, {"every": 0}, {"share": 1.5}, {"agree": -0.1}, {"audits": 0}])
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(wa.errors.BadConfig):
        wa.Guard(**options)


@pytest.mark.parametrize("window", [1, 8, 20])
def test_a_window_may_be_shorter_than_a_few_batches(window: int) -> None:
    adapter = wa.adapt(net(), "tent", lr=0.0, guard=wa.Guard(window=window, every=2))
    for x, _ in mixed(12, noise=0.5, n=4):
        adapter.step(x)
    assert adapter.guard is not None and adapter.guard.trips == 0


def test_one_guard_watches_one_adapter() -> None:
    guard = wa.Guard()
    wa.adapt(net(), "tent", guard=guard)
    with pytest.raises(wa.errors.BadConfig, match="another adapter"):
        wa.adapt(net(), "tent", guard=guard)
