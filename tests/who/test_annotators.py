"""Does every annotator keep the same manners, and does each answer as it says?"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from wise_atta import errors, who
from wise_atta.stream import Batch
from wise_atta.who import (
    CANT_TELL,
    SKIP,
    Annotator,
    Answer,
    Between,
    Callback,
    Delayed,
    Geometric,
    Inbox,
    Noisy,
    Oracle,
    Poisson,
    Query,
    Questions,
    Teacher,
)

CLASSES = 5


def question(number: int, index: int = 0) -> Query:
    inputs = torch.arange(CLASSES).roll(number).float().expand(index + 1, CLASSES)
    ids = [f"{number}/{place}" for place in range(index + 1)]
    return Query.of(Batch(inputs, ids=ids), number, index, torch.zeros(index + 1, CLASSES))


def truth(query: Query) -> int:
    return (query.batch + query.index) % CLASSES


def sometimes(query: Query) -> Any:
    return {0: CANT_TELL, 1: SKIP, 2: None}.get(query.batch % 4, truth(query))


class Answering(Inbox):
    """An inbox with somebody at it who answers whatever arrives."""

    def ask(self, queries: Any, now: int) -> None:
        super().ask(queries, now)
        for query in self.open():
            self.put(query.id, truth(query))


MAKERS: dict[str, Callable[[], Annotator]] = {
    "oracle": lambda: Oracle(truth),
    "mapping": lambda: Oracle({f"{number}/{index}": number % CLASSES for number in range(50) for index in range(3)}),
    "callback": lambda: Callback(sometimes),
    "teacher": lambda: Teacher(nn.Identity().eval(), cost=0),
    "inbox": Answering,
    "delayed": lambda: Delayed(Oracle(truth), batches=4),
    "scattered": lambda: Delayed(Oracle(truth), Geometric(mean=3), seed=1),
    "noisy": lambda: Noisy(Oracle(truth), rate=0.5, classes=CLASSES),
    "late, wrong and undecided": lambda: Delayed(Noisy(Callback(sometimes), 0.5, CLASSES), Between(0, 6)),
    "late people": lambda: Delayed(Answering(), Poisson(mean=2)),
}


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Callable[[], Annotator]:
    return MAKERS[request.param]


def live(annotator: Annotator, batches: range) -> list[Any]:
    """What comes back over some batches with two questions each."""
    heard: list[Any] = []
    for now in batches:
        annotator.ask([question(now, 0), question(now, 2)], now)
        heard.append((now, annotator.answers(now), annotator.shown(now)))
    return heard


def test_every_question_is_shown_and_answered_at_most_once(make: Callable[[], Annotator]) -> None:
    heard = live(make(), range(1, 30))
    asked = {f"{now}-{index}" for now in range(1, 30) for index in (0, 2)}
    for ids in ([name for _, answers, _ in heard for name in answers], [name for *_, shown in heard for name in shown]):
        assert ids
        assert len(ids) == len(set(ids))
        assert set(ids) <= asked
    assert all(answer.decides for _, answers, _ in heard for answer in answers.values())


def test_nobody_answers_before_the_question_was_shown(make: Callable[[], Annotator]) -> None:
    shown: set[str] = set()
    for _, answers, news in live(make(), range(1, 30)):
        shown |= set(news)
        assert set(answers) <= shown


def test_going_on_from_a_saved_state_gives_the_same_answers(make: Callable[[], Annotator]) -> None:
    whole = live(make(), range(1, 30))
    annotator = make()
    heard = live(annotator, range(1, 12))
    file = io.BytesIO()
    torch.save(annotator.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    annotator = make()
    annotator.load_state_dict(state)
    assert heard + live(annotator, range(12, 30)) == whole


def test_a_saved_state_does_not_change_with_its_owner(make: Callable[[], Annotator]) -> None:
    annotator = make()
    live(annotator, range(1, 6))
    state = annotator.state_dict()
    before = pickle.dumps(state)
    live(annotator, range(6, 12))
    assert pickle.dumps(state) == before


def test_reset_is_a_new_beginning(make: Callable[[], Annotator]) -> None:
    annotator = make()
    first = live(annotator, range(1, 12))
    annotator.reset()
    assert live(annotator, range(1, 12)) == first


def test_an_annotator_leaves_global_chance_alone(make: Callable[[], Annotator]) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    live(make(), range(1, 8))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_an_annotator_travels_by_pickle_and_copy(make: Callable[[], Annotator]) -> None:
    annotator = make()
    live(annotator, range(1, 6))
    twins = [pickle.loads(pickle.dumps(annotator)), copy.deepcopy(annotator)]
    went_on = live(annotator, range(6, 12))
    for twin in twins:
        assert repr(twin) == repr(annotator)
        assert twin.cost == annotator.cost
        assert live(twin, range(6, 12)) == went_on


def test_a_withdrawn_question_is_answered_now_or_never(make: Callable[[], Annotator]) -> None:
    annotator = make()
    live(annotator, range(1, 6))
    annotator.answers(5, last=[f"{now}-{index}" for now in range(1, 6) for index in (0, 2)] + ["never asked"])
    assert all(not annotator.answers(now) for now in range(6, 60))


@pytest.mark.parametrize("state", [{}, None, {"kind": "Stranger"}, "x"])
def test_a_foreign_state_is_refused(make: Callable[[], Annotator], state: Any) -> None:
    annotator = make()
    live(annotator, range(1, 6))
    before = pickle.dumps(annotator.state_dict())
    kind = annotator.state_dict()["kind"]
    for foreign in (state, {"kind": kind}, annotator.state_dict() | {"annotator": {}, "questions": [{}]}):
        with pytest.raises(errors.StateMismatch):
            annotator.load_state_dict(foreign)
    assert pickle.dumps(annotator.state_dict()) == before


def test_annotators_are_found_by_name() -> None:
    oracle = who.annotator("oracle", truth={"a": 1})
    late = who.annotator("delayed", annotator=oracle, batches=7, seed=3)
    assert repr(late) == "Delayed(Oracle(1 samples), batches=7, seed=3)"
    with pytest.raises(errors.UnknownName, match="Did you mean 'oracle'"):
        who.annotator("oracel")
    with pytest.raises(errors.BadConfig, match="missing a required argument: 'rate'"):
        who.annotator("noisy", annotator=oracle)


# -- one by one ---------------------------------------------------------------------------------------------------


def test_an_oracle_says_which_truth_is_missing() -> None:
    oracle = Oracle({"1/0": 0})
    oracle.ask([question(1), question(2)], now=2)
    with pytest.raises(errors.BadInput, match="'2/0' of question '2-0'"):
        oracle.answers(now=2)
    oracle.truth = {"2/0": 1}
    assert {name: answer.label for name, answer in oracle.answers(now=2).items()} == {"1-0": 0, "2-0": 1}


@pytest.mark.parametrize("label", [-1, CLASSES, True, 1.0])
def test_an_oracle_with_wrong_labels_is_found_out(label: Any) -> None:
    oracle = Oracle(lambda query: label)
    oracle.ask([question(1)], now=1)
    with pytest.raises(errors.BadLabel):
        oracle.answers(now=1)


def test_a_function_is_asked_again_until_it_decides() -> None:
    replies = iter([None, SKIP, Answer(4, by="ann"), 0])
    callback = Callback(lambda query: next(replies))
    callback.ask([question(1)], now=1)
    assert (callback.answers(1), callback.shown(1)) == ({}, ["1-0"])
    assert (callback.answers(2), callback.shown(2)) == ({}, [])
    assert callback.answers(3) == {"1-0": Answer(4, by="ann")}
    assert callback.answers(4) == {}


def test_a_function_is_not_bothered_with_withdrawn_questions() -> None:
    calls: list[str] = []
    callback = Callback(lambda query: calls.append(query.id))
    callback.ask([question(1), question(2)], now=2)
    callback.answers(2, last=["1-0"])
    callback.answers(3)
    assert calls == ["1-0", "2-0", "2-0"]


def test_a_question_outlives_a_function_that_fails() -> None:
    calls: list[str] = []

    def function(query: Query) -> int:
        calls.append(query.id)
        if len(calls) == 2:
            raise ConnectionError("nobody there")
        return 1

    callback = Callback(function)
    callback.ask([question(1), question(2)], now=2)
    with pytest.raises(ConnectionError):
        callback.answers(2)
    assert callback.shown(2) == []
    assert list(callback.answers(3)) == ["1-0", "2-0"]


class Doubler(nn.Module):
    """Takes two inputs by name, and answers like models that return an object."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.norm(tokens * mask))


