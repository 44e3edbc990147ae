"""Every policy, utility, selector, annotator, update rule, objective and method passes `wise_atta.conformance`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conformance.examples import CASES, cases, pictures
from core import nets
from torch import Tensor

from wise_atta import Anchor, Classifier, conformance, errors, how, methods, what, when, who
from wise_atta.conformance import ALL, KINDS, Case, ContractBroken, check, same
from wise_atta.how import Labels
from wise_atta.model import Forward
from wise_atta.view import View

CHECKED = {f"{name}-{one.__name__}": (case, one) for name, case in CASES.items() for one in KINDS[case.kind][2]}


def test_every_registered_part_is_here() -> None:
    kinds = {name.split()[1] for name in CASES}
    for registry in (when.POLICIES, what.SELECTORS, who.ANNOTATORS):
        assert {kind.__name__ for kind in registry.values()} <= kinds
    assert {f"utility {name}" for name in when.UTILITIES} | {f"method {name}" for name in methods.METHODS} <= set(CASES)
    assert all(case.kind == name.split()[0] for name, case in CASES.items())


@pytest.mark.parametrize(("case", "holds"), CHECKED.values(), ids=list(CHECKED))
def test_a_part_keeps_the_contract(case: Case, holds: Callable[[Case], None]) -> None:
    holds(case)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_part_can_be_pickled_before_use(case: Case) -> None:
    part = case.make()
    copy = pickle.loads(pickle.dumps(part))
    assert repr(copy) == repr(part)
    assert same(case.run(case.start(copy), ALL), case.run(case.start(part), ALL))


ADAPTING = {name: case for name, case in cases(torch.float32).items() if case.adapts}


@pytest.mark.parametrize("case", ADAPTING.values(), ids=list(ADAPTING))
def test_a_rule_keeps_single_precision(case: Case) -> None:
    conformance.leaves_model_alone(case)  # all other tests here are in float64


# -- parts that break it ----------------------------------------------------------------------------------------------


class Overdrawing(when.Uniform):
    """Grants a label that the account does not have."""

    def decide(self, score: float, want: int = 1, samples: int = 1) -> int:
        granted = super().decide(score, want, samples)
        self.account.spent += want - granted
        return want

    def foresee(self, want: int = 1, samples: int = 1) -> tuple[int, int]:
        return want, want


class Generous(when.Uniform):
    """Grants labels without charging them."""

    def decide(self, score: float, want: int = 1, samples: int = 1) -> int:
        return max(super().decide(score, want, samples), int(score > 3 and want))

    def foresee(self, want: int = 1, samples: int = 1) -> tuple[int, int]:
        return 0, want


class Unforgetting(when.Uniform):
    """Remembers a score, and does not forget it in an undo."""

    best = 0.0

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        self.best = max(self.best, score)
        return want * (score >= self.best), float("nan"), float("nan")

    def _bounds(self, want: int, units: int) -> tuple[int, int]:
        return 0, int(min(want, self.account.available))


class Gambling(what.Selector):
    """Draws from the global random state."""

    def scores(self, view: View) -> Tensor:
        return torch.rand(len(view))


class Seeding(what.Selector):
    """Reads the global random states, and puts them back."""

    def scores(self, view: View) -> Tensor:
        return torch.tensor([np.random.get_state()[1][row] / 2**32 for row in range(len(view))])


class Scribbling(what.MaxEntropy):
    """Writes to the logits."""

    def scores(self, view: View) -> Tensor:
        return super().scores(view) + view.logits.clamp_(max=1).sum(dim=1)


class Greedy(what.MaxEntropy):
    """Picks more than it may."""

    def pick(self, view: View, k: int = 1) -> list[int]:
        return super().pick(view, k + 1)


class Drifting(what.MaxEntropy):
    """Looks at drift without saying so."""

    def scores(self, view: View) -> Tensor:
        return view.drift


class Vague(what.MaxEntropy):
    """Has the repr that every object has."""

    __repr__ = object.__repr__


class Chattering(who.Oracle):
    """Gives every answer twice."""

    def __init__(self) -> None:
        super().__init__(nets.truth)
        self.before: dict[str, who.Answer] = {}

    def answers(self, now: int, last: Any = ()) -> dict[str, who.Answer]:
        before, self.before = self.before, super().answers(now, last)
        return before | self.before


class Stale(who.Delayed):
    """Answers whenever it likes, also what was withdrawn."""

    def answers(self, now: int, last: Any = ()) -> dict[str, who.Answer]:
        return super().answers(now)


class Clumsy(how.Descend):
    """Writes to a list of its own, which an interrupted `learn` leaves longer."""

    def start(self, model: Classifier, anchor: Anchor | None = None) -> None:
        super().start(model, anchor)
        self.labelled: list[int] = []

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        self.labelled.append(len(labels.rows))
        return super().learn(forward, labels)

    def reset(self) -> None:
        self.labelled = []
        super().reset()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"labelled": list(self.labelled)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.labelled = list(state["labelled"])
        super().load_state_dict(state)


class Rounding(how.Descend):
    """Predicts in single precision whatever the model's is."""

    def output(self, forward: Forward) -> Tensor:
        return super().output(forward).float()


class Meddling(how.Descend):
    """Trains the user's model as well."""

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        with torch.no_grad():
            next(self.model.model.parameters()).mul_(1.01)
        return super().learn(forward, labels)


def mean(view: View) -> Tensor:
    """A utility that gives a number for each sample."""
    return view.entropy


mean.needs_anchor = False  # type: ignore[attr-defined]

BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "overdraft": (lambda: Overdrawing(0.3), "where ratio, credit and total allow"),
    "free labels": (lambda: Generous(0.3), "labels charged where"),
    "undo": (lambda: Unforgetting(0.5), "after an undo it decides otherwise"),
    "global random state": (Gambling, "a global random state moves"),
    "reading a global random state": (Seeding, "two runs of equal parts differ"),
    "writing to inputs": (Scribbling, "it wrote to a tensor that it was given"),
    "too many rows": (Greedy, "rows, each once"),
    "drift": (Drifting, "set needs_anchor"),
    "repr": (Vague, "does not say class and options"),
    "answers twice": (Chattering, "a question came twice"),
    "withdrawn": (lambda: Stale(who.Oracle(nets.truth), batches=9), "is closed"),
    "failing half way": (lambda: Clumsy(lr=0.01), "left something behind"),
    "dtype": (lambda: Rounding(lr=0.01), "BROKEN The user's model stays"),
    "user's model": (lambda: Meddling(lr=0.01), "the model was changed"),
    "no number": (lambda: mean, "is no 0-dim tensor"),
}


@pytest.mark.parametrize(("factory", "message"), BROKEN.values(), ids=list(BROKEN))
def test_a_part_that_breaks_the_contract_is_told(factory: Callable[[], Any], message: str) -> None:
    with pytest.raises(ContractBroken) as caught:
        check(factory, model=nets.make, inputs=partial(pictures, dtype=torch.float64))
    assert message in str(caught.value)


def test_a_factory_of_something_else_is_refused() -> None:
    with pytest.raises(errors.BadConfig, match="is no part: a factory gives one of policy, selector"):
        check(lambda: 3)


def test_a_report_has_a_line_for_each_check() -> None:
    state = torch.get_rng_state()
    first, *lines = check(lambda: methods.wise(ratio=0.1)).splitlines()
    assert first.startswith("method Method(name='wise'") and first.endswith("keeps the contract")
    assert len(lines) == len(KINDS["method"][2]) and all(line.startswith("ok ") for line in lines)
    assert same(torch.get_rng_state(), state)
