"""Is every question kept through its whole life, whatever is said about it and when?"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from core import nets
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

import wise_atta.who.query as query_module
import wise_atta.who.questions as desk_module
from wise_atta import adapt, errors
from wise_atta.stream import Batch
from wise_atta.who import CANT_TELL, SKIP, Answer, Counts, Inbox, Query, Questions

CLASSES = 4


def question(number: int, index: int = 0) -> Query:
    inputs = torch.full((index + 1, 3), float(number))
    return Query.of(Batch(inputs, meta={"domain": "fog"}), number, index, torch.full((index + 1, CLASSES), 0.5))


def same(a: Any, b: Any) -> bool:
    """Equality that also holds for tensors, and for the order of mappings."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def saved(state: Any) -> Any:
    """The state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def expire(questions: Questions, now: int) -> tuple[list[str], int]:
    """Close what nobody answered in time: the ids, and how many nobody was ever shown."""
    ids = questions.closing(now)
    return ids, questions.give_up(ids)


def questions_with(*answers: Any, **options: Any) -> Questions:
    """A questions with one question a batch, from 1, each with its answer."""
    questions = Questions(CLASSES, **options)
    questions.ask([question(number) for number in range(1, len(answers) + 1)])
    questions.answer({f"{number}-0": answer for number, answer in enumerate(answers, 1)})
    return questions


def test_a_label_goes_through_its_life() -> None:
    questions = Questions(CLASSES)
    context = {"values": torch.ones(2)}
    questions.ask([question(1, 2)], context)
    assert questions.counts == Counts(asked=1)
    questions.show(["1-2"])
    assert questions.counts == Counts(asked=1, shown=1)
    (new,) = questions.answer({"1-2": Answer(3, by="ann", weight=0.5)})
    assert (new.id, new.label, new.answer.by, new.answer.weight) == ("1-2", 3, "ann", 0.5)
    assert torch.equal(new.context["values"], context["values"])
    assert torch.equal(new.query.input, torch.ones(3))
    assert [item.id for item in questions.pending] == ["1-2"]
    assert questions.open == []
    questions.close(["1-2"])
    assert questions.pending == []
    assert questions.counts == Counts(asked=1, shown=1, answered=1, learned=1)


def test_who_answers_has_seen_the_question() -> None:
    assert questions_with(0, CANT_TELL, SKIP, None).counts.shown == 3


def test_the_first_answer_stays_when_the_same_comes_again() -> None:
    questions = questions_with(Answer(1, by="ann", weight=2.0))
    assert questions.answer({"1-0": Answer(1, by="bob", weight=9.0)}) == []
    assert questions.pending[0].answer == Answer(1, by="ann", weight=2.0)
    questions.close(["1-0"])
    before = questions.state_dict()
    assert questions.answer({"1-0": 1}) == []
    assert same(questions.state_dict(), before)


@pytest.mark.parametrize("second", [2, CANT_TELL, Answer(0)])
@pytest.mark.parametrize("learned", [False, True])
def test_a_different_answer_is_a_conflict_before_and_after_learning(second: Any, learned: bool) -> None:
    questions = questions_with(1)
    if learned:
        questions.close(["1-0"])
    with pytest.raises(errors.Conflict, match="'1-0' was answered 1"):
        questions.answer({"1-0": second})


def test_how_old_a_label_was_when_it_was_learned_stays_with_it() -> None:
    questions = questions_with(1, 0)
    questions.close(["1-0"], number=4)
    state = questions.state_dict()
    assert state["ages"] == {"1-0": 3}
    state["pending"][0]["age"] = 2
    questions.load_state_dict(state)
    assert questions.pending[0].age_at(50) == 2
    # As an earlier release has saved it.
    del state["ages"], state["pending"][0]["age"]
    questions.load_state_dict(state)
    assert questions.pending[0].age_at(50) == 48
    assert questions.state_dict()["ages"] == {}


def test_cant_tell_closes_the_question_and_a_class_afterwards_is_a_conflict() -> None:
    questions = questions_with(CANT_TELL)
    assert questions.open == []
    assert questions.answer({"1-0": CANT_TELL}) == []
    with pytest.raises(errors.Conflict, match="cant_tell"):
        questions.answer({"1-0": 0})
    assert questions.counts == Counts(asked=1, shown=1, cant_tell=1)


def test_skip_leaves_the_question_open() -> None:
    questions = questions_with(SKIP)
    assert [query.id for query in questions.open] == ["1-0"]
    assert questions.answer({"1-0": 2})[0].label == 2


@pytest.mark.parametrize("answer", [None, SKIP])
def test_skip_and_not_yet_say_nothing_about_an_ended_question(answer: Any) -> None:
    questions = questions_with(1, CANT_TELL, None, expires_after=0)
    expire(questions, now=9)
    before = questions.state_dict()
    assert questions.answer({"1-0": answer, "2-0": answer, "3-0": answer}) == []
    assert same(questions.state_dict(), before)


def test_a_question_can_be_answered_up_to_its_last_batch() -> None:
    questions = questions_with(None, None, expires_after=5)
    assert expire(questions, now=5) == ([], 0)
    assert questions.closing(now=6) == ["1-0"]
    assert expire(questions, now=6) == (["1-0"], 1)
    assert questions.closing(now=7) == ["2-0"]
    assert questions.answer({"2-0": 3})[0].label == 3
    assert expire(questions, now=7) == ([], 0)
    with pytest.raises(errors.UnknownQuery, match="'1-0' has expired"):
        questions.answer({"1-0": 0})


def test_only_what_nobody_was_shown_is_returned() -> None:
    questions = questions_with(None, None, SKIP, 0, expires_after=1)
    questions.show(["1-0"])
    assert expire(questions, now=100) == (["1-0", "2-0", "3-0"], 1)
    assert expire(questions, now=101) == ([], 0)
    assert [item.id for item in questions.pending] == ["4-0"], "what was answered does not expire"


def test_without_a_limit_nothing_expires() -> None:
    assert expire(questions_with(None), now=10**9) == ([], 0)


def test_a_label_is_learned_once() -> None:
    questions = questions_with(1, 2)
    questions.close(["1-0"])
    for ids in (["1-0"], ["2-0", "2-0"], ["2-0", "1-0"]):
        with pytest.raises(errors.AlreadyLearned):
            questions.close(ids)
    assert questions.counts.learned == 1


def test_nothing_is_learned_from_questions_without_a_class() -> None:
    questions = questions_with(None, None, expires_after=0)
    expire(questions, now=1)
    for ids, reason in ((["2-0"], "no answer yet"), (["1-0"], "expired"), (["9-9"], "never asked")):
        with pytest.raises(errors.UnknownQuery, match=reason):
            questions.close(ids)


def test_only_the_latest_ended_questions_are_remembered() -> None:
    questions = questions_with(*[0] * 5, remember=2)
    questions.close([f"{number}-0" for number in range(1, 6)])
    assert len(questions.state_dict()["closed"]) == 2
    assert questions.answer({"5-0": 0, "4-0": 0}) == []
    with pytest.raises(errors.UnknownQuery, match=r"'3-0'.*forgotten"):
        questions.answer({"3-0": 0})


def test_an_id_is_asked_once() -> None:
    questions = questions_with(0, None, CANT_TELL)
    for queries in ([question(1)], [question(2)], [question(3)], [question(4), question(4)]):
        with pytest.raises(errors.BadInput, match="asked before"):
            questions.ask(queries)
    assert questions.counts.asked == 3


def test_wrong_questions_are_refused_together() -> None:
    questions = Questions(CLASSES + 1)
    with pytest.raises(errors.BadInput, match="4 classes"):
        questions.ask([question(1)])
    questions = Questions(CLASSES)
    with pytest.raises(errors.BadInput, match=r"context of a question\['f'\] is a function"):
        questions.ask([question(1), question(2)], {"f": question})
    assert questions.counts == Counts()


def test_answers_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(errors.BadInput, match="map question ids"):
        questions_with(None).answer([("1-0", 1)])


@pytest.mark.parametrize(
    "options", [{"classes": 0}, {"classes": 2, "expires_after": -1}, {"classes": 2, "remember": -1}], ids=str
)
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(errors.BadConfig, match=list(options)[-1]):
        Questions(**options)


def _without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: {},
        lambda state: None,
        lambda state: state | {"classes": 7},
        lambda state: _without(state, "closed"),
        lambda state: state | {"open": []},
        lambda state: state | {"open": [{"query": {"id": "1-0"}, "context": None, "shown": False}]},
        lambda state: state | {"counts": {"asked": 3}},
        lambda state: state | {"counts": {"questions": 3}},
    ],
)
def test_a_foreign_or_damaged_state_is_refused(damage: Any) -> None:
    questions = questions_with(1, None, CANT_TELL)
    before = questions.state_dict()
    with pytest.raises(errors.StateMismatch):
        questions.load_state_dict(damage(copy.deepcopy(before)))
    assert same(questions.state_dict(), before)


def test_reset_forgets_everything() -> None:
    questions = questions_with(1, None, CANT_TELL)
    questions.reset()
    assert same(questions.state_dict(), Questions(CLASSES).state_dict())


LABELS = st.integers(0, CLASSES - 1)
ANSWERS = st.sampled_from([0, 1, 2, 3, CANT_TELL, SKIP, None])


class Life(RuleBasedStateMachine):
    """A questions beside a plain account of what should have happened: id → where its life stands."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = Questions(CLASSES, expires_after=3)
        self.now = 1
        self.asked_at: dict[str, int] = {}
        self.shown: set[str] = set()
        self.said: dict[str, Any] = {}
        self.learned: list[str] = []
        self.stale: list[str] = []
        self.expired: set[str] = set()

    def open(self) -> list[str]:
        return [name for name in self.asked_at if name not in self.said and name not in self.expired]

    def some(self, data: st.DataObject, ids: list[str]) -> list[str]:
        return data.draw(st.lists(st.sampled_from(ids), unique=True, max_size=4)) if ids else []

    def refused(self, kind: type[Exception], call: Any, *given: Any) -> None:
        before = self.questions.state_dict()
        with pytest.raises(kind):
            call(*given)
        assert same(self.questions.state_dict(), before)

    @rule(count=st.integers(0, 3))
    def ask(self, count: int) -> None:
        start = sum(at == self.now for at in self.asked_at.values())
        queries = [question(self.now, start + place) for place in range(count)]
        self.questions.ask(queries, torch.tensor([self.now]))
        self.asked_at |= {query.id: self.now for query in queries}

    @rule(batches=st.integers(1, 3))
    def time_passes(self, batches: int) -> None:
        due = [name for name in self.open() if self.now - self.asked_at[name] >= 3]
        assert self.questions.closing(self.now) == due
        assert expire(self.questions, self.now) == (due, len(set(due) - self.shown))
        self.expired |= set(due)
        self.now += batches

    @precondition(lambda self: self.asked_at)
    @rule(data=st.data())
    def show(self, data: st.DataObject) -> None:
        ids = self.some(data, list(self.asked_at))
        self.questions.show(ids)
        self.shown |= set(ids) & set(self.open())

    @precondition(lambda self: self.asked_at)
    @rule(data=st.data())
    def answer_late_again_and_out_of_order(self, data: st.DataObject) -> None:
        ids = self.some(data, list(self.asked_at))
        answers = {name: self.said.get(name, None if name in self.expired else data.draw(ANSWERS)) for name in ids}
        fresh = {name: said for name, said in answers.items() if name in self.open() and said is not None}
        labelled = [name for name, said in fresh.items() if isinstance(said, int)]
        before = self.questions.state_dict()
        assert self.questions.read(answers) == {name: Answer(said) for name, said in fresh.items()}
        assert same(self.questions.state_dict(), before)
        new = self.questions.answer(answers)
        assert [item.id for item in new] == labelled
        assert all(item.label == answers[item.id] for item in new)
        assert all(item.context.tolist() == [item.query.asked_at] for item in new)
        self.shown |= set(fresh)
        self.said |= {name: said for name, said in fresh.items() if said is not SKIP}

    @precondition(lambda self: self.asked_at)
    @rule(data=st.data(), last=st.booleans())
    def answer_wrongly(self, data: st.DataObject, last: bool) -> None:
        wrong: list[tuple[str, Any, type[Exception]]] = [("0-0", 1, errors.UnknownQuery)]
        wrong += [(name, data.draw(LABELS), errors.UnknownQuery) for name in self.expired]
        wrong += [
            (name, CANT_TELL if isinstance(said, int) else 0, errors.Conflict) for name, said in self.said.items()
        ]
        wrong += [
            (name, (said + 1) % CLASSES, errors.Conflict) for name, said in self.said.items() if said is not CANT_TELL
        ]
        wrong += [(name, bad, errors.BadLabel) for name in self.open() for bad in (-1, CLASSES, True, 0.5)]
        name, bad, kind = data.draw(st.sampled_from(wrong))
        good = {other: 0 for other in self.open() if other != name}
        answers = {**good, name: bad} if last else {name: bad, **good}
        self.refused(kind, self.questions.read, answers)
        self.refused(kind, self.questions.answer, answers)

    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        ids = self.some(data, [item.id for item in self.questions.pending])
        self.questions.close(ids)
        self.learned += ids

    @rule(data=st.data())
    def dismiss(self, data: st.DataObject) -> None:
        ids = self.some(data, [item.id for item in self.questions.pending])
        self.questions.close(ids, "stale")
        self.stale += ids

    @precondition(lambda self: self.asked_at)
    @rule(data=st.data())
    def learn_what_cannot_be_learned(self, data: st.DataObject) -> None:
        pending = [item.id for item in self.questions.pending]
        name = data.draw(st.sampled_from(list(self.asked_at)))
        if name in pending:
            self.refused(errors.AlreadyLearned, self.questions.close, [*pending, name])
        else:
            kind = errors.AlreadyLearned if name in self.said else errors.UnknownQuery
            self.refused(kind, self.questions.close, [*pending, name])

    @rule()
    def ask_again(self) -> None:
        names = list(self.asked_at)[-1:]
        old = [question(*map(int, name.split("-"))) for name in names]
        if old:
            self.refused(errors.BadInput, self.questions.ask, [question(10**6), *old])

    @rule()
    def go_on_in_a_new_process(self) -> None:
        state = self.questions.state_dict()
        after = Questions(CLASSES, expires_after=3)
        after.load_state_dict(saved(state))
        assert same(after.state_dict(), state)
        self.questions = after

    @invariant()
    def everything_adds_up(self) -> None:
        labelled = [name for name, said in self.said.items() if isinstance(said, int)]
        assert [query.id for query in self.questions.open] == self.open()
        ended = {*self.learned, *self.stale}
        assert [item.id for item in self.questions.pending] == [name for name in labelled if name not in ended]
        assert asdict(self.questions.counts) == {
            "asked": len(self.asked_at),
            "shown": len(self.shown),
            "answered": len(labelled),
            "learned": len(set(self.learned)),
            "cant_tell": len(self.said) - len(labelled),
            "expired": len(self.expired),
            "stale": len(set(self.stale)),
        }
        assert len(self.learned) + len(self.stale) == len(ended)


