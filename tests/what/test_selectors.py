"""Are the samples asked for those that the selector's rule names, ties at random, from the seed alone?"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from core.checks import same, saved
from torch import Tensor

from wise_atta import errors, what
from wise_atta.view import View
from wise_atta.what import Drift, Margin, MaxEntropy, Perturbation, RandomSample, Selector

HEAD = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def view_of(number: int = 1, n: int = 9, age: int | None = None, drift: float = 0.3) -> View:
    generator = torch.Generator().manual_seed(number)
    features = torch.randn(n, 6, dtype=torch.float64, generator=generator)
    noise = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    logits = features @ HEAD.T
    return View(number, logits, features, lambda f: f @ HEAD.T, lambda: logits + drift * noise, age)


class Given(Selector):
    """Scores as they are given."""

    def __init__(self, scores: list[float], **options: Any) -> None:
        super().__init__(**options)
        self.given = scores

    def scores(self, view: View) -> Tensor:
        return torch.tensor(self.given)


def probabilities(row: Tensor) -> list[float]:
    weights = [math.exp(z) for z in row.tolist()]
    return [w / sum(weights) for w in weights]


def by_hand(name: str, view: View) -> list[float]:
    rows = [probabilities(row) for row in view.logits]
    if name == "max-entropy":
        return [-sum(p * math.log(p) for p in row) for row in rows]
    if name == "margin":
        return [sorted(row)[-2] - sorted(row)[-1] for row in rows]
    anchor = [probabilities(row) for row in view.anchor()]
    return [math.dist(row, slow) for row, slow in zip(rows, anchor, strict=True)]


@pytest.mark.parametrize("name", ["max-entropy", "margin", "drift"])
@pytest.mark.parametrize("k", [1, 3, 9])
def test_the_highest_scores_are_asked_for_best_first(name: str, k: int) -> None:
    for number in range(1, 6):
        view = view_of(number)
        scores = by_hand(name, view)
        torch.testing.assert_close(what.selector(name).scores(view), torch.tensor(scores, dtype=torch.float64))
        assert what.selector(name).pick(view, k) == sorted(range(9), key=lambda i: -scores[i])[:k]


@pytest.mark.parametrize("sigma", [0.01, 0.5])
def test_perturbation_asks_where_confidence_in_the_prediction_moves_most(sigma: float) -> None:
    view, selector = view_of(), Perturbation(sigma=sigma, seed=4)
    noise = selector.noise(view)
    assert noise.shape == view.features.shape and 0.5 < noise.std() < 1.5
    scores = []
    for feature, eps, logits in zip(view.features, noise, view.logits, strict=True):
        guess = int(logits.argmax())
        nudged = probabilities(HEAD @ (feature + sigma * eps))
        scores.append(abs(nudged[guess] - probabilities(logits)[guess]))
    torch.testing.assert_close(selector.scores(view), torch.tensor(scores, dtype=torch.float64))
    assert selector.pick(view) == [int(np.argmax(scores))]


def test_perturbation_draws_anew_for_every_batch_and_from_its_seed_alone() -> None:
    first, second = view_of(1), view_of(2)
    assert torch.equal(Perturbation(seed=1).noise(first), Perturbation(seed=1).noise(first))
    assert not torch.equal(Perturbation(seed=1).noise(first), Perturbation(seed=2).noise(first))
    assert not torch.equal(Perturbation(seed=1).noise(first), Perturbation(seed=1).noise(second))


def test_drift_uses_perturbation_in_its_first_batches_after_a_start_if_told_so() -> None:
    selector, start = Drift(first=4, seed=2), Perturbation(seed=2)
    for number, age in [(1, 1), (4, 4), (9, 2)]:
        view = view_of(number, age=age)
        assert torch.equal(selector.scores(view), start.scores(view)) and not view.drift_known
    late = view_of(5, age=5)
    assert torch.equal(selector.scores(late), late.drift)


def test_random_samples_are_equally_likely() -> None:
    counts = Counter(RandomSample(seed=1).pick(view_of(number, n=5))[0] for number in range(1, 1001))
    # Five cells of 1,000 draws: four degrees of freedom, chi² above 23.5 has probability 1e-4.
    assert sum((counts[i] - 200) ** 2 / 200 for i in range(5)) < 23.5


def test_ties_are_broken_at_random_from_the_seed_and_the_batch() -> None:
    scores = [0.0, 1.0, 1.0, 1.0, 0.5]
    picks = [tuple(Given(scores, seed=7).pick(view_of(number, n=5), 4)) for number in range(1, 31)]
    assert picks == [tuple(Given(scores, seed=7).pick(view_of(number, n=5), 4)) for number in range(1, 31)]
    assert {frozenset(pick[:3]) for pick in picks} == {frozenset({1, 2, 3})} and {pick[3] for pick in picks} == {4}
    assert len(set(picks)) == 6, "all orders of the three that tie"
    assert picks != [tuple(Given(scores, seed=8).pick(view_of(number, n=5), 4)) for number in range(1, 31)]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("balance", [False, True])
def test_scores_may_be_yes_or_no(k: int, balance: bool) -> None:
    picks = {Given([False, True, True, False], balance=balance, seed=n).pick(view_of(n=4), k)[0] for n in range(20)}
    assert picks == {1, 2}


@pytest.mark.parametrize("scores", [[math.nan, 1.0, 2.0], [2.0, math.nan, 1.0], [1.0, 2.0, math.nan]])
@pytest.mark.parametrize("k", [1, 2])
def test_a_score_that_is_no_number_comes_last_wherever_it_is(scores: list[float], k: int) -> None:
    assert Given(scores).pick(view_of(n=3), k) == [scores.index(2.0), scores.index(1.0)][:k]


def test_where_no_score_is_a_number_any_sample_may_be_asked_for() -> None:
    assert {Given([math.nan] * 3).pick(view_of(number, n=3))[0] for number in range(1, 30)} == {0, 1, 2}


def test_a_batch_smaller_than_k_is_asked_for_as_a_whole() -> None:
    assert sorted(MaxEntropy().pick(view_of(n=3), 5)) == [0, 1, 2]


@pytest.mark.parametrize("k", [0, -1])
def test_asking_for_less_than_one_sample_is_refused(k: int) -> None:
    with pytest.raises(errors.BadConfig, match="at least one"):
        MaxEntropy().pick(view_of(), k)


@pytest.mark.parametrize("sigma", [0, -1, math.nan])
def test_noise_without_a_size_is_refused(sigma: float) -> None:
    with pytest.raises(errors.BadConfig, match="sigma"):
        Perturbation(sigma=sigma)


class SlowBalance:
    """EATTA's rule: classes asked for just before are passed over unless the score beats their last."""

    def __init__(self) -> None:
        self.just: set[int] = set()
        self.last: dict[int, float] = {}

    def pick(self, ranking: list[int], guesses: list[int], scores: list[float], k: int) -> list[int]:
        taken: list[int] = []
        for passed_over in (False, True):
            for i in ranking:
                blocked = guesses[i] in self.just and scores[i] <= self.last[guesses[i]]
                if blocked == passed_over and len(taken) < k:
                    taken.append(i)
        self.just = {guesses[i] for i in taken}
        self.last |= {guesses[i]: scores[i] for i in taken}
        return taken


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("kind", [MaxEntropy, Margin])
def test_class_balance_passes_over_classes_asked_for_just_before(kind: type[Selector], k: int) -> None:
    selector, slow = kind(balance=True), SlowBalance()
    differs = 0
    for number in range(1, 41):
        view = view_of(number, n=6)
        scores = kind().scores(view).tolist()
        ranking = sorted(range(6), key=lambda i: -scores[i])
        expected = slow.pick(ranking, view.logits.argmax(1).tolist(), scores, k)
        assert selector.pick(view, k) == expected
        differs += expected != ranking[:k]
    assert differs > 3, "the rule never mattered"