def test_a_teacher_takes_trees_and_gives_its_most_likely_class() -> None:
    inputs = {"tokens": torch.tensor([[1.0, 2.0, 9.0, 3.0, 4.0]]), "mask": torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]])}
    model = Doubler().eval()
    before = copy.deepcopy(model.state_dict())
    teacher = Teacher(model)
    teacher.ask([Query.of(Batch(inputs), 1, 0, torch.zeros(1, CLASSES))], now=1)
    assert teacher.answers(1) == {"1-0": Answer(4, by="teacher")}
    assert not any(part.training for part in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.norm.weight.grad is None


def test_a_teacher_in_training_mode_is_refused_and_left_so() -> None:
    model = nn.Sequential(nn.Identity(), nn.Dropout())
    with pytest.raises(errors.BadConfig, match="eval"):
        Teacher(model)
    assert model.training
    teacher = Teacher(model.eval())
    model[1].train()
    teacher.ask([question(1)], now=1)
    with pytest.raises(errors.BadConfig, match="eval"):
        teacher.answers(1)
    assert model[1].training


@pytest.mark.parametrize(
    ("model", "error", "reason"),
    [
        (lambda x: x[:, :3], errors.BadConfig, "3 classes and the student 5"),
        (lambda x: x[0], errors.BadInput, r"\[1, C\]"),
        (lambda x: "cat", errors.BadInput, "not str"),
        (lambda x: x * float("nan"), errors.NotFinite, "'1-0'"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(model: Any, error: type[Exception], reason: str) -> None:
    teacher = Teacher(model)
    teacher.ask([question(1)], now=1)
    with pytest.raises(error, match=reason):
        teacher.answers(1)


def test_cost_passes_through_wrappers() -> None:
    assert Delayed(Noisy(Teacher(truth, cost=0), 0.1, CLASSES)).cost == 0
    assert Delayed(Oracle(truth)).cost == 1
    for cost in (-1, 2):
        with pytest.raises(errors.BadConfig, match="cost"):
            Teacher(truth, cost=cost)


def test_a_fixed_delay_counts_batches() -> None:
    late = Delayed(Oracle(truth), batches=50)
    late.ask([question(3)], now=3)
    assert [now for now in range(3, 200) if late.answers(now)] == [53]


def test_drawn_delays_bring_answers_out_of_order() -> None:
    order = [name for _, answers, _ in live(Delayed(Oracle(truth), Between(0, 9)), range(1, 30)) for name in answers]
    assert order != sorted(order, key=lambda name: [int(part) for part in name.split("-")])


@pytest.mark.parametrize("delay", [Between(3, 7), Geometric(mean=5.0), Poisson(mean=5.0)], ids=repr)
def test_drawn_delays_have_their_mean(delay: Any) -> None:
    late = Delayed(Oracle(truth), delay)
    queries = [question(number) for number in range(1000)]
    late.ask(queries, now=0)
    came = [now for now in range(200) for _ in late.answers(now)]
    assert len(came) == 1000
    # Four standard errors of the widest, Geometric(5), whose standard deviation is √30.
    assert abs(np.mean(came) - 5) < 4 * np.sqrt(30 / 1000)


def test_delay_and_noise_depend_on_seed_and_question_alone() -> None:
    def heard(seed: int, backwards: bool) -> dict[str, tuple[int, Any]]:
        late = Delayed(Noisy(Oracle(truth), 0.5, CLASSES, seed=seed), Between(0, 20), seed=seed)
        queries = [question(number) for number in range(40)]
        late.ask(queries[::-1] if backwards else queries, now=0)
        return {name: (now, answer.label) for now in range(30) for name, answer in late.answers(now).items()}

    assert heard(0, False) == heard(0, True)
    assert heard(0, False) != heard(1, False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Delayed(Oracle(truth), -1),
        lambda: Delayed(Oracle(truth), "poisson"),
        lambda: Between(3, 2),
        lambda: Between(-1, 2),
        lambda: Geometric(-1),
        lambda: Poisson(float("nan")),
        lambda: Noisy(Oracle(truth), 1.1, CLASSES),
        lambda: Noisy(Oracle(truth), float("nan"), CLASSES),
        lambda: Noisy(Oracle(truth), 0.1, 1),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(errors.BadConfig):
        make()


def test_a_distribution_of_negative_delays_is_found_out() -> None:
    class Back:
        def draw(self, generator: np.random.Generator) -> int:
            return -2

    late = Delayed(Oracle(truth), Back())
    with pytest.raises(errors.BadConfig, match="-2"):
        late.ask([question(1)], now=1)
    assert late.answers(9) == {}


def test_noise_is_as_frequent_as_it_says_and_spread_over_the_other_classes() -> None:
    noisy = Noisy(Oracle(lambda query: 2), rate=0.4, classes=CLASSES)
    noisy.ask([question(number) for number in range(2000)], now=0)
    counts = np.bincount([answer.label for answer in noisy.answers(0).values()], minlength=CLASSES)
    expected = np.array([0.1, 0.1, 0.6, 0.1, 0.1]) * 2000
    # Each count is binomial: within four standard deviations.
    assert (np.abs(counts - expected) < 4 * np.sqrt(expected * (1 - expected / 2000))).all()


def test_noise_keeps_who_answered_and_leaves_cant_tell_alone() -> None:
    noisy = Noisy(Callback(lambda query: CANT_TELL if query.batch == 1 else Answer(0, "ann", 0.5)), 1.0, CLASSES)
    noisy.ask([question(1), question(2)], now=2)
    answers = noisy.answers(2)
    assert answers["1-0"] == Answer(CANT_TELL)
    assert answers["2-0"].label != 0
    assert (answers["2-0"].by, answers["2-0"].weight) == ("ann", 0.5)


def test_noise_for_another_number_of_classes_is_refused() -> None:
    noisy = Noisy(Oracle(truth), 0.5, CLASSES + 1)
    with pytest.raises(errors.BadConfig, match="made for 6"):
        noisy.ask([question(1)], now=1)


# -- the whole conversation ---------------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    low=st.integers(0, 6),
    spread=st.integers(0, 6),
    expires_after=st.integers(0, 8),
    stop=st.integers(1, 24),
    seed=st.integers(0, 99),
)
def test_late_labels_are_learned_once_or_expire_wherever_the_run_stops(
    low: int, spread: int, expires_after: int, stop: int, seed: int
) -> None:
    def start() -> tuple[Questions, Annotator]:
        annotator = Delayed(Noisy(Callback(sometimes), 0.3, CLASSES, seed), Between(low, low + spread), seed)
        return Questions(CLASSES, expires_after), annotator

    def run(questions: Questions, annotator: Annotator, batches: range) -> list[Any]:
        happened: list[Any] = []
        for now in batches:
            queries = [question(now, 0), question(now, 1)] if now < 20 else []
            questions.ask(queries)
            annotator.ask(queries, now)
            new = questions.answer(annotator.answers(now, last=questions.closing(now)))
            questions.show(annotator.shown(now))
            assert all(now - item.query.asked_at <= expires_after for item in new)
            happened += [(now, item.id, item.label) for item in questions.pending]
            ids = questions.closing(now)
            happened.append((ids, questions.give_up(ids)))
            questions.close(item.id for item in questions.pending)
        return happened

    questions, annotator = start()
    whole = run(questions, annotator, range(1, 40))
    counts = questions.counts
    assert counts.asked == counts.answered + counts.cant_tell + counts.expired == 38
    assert counts.answered == counts.learned
    assert questions.open == []
    if low > expires_after:
        assert counts.expired == 38
    if low + spread <= expires_after:
        assert counts.learned == 10, "batches 3, 7, …, 19 have two classes each"

    first, second = start(), start()
    happened = run(*first, range(1, stop))
    for part, twin in zip(first, second, strict=True):
        twin.load_state_dict(part.state_dict())
    assert happened + run(*second, range(stop, 40)) == whole


# -- people -------------------------------------------------------------------------------------------------------


def inbox_with(*numbers: int, **options: Any) -> Inbox:
    inbox = Inbox(**options)
    inbox.ask([question(number) for number in numbers], now=max(numbers))
    return inbox


def test_a_look_at_the_ids_shows_nothing_to_anybody() -> None:
    inbox = inbox_with(1, 2, 3)
    assert inbox.waiting() == ["1-0", "2-0", "3-0"]
    assert inbox.shown(3) == []
    assert [query.id for query in inbox.open(limit=1)] == ["1-0"]
    assert inbox.show("3-0").sample_id == "3/0"
    assert inbox.shown(3) == ["1-0", "3-0"]
    inbox.open()
    assert inbox.shown(3) == ["2-0"]


def test_an_answer_from_a_person_arrives_once() -> None:
    inbox = inbox_with(1, 2)
    inbox.put("2-0", Answer(3, by="ann"))
    assert inbox.waiting() == ["1-0"]
    assert inbox.shown(2) == ["2-0"]
    assert inbox.answers(2) == {"2-0": Answer(3, by="ann")}
    inbox.put("2-0", 3)
    assert inbox.answers(3) == {}


def test_a_skipped_question_waits_on_but_was_shown() -> None:
    inbox = inbox_with(1)
    inbox.put("1-0", None)
    assert inbox.shown(1) == []
    inbox.put("1-0", SKIP)
    assert (inbox.waiting(), inbox.shown(1), inbox.answers(1)) == (["1-0"], ["1-0"], {})


def test_people_are_told_what_is_wrong_with_an_answer() -> None:
    inbox = inbox_with(1, 2, 3)
    inbox.put("1-0", CANT_TELL)
    inbox.put("2-0", 2)
    inbox.answers(3, last=["3-0"])
    before = pickle.dumps(inbox.state_dict())
    for name, answer, error in [
        ("1-0", 2, errors.Conflict),
        ("2-0", 1, errors.Conflict),
        ("2-0", CANT_TELL, errors.Conflict),
        ("2-0", True, errors.BadLabel),
        ("3-0", 0, errors.UnknownQuery),
        ("9-9", 0, errors.UnknownQuery),
    ]:
        with pytest.raises(error):
            inbox.put(name, answer)
    with pytest.raises(errors.UnknownQuery, match="'3-0'"):
        inbox.show("3-0")
    assert pickle.dumps(inbox.state_dict()) == before
    inbox = inbox_with(1)
    with pytest.raises(errors.BadLabel):
        inbox.put("1-0", CLASSES)
    assert inbox.shown(1) == []


def test_an_inbox_forgets_the_oldest_answers() -> None:
    inbox = inbox_with(*range(1, 6), remember=2)
    for number in range(1, 6):
        inbox.put(f"{number}-0", 0)
    assert len(inbox.answers(5)) == 5
    inbox.put("5-0", 0)
    with pytest.raises(errors.UnknownQuery):
        inbox.put("1-0", 0)


def test_answers_from_many_threads_arrive_once_each() -> None:
    inbox, people, questions = Inbox(), 4, 200
    accepted: list[tuple[str, int]] = []
    done = threading.Event()

    def person(number: int) -> None:
        while not (done.is_set() and not inbox.waiting()):
            for query in inbox.open(limit=5):
                try:
                    inbox.put(query.id, number)
                except errors.Conflict:
                    continue  # somebody else was faster
                accepted.append((query.id, number))

    threads = [threading.Thread(target=person, args=(number,)) for number in range(people)]
    for thread in threads:
        thread.start()
    heard: list[tuple[str, Any]] = []
    shown: list[str] = []
    for now in range(questions):
        inbox.ask([question(now)], now)
        heard += [(name, answer.label) for name, answer in inbox.answers(now).items()]
        shown += inbox.shown(now)
        if now % 20 == 0:
            pickle.dumps(inbox.state_dict())
    done.set()
    for thread in threads:
        thread.join(timeout=30)
    heard += [(name, answer.label) for name, answer in inbox.answers(questions).items()]
    shown += inbox.shown(questions)
    assert sorted(heard) == sorted(accepted)
    assert sorted(shown) == sorted(name for name, _ in heard) == sorted(f"{now}-0" for now in range(questions))