Life.TestCase.settings = settings(derandomize=True, max_examples=60, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase


def test_what_is_elsewhere_comes_to_the_host_if_its_question_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    questions, values, fetched = Questions(CLASSES), torch.full((2,), 5.0), []
    monkeypatch.setattr(query_module, "on_host", lambda tensor: False)
    for module in (query_module, desk_module):
        monkeypatch.setattr(module, "to_host", lambda tensor: fetched.append(tensor) or tensor.clone())  # type: ignore[func-returns-value]
    questions.ask([question(1), question(2)], {"values": values})
    values.fill_(7)
    questions.answer({"1-0": 0})
    questions.close(["1-0"])
    assert not fetched, "nobody needs what belongs to a question that is closed"
    questions.keep()
    assert len(fetched) == 3, "logits, input and context of the open one"
    (item,) = questions.state_dict()["open"]
    assert item["context"]["values"].tolist() == [5, 5] and len(fetched) == 3


@pytest.mark.parametrize("shadow", [False, True])
def test_questions_come_to_the_host_with_the_next_batch_though_it_asks_nothing(
    shadow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapt(nets.make(), "wise", ratio=1.0, policy="uniform", statistics="batch", shadow=shadow)
    monkeypatch.setattr(query_module, "on_host", lambda tensor: False)
    adapter.learn(adapter.predict(nets.batch()))
    (query,) = adapter.open
    assert "input" not in vars(query)
    answering, seen = adapter._answering, list[bool]()
    monkeypatch.setattr(adapter, "_answering", lambda inputs: seen.append("input" in vars(query)) or answering(inputs))
    adapter.predict(nets.batch(number=2), ask=False)
    assert "input" in vars(query) and seen == [True] * shadow, "the device works for the answer already"


def test_what_was_loaded_onto_an_accelerator_does_not_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    questions, loaded, inbox = Questions(CLASSES), Questions(CLASSES), Inbox()
    questions.ask([question(1), question(2)], {"values": torch.ones(2)})
    questions.answer({"1-0": 0})
    inbox.ask(questions.open, now=2)
    states, there = (saved(questions.state_dict()), saved(inbox.state_dict())), list[Tensor]()
    copied = query_module.owned

    def owned(tensor: Tensor, device: object = None) -> Tensor:
        copies = copied(tensor)
        there.extend([copies] if device == "cpu" else [])
        return copies

    monkeypatch.setattr(query_module, "on_host", lambda tensor: any(tensor is known for known in there))
    monkeypatch.setattr(query_module, "owned", owned)
    loaded.load_state_dict(states[0])
    inbox.load_state_dict(states[1])
    (pending,), (waiting,), (shown,) = loaded.pending, loaded.open, inbox.open()
    found = [pending.context["values"]]
    for query in (pending.query, waiting, shown):
        found += [vars(query)["logits"], vars(query)["input"]]
    assert all(map(query_module.on_host, found))


def test_questions_of_one_batch_share_their_context_still_when_it_is_kept() -> None:
    questions, values = Questions(CLASSES), torch.ones(2)
    questions.ask([question(1), question(2)], {"values": values})
    first, second = (item["context"]["values"] for item in questions.state_dict()["open"])
    assert first.data_ptr() == second.data_ptr() != values.data_ptr() and torch.equal(first, values)


def test_a_question_given_up_twice_in_one_call_is_given_up_once() -> None:
    questions = Questions()
    questions.ask([question(1), question(1, 1)])
    assert questions.give_up(["1-0", "1-0"]) == 1
    assert questions.counts == Counts(asked=2, expired=1)
    Questions().load_state_dict(saved(questions.state_dict()))