def test_class_balance_never_leaves_a_granted_label_unused() -> None:
    selector = Given([3.0, 2.0, 1.0], balance=True)
    logits = torch.zeros(3, 4)
    logits[:, 2] = 1
    for number in range(1, 5):
        view = View(number, logits, logits, lambda f: f, lambda: logits)
        assert len(selector.pick(view, 2)) == 2


def test_class_balance_survives_a_file_and_is_forgotten_by_reset() -> None:
    selector, resumed, fresh = (Drift(balance=True) for _ in range(3))
    start = selector.state_dict()
    for number in range(1, 6):
        selector.pick(view_of(number), 2)
    resumed.load_state_dict(saved(selector.state_dict()))
    assert same(resumed.state_dict(), selector.state_dict()) and not same(start, selector.state_dict())
    for number in range(6, 16):
        assert resumed.pick(view_of(number), 2) == selector.pick(view_of(number), 2)
    selector.reset()
    for number in range(1, 6):
        assert selector.pick(view_of(number), 2) == fresh.pick(view_of(number), 2)


def test_names_lead_to_selectors_and_near_misses_to_suggestions() -> None:
    for name in what.SELECTORS:
        assert isinstance(what.selector(name, seed=3), Selector)
    with pytest.raises(errors.UnknownName, match="Did you mean 'margin'"):
        what.selector("margins")
    with pytest.raises(errors.BadConfig, match="colour"):
        what.selector("margin", colour="red")


def test_only_drift_says_that_it_needs_the_anchor() -> None:
    needs = {kind.__name__: kind.needs_anchor for kind in (Drift, Margin, MaxEntropy, Perturbation, RandomSample)}
    assert [name for name, needed in needs.items() if needed] == ["Drift"]
