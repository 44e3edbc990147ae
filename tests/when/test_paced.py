"""Does budget-paced selection keep its budget on every stream, and is the preset the algorithm of the paper?"""

import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from wise_atta import errors, rng
from wise_atta.when import BudgetPaced, Exhaust, policy

T = 5000
RATIOS = (0.05, 0.1, 0.2, 0.5, 0.9)
some = settings(derandomize=True, deadline=None, max_examples=60)


def paper(ratio: float, **options: Any) -> BudgetPaced:
    with pytest.warns(UserWarning, match="Algorithm 1 as printed"):
        return BudgetPaced(ratio, preset="paper", **options)


def algorithm_1(
    scores: list[float], r: float, W: int, M: int, H_c: float, delta: float, bernoulli: Callable[[int, float], bool]
) -> list[int]:
    """Algorithm 1 as printed, line by line."""
    u, history, actions = 0, [], []
    for t, s in enumerate(scores, 1):
        target = r * t
        if u + delta < target:
            a = 1
        elif len(history) < M:
            a = int(bernoulli(t, r))
        else:
            d = r * t - u
            rate = min(max(r + d / H_c, 0), 1)
            a = int(s >= np.quantile(history, 1 - rate))
        u += a
        history = [*history, s][-W:]
        actions.append(a)
    return actions


def published_code(
    scores: list[float], r: float, W: int, M: int, bernoulli: Callable[[int, float], bool], length: int
) -> list[int]:
    """The published variant: a cap and a ratio from the known length, a warm-up at the corrected rate, H_c = 40."""
    budget = round(Fraction(str(r)) * length)
    r, u, history, actions = budget / length, 0, [], []
    for t, s in enumerate(scores, 1):
        d = r * t - u
        rate = min(max(r + d / 40, 0), 1)
        if u + 1 < r * t:
            a = 1
        elif len(history) < M:
            a = int(bernoulli(t, rate))
        else:
            a = int(s >= np.quantile(history, 1 - rate))
        a = a if u < budget else 0
        u += a
        history = [*history, s][-W:]
        actions.append(a)
    return actions


def bernoulli(seed: int) -> Callable[[int, float], bool]:
    return lambda t, p: bool(rng.numpy(seed, "policy", t).random() < p)


def random_scores(generator: np.random.Generator, length: int) -> list[float]:
    """Scores of a kind drawn at random: from all different to nearly all tied."""
    drawn = [
        lambda: generator.normal(size=length),
        lambda: generator.binomial(64, generator.random(), size=length),
        lambda: generator.binomial(64, 0.98, size=length),
        lambda: generator.integers(0, 2, size=length),
        lambda: np.full(length, 3),
        lambda: np.sort(generator.integers(0, length, size=length)),
        lambda: generator.normal(size=length).round(1),
    ][generator.integers(7)]()
    return [float(score) for score in drawn]


SCORES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "constant": lambda g: np.full(T, 7.0),
    "two-valued": lambda g: g.integers(0, 2, size=T),
    "binomial-0.02": lambda g: g.binomial(64, 0.02, size=T),
    "binomial-0.3": lambda g: g.binomial(64, 0.3, size=T),
    "binomial-0.98": lambda g: g.binomial(64, 0.98, size=T),
    "rising": lambda g: np.arange(T),
    "falling": lambda g: -np.arange(T),
}


def check_budget(subject: BudgetPaced, ratio: float, batch: int) -> None:
    """spent ≤ ⌊r·t⌋ + credit, and never more than slack + 1 behind r·t."""
    exact = Fraction(str(ratio)) * batch
    assert subject.spent <= math.floor(exact) + subject.credit, f"overspent at batch {batch}"
    assert exact - subject.spent <= subject.slack + 1, f"too far behind at batch {batch}"


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_budget_holds_at_every_batch(ratio: float, kind: str) -> None:
    subject = BudgetPaced(ratio)
    for batch, score in enumerate(SCORES[kind](np.random.default_rng(5)), 1):
        subject.decide(score)
        check_budget(subject, ratio, batch)


def adversary(subject: BudgetPaced, aim: str) -> Iterator[None]:
    """Sees what the policy sees, tries scores on it and lets the one count that hurts most."""
    recent, starving = [0.0], True
    for _ in range(T):
        if aim == "both":
            # Starve it until it has to ask, then make it ask until the account refuses.
            behind = subject.account.available
            starving = behind < subject.slack if starving else behind < 1
        wanted = {"overspend": 1, "starve": 0, "both": 0 if starving else 1}[aim]
        top, bottom, tie = max(recent) + 1, min(recent) - 1, recent[-1]
        candidates = (tie, top) if wanted else (tie, bottom)
        for score in candidates:
            if subject.decide(score) == wanted or score == candidates[-1]:
                break
            subject.undo()
        recent = [*recent, score][-subject.window :]
        yield


