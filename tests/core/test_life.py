"""Whatever is called in whatever order: does every label stay accounted for and every question in one place?"""

from __future__ import annotations

import math
from typing import Any

from core import nets
from core.checks import same, saved
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wise_atta import CANT_TELL, SKIP, Adapter, adapt, errors

RATIO, EXPIRES = 0.7, 4


def build() -> Adapter:
    return adapt(
        nets.make("tabular"), "wise", ratio=RATIO, lr=0.01, entropy="all", expires_after=EXPIRES, labels=1, slack=2
    )


class Life(RuleBasedStateMachine):
    """An adapter beside a plain account of what became of every question."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = build()
        self.waiting: list[Any] = []
        self.number = 0
        self.questions: dict[str, Any] = {}
        self.shown: set[str] = set()
        self.refunded = 0

    def ids(self, state: str) -> list[str]:
        return [name for name, (_, found) in self.questions.items() if found == state]

    @rule()
    def predict(self) -> None:
        out = self.adapter.predict(nets.batch("tabular", self.number + 1, n=3))
        self.number += 1
        assert out.number == self.number and len(out.queries) <= 1
        self.questions |= {query.id: (query.batch, "open") for query in out.queries}
        self.waiting.append(out)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        out = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        answers = self._answers(data)
        pending = [*self.ids("pending"), *(name for name, said in answers.items() if isinstance(said, int))]
        step = self.adapter.learn(out, answers)
        self._told(answers)
        assert sorted(step.learned) == sorted(set(pending))
        for name in pending:
            self.questions[name] = (self.questions[name][0], "learned")
        for name in self.ids("open"):
            if self.number - self.questions[name][0] >= EXPIRES:
                self.questions[name] = (self.questions[name][0], "expired")
                self.refunded += name not in self.shown
                assert name in step.expired

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        answers = self._answers(data)
        self.adapter.answer(answers)
        self._told(answers)

    @precondition(lambda self: self.questions)
    @rule(data=st.data())
    def show(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.questions)))
        self.adapter.show([name])
        if self.questions[name][1] == "open":
            self.shown.add(name)

    @precondition(lambda self: self.questions)
    @rule(data=st.data())
    def contradict(self, data: st.DataObject) -> None:
        """An answer that cannot stand, beside one that could, changes nothing."""
        name = data.draw(st.sampled_from(sorted(self.questions)))
        good = {other: 1 for other in self.ids("open")[:1] if other != name}
        before = self.adapter.state_dict()
        wrong, error = (99, errors.BadLabel)
        if self.questions[name][1] == "expired":
            wrong, error = (0, errors.UnknownQuery)
        try:
            self.adapter.answer(good | {name: wrong})
        except error:
            assert same(self.adapter.state_dict(), before)
        else:
            raise AssertionError("an answer that cannot stand was taken")

    @precondition(lambda self: not self.waiting)
    @rule()
    def move_to_another_process(self) -> None:
        resumed = build()
        resumed.load_state_dict(saved(self.adapter.state_dict()))
        self.adapter = resumed

    @invariant()
    def every_question_is_somewhere(self) -> None:
        counts = self.adapter.counts
        found = {state: len(self.ids(state)) for state in ("open", "pending", "learned", "cant_tell", "expired")}
        assert counts.asked == len(self.questions) and counts.shown == len(self.shown)
        assert counts.answered == found["pending"] + found["learned"] and counts.learned == found["learned"]
        assert (counts.cant_tell, counts.expired) == (found["cant_tell"], found["expired"])
        assert {query.id for query in self.adapter.open} == set(self.ids("open"))

    @invariant()
    def every_label_is_accounted_for(self) -> None:
        policy = self.adapter.policy
        assert policy.spent == len(self.questions) - self.refunded
        assert policy.seen == self.number and policy.spent <= math.floor(RATIO * self.number)

    def _answers(self, data: st.DataObject) -> dict[str, Any]:
        opened = self.ids("open")
        chosen = data.draw(st.lists(st.sampled_from(opened), unique=True)) if opened else []
        said = st.sampled_from([0, 1, 4, None, CANT_TELL, SKIP])
        return {name: data.draw(said) for name in chosen}

    def _told(self, answers: dict[str, Any]) -> None:
        for name, said in answers.items():
            if said is None:
                continue
            self.shown.add(name)
            if said is CANT_TELL:
                self.questions[name] = (self.questions[name][0], "cant_tell")
            elif said is not SKIP:
                self.questions[name] = (self.questions[name][0], "pending")


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=15, stateful_step_count=30, deadline=None, derandomize=True)