@pytest.mark.parametrize("aim", ["overspend", "starve", "both"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_budget_holds_against_an_adversary(ratio: float, aim: str) -> None:
    subject = BudgetPaced(ratio, window=20)
    furthest = 0.0
    for batch, _ in enumerate(adversary(subject, aim), 1):
        check_budget(subject, ratio, batch)
        furthest = max(furthest, ratio * batch - subject.spent)
    if aim == "starve":
        assert furthest > 4, "an adversary that does not push it to its slack tests nothing"


@some
@given(
    hundredths=st.integers(0, 300),
    want=st.integers(1, 3),
    slack=st.integers(0, 8),
    credit=st.integers(0, 4),
    ties=st.sampled_from(["share", "accept"]),
    window=st.integers(1, 30),
    horizon=st.integers(1, 80),
    seed=st.integers(0, 1000),
)
def test_the_budget_holds_for_every_setting(
    hundredths: int, want: int, slack: int, credit: int, ties: Any, window: int, horizon: int, seed: int
) -> None:
    ratio = min(hundredths, 100 * want) / 100
    subject = BudgetPaced(ratio, window=window, horizon=horizon, slack=slack, credit=credit, ties=ties, seed=seed)
    for batch, score in enumerate(random_scores(np.random.default_rng(seed), 150), 1):
        assert 0 <= subject.decide(score, want) <= want
        check_budget(subject, ratio, batch)


@some
@given(
    thousandths=st.integers(0, 500),
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=100),
    total=st.none() | st.integers(0, 30),
    seed=st.integers(0, 1000),
)
def test_a_ratio_per_sample_follows_the_samples(
    thousandths: int, sizes: list[int], total: int | None, seed: int
) -> None:
    ratio = thousandths / 1000
    subject = BudgetPaced(ratio, per="sample", total=total, seed=seed)
    seen = 0
    for size, score in zip(sizes, random_scores(np.random.default_rng(seed), len(sizes)), strict=True):
        subject.decide(score, want=2, samples=size)
        seen += size
        allowed = math.floor(Fraction(str(ratio)) * seen)
        assert subject.spent <= (allowed if total is None else min(allowed, total))
    assert subject.seen == seen


def test_a_ratio_per_sample_spends_like_the_same_ratio_per_batch() -> None:
    scores = np.random.default_rng(3).normal(size=800)
    by_batch, by_sample = BudgetPaced(0.25), BudgetPaced("1/256", per="sample")
    assert [by_batch.decide(s) for s in scores] == [by_sample.decide(s, samples=64) for s in scores]


def test_a_total_ends_the_spending() -> None:
    subject = BudgetPaced(0.5, total=7)
    for score in np.random.default_rng(3).normal(size=100):
        subject.decide(score)
    assert subject.spent == subject.allowed == 7


def test_credit_is_there_from_the_first_batch() -> None:
    subject = BudgetPaced(0.1, credit=3)
    assert [subject.decide(score) for score in range(6)] == [0, 1, 1, 1, 0, 0]


def test_a_refund_can_be_spent_again() -> None:
    subject = BudgetPaced(0.5, slack=0)
    for score in range(10):
        subject.decide(score)
    assert subject.spent == 5
    subject.refund(2)
    assert [subject.decide(-1.0) for _ in range(2)] == [1, 1], "behind by more than the slack, it asks at once"


def test_the_paper_preset_is_algorithm_1() -> None:
    generator = np.random.default_rng(11)
    for number in range(1000):
        r = float(generator.choice([0.0, 0.05, 0.1, 0.29, 0.5, 0.9, 1.0]))
        scores = random_scores(generator, int(generator.integers(5, 90)))
        W = int(generator.choice([1, 5, 20, 250]))
        M = int(generator.integers(1, 1 + min(W, 10)))
        H_c, delta = (50.0, 1.0) if number % 2 else (float(generator.integers(1, 80)), float(generator.integers(0, 4)))
        subject = paper(r, window=W, warmup=M, horizon=H_c, slack=delta, seed=number)
        expected = algorithm_1(scores, r, W, M, H_c, delta, bernoulli(number))
        assert [subject.decide(score) for score in scores] == expected, subject


def test_the_authors_preset_is_the_published_variant() -> None:
    generator = np.random.default_rng(12)
    for number in range(200):
        r = float(generator.choice([0.05, 0.1, 0.29, 0.5, 0.9, 1.0]))
        scores = random_scores(generator, int(generator.integers(12, 90)))
        M = int(generator.integers(1, 10))
        subject = BudgetPaced(r, preset="authors", length=len(scores), window=20, warmup=M, seed=number)
        expected = published_code(scores, r, 20, M, bernoulli(number), len(scores))
        assert [subject.decide(score) for score in scores] == expected, subject


def test_a_constant_score_overspends_in_the_paper_and_not_here() -> None:
    as_printed, ours = paper(0.1), BudgetPaced(0.1)
    published = BudgetPaced(0.1, preset="authors", length=782)
    spent = [(as_printed.decide(7.0), ours.decide(7.0), published.decide(7.0)) for _ in range(782)]
    assert sum(row[0] for row in spent) == 781
    assert 72 <= sum(row[1] for row in spent) <= 78
    assert sum(row[2] for row in spent[:79]) == 78, "the published cap is reached by batch 79"


def test_on_a_known_length_the_paper_can_be_held_to_its_budget() -> None:
    subject = Exhaust(paper(0.1), length=782)
    assert sum(subject.decide(7.0) for _ in range(782)) == 78


def test_confident_batches_overspend_in_the_paper_and_not_here() -> None:
    spent = []
    for seed in range(5):
        scores = np.random.default_rng(seed).binomial(64, 0.98, size=782)
        as_printed, ours = paper(0.1, seed=seed), BudgetPaced(0.1, seed=seed)
        for score in scores:
            as_printed.decide(score)
            ours.decide(score)
        spent.append((as_printed.spent, ours.spent))
    assert all(printed > 2 * 78 and 72 <= own <= 78 for printed, own in spent), spent


def test_slack_is_what_leaves_a_choice() -> None:
    def mean_score(slack: float) -> float:
        means = []
        for seed in range(10):
            scores = np.random.default_rng(seed).normal(size=782)
            subject = BudgetPaced(0.1, slack=slack, seed=seed)
            asked = [score for score in scores if subject.decide(score)]
            means.append(np.mean(asked))
        return float(np.mean(means))

    best_tenth = 1.75
    assert mean_score(1) < 0.4
    assert 1.4 < mean_score(5) < best_tenth


@pytest.mark.parametrize("kind", ["constant", "two-valued", "binomial-0.3", "binomial-0.98"])
@pytest.mark.parametrize("ratio", [0.1, 0.35, 0.8])
def test_sharing_ties_gives_the_rate(kind: str, ratio: float) -> None:
    # Without horizon, slack and a tight account nothing steers but the rule for ties.
    free = {"horizon": math.inf, "slack": math.inf, "credit": T}
    scores = SCORES[kind](np.random.default_rng(6))
    sharing, accepting = BudgetPaced(ratio, ties="share", **free), BudgetPaced(ratio, ties="accept", **free)
    for score in scores:
        sharing.decide(score)
        accepting.decide(score)
    assert sharing.spent / T == pytest.approx(ratio, abs=4 * math.sqrt(ratio * (1 - ratio) / T) + 0.005)
    assert accepting.spent >= sharing.spent


def test_shared_ties_prefer_the_better_score() -> None:
    subject = BudgetPaced(0.5, horizon=math.inf, slack=math.inf, credit=T)
    granted: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for score in np.random.default_rng(7).integers(0, 3, size=3000):
        granted[int(score)].append(subject.decide(score))
    low, middle, high = (float(np.mean(granted[score])) for score in (0, 1, 2))
    assert low < 0.05 and 0.4 < middle < 0.6 and high > 0.95


def test_the_record_tells_how_the_decision_came_about() -> None:
    subject = BudgetPaced(0.5, slack=1, credit=9)
    subject.decide(1.0)
    assert math.isnan(subject.last.threshold) and subject.last.rate == 0.5 and subject.last.debt == 0.5
    subject = BudgetPaced(0.5, warmup=2, window=3, seed=1)
    for score in (1.0, 2.0, 3.0):
        spent = subject.spent
        subject.decide(score)
    debt = 1.5 - spent
    assert subject.last.debt == debt
    assert subject.last.rate == 0.5 + debt / 50
    assert subject.last.threshold == np.quantile([1.0, 2.0], 1 - subject.last.rate)


def test_the_window_forgets_old_scores() -> None:
    subject = BudgetPaced(0.2, window=3, credit=99, slack=math.inf, horizon=math.inf)
    for score in (100.0, 100.0, 100.0, 1.0, 2.0, 3.0):
        subject.decide(score)
    assert subject.state_dict()["scores"] == [1.0, 2.0, 3.0]
    assert subject.decide(4.0) == 1, "4 is high again"


def test_history_and_account_reset_apart() -> None:
    subject = BudgetPaced(0.5)
    for score in range(10):
        subject.decide(score)
    subject.reset(account=False)
    assert (subject.seen, len(subject.state_dict()["scores"])) == (10, 0)
    subject.decide(1.0)
    subject.reset(history=False)
    assert (subject.seen, subject.spent, len(subject.state_dict()["scores"])) == (0, 0, 1)


@pytest.mark.parametrize("scores", [None, "words", [[1.0]], [math.nan], list(range(300))])
def test_damaged_scores_are_refused(scores: object) -> None:
    subject = BudgetPaced(0.5)
    subject.decide(1.0)
    state = subject.state_dict()
    with pytest.raises(errors.StateMismatch, match="scores"):
        subject.load_state_dict({**state, "scores": scores})
    assert subject.state_dict()["scores"] == [1.0] and subject.seen == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "paper", "ties": "share"}, "ties='share' contradicts"),
        ({"preset": "paper", "credit": 0}, "credit=0 contradicts"),
        ({"preset": "paper", "total": 5}, "total=5 contradicts"),
        ({"preset": "paper", "per": "sample"}, "per='sample' contradicts"),
        ({"preset": "authors", "length": 100, "credit": 3}, "credit=3 contradicts"),
        ({"preset": "authors", "length": 100, "total": 7}, "total=7 contradicts"),
        ({"preset": "authors"}, "length"),
        ({"preset": "paper", "length": 100}, "Exhaust"),
        ({"length": 100}, "Exhaust"),
        ({"preset": "papr"}, "Did you mean 'paper'"),
        ({"credit": math.inf}, "preset='paper'"),
        ({"ties": "split"}, "Known: accept, share"),
        ({"window": 0}, "window=0"),
        ({"warmup": 0}, "warmup=0"),
        ({"warmup": 6, "window": 5}, "never fit"),
        ({"horizon": 0}, "horizon=0"),
        ({"slack": -1}, "slack=-1"),
        ({"slack": math.nan}, "slack=nan"),
        ({"ratio": -1}, "ratio=-1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, words: str) -> None:
    with pytest.raises(errors.BadConfig, match=words):
        BudgetPaced(**options)


def test_the_defaults_are_those_of_the_documentation() -> None:
    subject = BudgetPaced()
    assert repr(subject) == (
        "BudgetPaced(ratio=0.2, window=250, warmup=1, horizon=50.0, slack=5.0, credit=0, total=None, ties='share', "
        "per='batch', preset=None, length=None, seed=0)"
    )
    printed, published = paper(0.1), BudgetPaced(0.1, preset="authors", length=782)
    assert (printed.horizon, printed.slack, printed.ties, printed.credit) == (50, 1, "accept", math.inf)
    assert (published.horizon, published.slack, published.ties, published.total) == (40, 1, "accept", 78)
    assert repr(eval(repr(published))) == repr(published), "what a preset settled may be said again"


def test_the_warning_points_at_the_user() -> None:
    for build in (lambda: BudgetPaced(0.1, preset="paper"), lambda: policy("paced", ratio=0.1, preset="paper")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build()
        assert [warning.filename for warning in caught] == [__file__]


def test_the_rate_is_the_labels_due_and_owed_over_those_that_a_batch_takes() -> None:
    by_batch = BudgetPaced(1.0, horizon=10, slack=100)
    by_batch.decide(0.0, want=2)
    assert by_batch.last.rate == 0.5, "in the warm-up r/k"
    debt = 2 * 1.0 - by_batch.spent
    by_batch.decide(0.0, want=2)
    assert by_batch.last.debt == debt and by_batch.last.rate == pytest.approx((1.0 + debt / 10) / 2, abs=1e-15)
    by_sample = BudgetPaced(0.1, horizon=10, slack=100, warmup=1, per="sample")
    by_sample.decide(0.0, want=2, samples=8)
    assert by_sample.last.rate == pytest.approx(0.1 * 8 / 2)
    debt = 0.1 * 12 - by_sample.spent
    by_sample.decide(0.0, want=2, samples=4)
    assert by_sample.last.rate == pytest.approx((0.1 * 4 + debt / 10) / 2)


def test_of_tied_scores_so_many_are_admitted_that_the_rate_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, odds = BudgetPaced(0.5, horizon=1e9, slack=100, credit=100), []
    monkeypatch.setattr(policy, "_draw", lambda probability: bool(odds.append(probability)))
    for score in (3, 2, 1, 2, 2):
        policy.decide(score)
    # The first is the warm-up; at the fourth one of three is above and one tied, at the fifth one of four and two.
    assert odds == pytest.approx([0.5, 0.5 * 3 - 1, (0.5 * 4 - 1) / 2], abs=1e-6)
