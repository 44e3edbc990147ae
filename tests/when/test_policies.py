"""Does every policy keep to its account, and can each be undone, saved and resumed?"""

import copy
import json
import math
import pickle
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from wise_atta import errors
from wise_atta.when import Account, Always, BudgetPaced, Exhaust, Never, Policy, Random, Uniform, early, policy

LENGTH = 60

POLICIES: dict[str, Callable[[], Policy]] = {
    "paced": lambda: BudgetPaced(0.3, window=7),
    "paced-accept": lambda: BudgetPaced(0.3, window=7, ties="accept", slack=1, warmup=3),
    "paced-credit": lambda: BudgetPaced(0.5, window=9, credit=3, total=12, seed=4),
    "paced-sample": lambda: BudgetPaced(0.1, window=9, per="sample", slack=2),
    "paced-authors": lambda: BudgetPaced(0.3, window=7, preset="authors", length=LENGTH),
    "uniform": lambda: Uniform(0.3),
    "uniform-sample": lambda: Uniform(0.1, per="sample", total=20),
    "random": lambda: Random(0.3, credit=2),
    "random-sample": lambda: Random(0.1, per="sample", seed=9),
    "random-exact": lambda: Random(0.3, exact=True, length=LENGTH),
    "always": lambda: Always(labels=2, total=40),
    "never": Never,
    "exhaust-paced": lambda: Exhaust(BudgetPaced(0.3, window=7), length=LENGTH),
    "exhaust-random": lambda: Exhaust(Random(0.8), length=LENGTH),
    "early-paced": lambda: early(BudgetPaced(0.3, window=7), length=LENGTH, delay=20),
}

every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
some = settings(derandomize=True, deadline=None, max_examples=15)

# A batch: its score (often tied), the labels it would take, its size.
batches = st.lists(
    st.tuples(st.integers(0, 4) | st.floats(-9, 9), st.integers(0, 3), st.integers(1, 6)), min_size=2, max_size=LENGTH
).map(lambda drawn: [(drawn[0][0], max(1, drawn[0][1]), drawn[0][2]), *drawn[1:]])


def same(left: object, right: object) -> bool:
    """Equality of states, arrays included."""
    return pickle.dumps(left) == pickle.dumps(right)


@every_policy
@some
@given(stream=batches, expired=st.sets(st.integers(0, LENGTH)))
def test_no_stream_overspends(make: Callable[[], Policy], stream: list, expired: set[int]) -> None:
    subject, spent = make(), 0
    for number, (score, want, samples) in enumerate(stream):
        granted = subject.decide(score, want, samples)
        assert 0 <= granted <= want
        spent += granted
        assert subject.spent == spent <= subject.allowed
        if spent and number in expired:
            subject.refund(1)
            spent -= 1
    per_sample = subject.account.per == "sample"
    assert subject.seen == sum(samples if per_sample else 1 for _, _, samples in stream)


@every_policy
@some
@given(stream=batches)
def test_what_is_foreseen_holds_and_changes_nothing(make: Callable[[], Policy], stream: list) -> None:
    subject = make()
    for score, want, samples in stream:
        before = pickle.dumps(subject.state_dict())
        least, most = subject.foresee(want, samples)
        assert pickle.dumps(subject.state_dict()) == before
        assert least <= subject.decide(score, want, samples) <= most <= want


@pytest.mark.parametrize("make", [POLICIES[name] for name in ("uniform", "random", "random-exact", "always", "never")])
@some
@given(stream=batches)
def test_a_policy_that_is_blind_to_scores_knows_what_it_will_grant(make: Callable[[], Policy], stream: list) -> None:
    subject = make()
    for score, want, samples in stream:
        foreseen = subject.foresee(want, samples)
        granted = subject.decide(score, want, samples)
        assert foreseen == (granted, granted)


def test_a_paced_policy_knows_when_it_must_ask_and_when_it_cannot() -> None:
    subject = BudgetPaced(0.5, slack=0.5)
    assert subject.foresee() == (0, 0), "no label is earned before the second batch"
    subject.decide(1.0)
    assert subject.foresee() == (1, 1), "a whole label behind"
    subject = BudgetPaced(0.5, slack=5)
    subject.decide(1.0)
    assert subject.foresee() == (0, 1)


@every_policy
@some
@given(stream=batches)
def test_undo_is_as_if_the_batch_had_not_come(make: Callable[[], Policy], stream: list) -> None:
    tried, twin = make(), make()
    for score, want, samples in stream:
        before, last = tried.state_dict(), tried.last
        tried.decide(-score if want else 1e9, want, samples + 1)
        tried.undo()
        assert same(tried.state_dict(), before)
        assert tried.last is last
        assert tried.decide(score, want, samples) == twin.decide(score, want, samples)
    assert same(tried.state_dict(), twin.state_dict())


@every_policy
def test_labels_that_were_returned_are_not_returned_again_by_undo(make: Callable[[], Policy]) -> None:
    subject = make()
    granted = 0
    for _ in range(LENGTH):
        granted = subject.decide(1.0)
        if granted:
            break
    subject.refund(granted)
    before = subject.state_dict()
    with pytest.raises(errors.BadInput, match="before a refund"):
        subject.undo()
    assert same(subject.state_dict(), before)
    assert subject.spent == 0


@every_policy
@some
@given(stream=batches, cut=st.integers(1, LENGTH))
def test_a_loaded_state_decides_as_if_it_had_never_stopped(make: Callable[[], Policy], stream: list, cut: int) -> None:
    first = make()
    for batch in stream[:cut]:
        first.decide(*batch)
    through_json = json.loads(json.dumps(first.state_dict(), default=np.ndarray.tolist))
    resumed = make()
    resumed.load_state_dict(through_json)
    others = [resumed, pickle.loads(pickle.dumps(first)), copy.deepcopy(first)]
    for batch in stream[cut:]:
        granted = first.decide(*batch)
        assert [other.decide(*batch) for other in others] == [granted] * 3
    for other in others:
        assert same(other.state_dict(), first.state_dict())


@every_policy
def test_reset_starts_again(make: Callable[[], Policy]) -> None:
    stream = np.random.default_rng(0).integers(0, 5, size=LENGTH)
    used = make()
    first = [used.decide(score, 1) for score in stream]
    used.reset()
    assert same(used.state_dict(), make().state_dict())
    assert [used.decide(score, 1) for score in stream] == first


@every_policy
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_changes_nothing(make: Callable[[], Policy], score: float) -> None:
    subject = make()
    subject.decide(1.0)
    before = subject.state_dict()
    with pytest.raises(errors.NotFinite):
        subject.decide(score)
    for want, samples in ((-1, 1), (1, 0), (0.5, 1)):
        with pytest.raises(errors.BadInput):
            subject.decide(1.0, want, samples)  # type: ignore[arg-type]
    assert same(subject.state_dict(), before)
    subject.undo()
    assert same(subject.state_dict(), make().state_dict())


@every_policy
def test_only_the_last_decision_can_be_undone_and_once(make: Callable[[], Policy]) -> None:
    subject = make()
    with pytest.raises(errors.BadInput, match="no decision"):
        subject.undo()
    subject.decide(1.0)
    subject.decide(2.0)
    subject.undo()
    with pytest.raises(errors.BadInput, match="no decision"):
        subject.undo()
    assert subject.seen == 1


@every_policy
def test_repr_shows_how_to_build_it(make: Callable[[], Policy]) -> None:
    again = eval(repr(make()))
    assert same(again.state_dict(), make().state_dict())
    assert repr(again) == repr(make())


@every_policy
def test_a_state_of_another_policy_is_refused(make: Callable[[], Policy]) -> None:
    subject = make()
    subject.decide(1.0)
    before = subject.state_dict()
    for name, other in POLICIES.items():
        if repr(other()) != repr(subject):
            with pytest.raises(errors.StateMismatch):
                subject.load_state_dict(other().state_dict())
            assert same(subject.state_dict(), before), name
    for damaged in ({}, {**before, "version": 99}, {**before, "account": {}, "inner": {}}):
        with pytest.raises(errors.StateMismatch):
            subject.load_state_dict(damaged)
        assert same(subject.state_dict(), before)


@every_policy
def test_a_decision_touches_no_tensor_and_no_global_generator(make: Callable[[], Policy]) -> None:
    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(f"{func} ran")

    subject = make()
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    with Nothing():
        for score in (1.0, 1.0, 2.0, 1.0):
            subject.decide(score)
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_uniform_asks_when_the_allowance_grows() -> None:
    for ratio in (0.05, 0.29, 0.5, 0.9, 1.0):
        subject, rate = Uniform(ratio), Fraction(str(ratio))
        for batch in range(1, 500):
            assert subject.decide(0.0) == math.floor(rate * batch) - math.floor(rate * (batch - 1))


def test_uniform_gathers_labels_until_a_batch_gets_all_it_takes() -> None:
    subject = Uniform(0.5)
    assert [subject.decide(0.0, want=3) for _ in range(12)] == [0, 0, 0, 0, 0, 3] * 2


def test_uniform_spends_a_refund_again() -> None:
    subject = Uniform(0.5)
    assert [subject.decide(0.0) for _ in range(4)] == [0, 1, 0, 1]
    subject.refund(1)
    assert subject.decide(0.0) == 1


@pytest.mark.parametrize("want", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.5, 0.9, 1.0])
def test_exact_random_draws_the_rounded_number(ratio: float, want: int) -> None:
    grants = [Random(ratio, exact=True, length=783, seed=seed) for seed in (0, 1)]
    drawn = [[subject.decide(0.0, want) for _ in range(783)] for subject in grants]
    assert [sum(labels) for labels in drawn] == [round(Fraction(str(ratio)) * 783)] * 2
    assert drawn[0] != drawn[1] or ratio == want
    assert [subject.decide(0.0, want) for subject in grants] == [0, 0]


def test_bernoulli_random_draws_at_its_rate() -> None:
    subject = Random(0.3, credit=10_000)
    assert sum(subject.decide(0.0) for _ in range(4000)) == pytest.approx(1200, abs=4 * math.sqrt(4000 * 0.21))
    subject = Random(0.3, credit=10_000)
    assert sum(subject.decide(0.0, want=3) for _ in range(8000)) == pytest.approx(
        2400, abs=3 * 4 * math.sqrt(8000 * 0.09)
    )


@pytest.mark.parametrize("want", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.05, 0.29, 0.5, 0.9, 1.0])
def test_exhaust_spends_the_whole_budget(ratio: float, want: int) -> None:
    inner = [
        BudgetPaced(ratio, slack=math.inf, warmup=250),
        BudgetPaced(ratio),
        BudgetPaced(ratio, credit=5),
        BudgetPaced(ratio, slack=0, credit=math.floor(ratio * 203)),
        BudgetPaced(ratio, total=20),
        BudgetPaced(ratio, preset="authors", length=203),
        Uniform(ratio),
        Random(ratio),
        Random(ratio, exact=True, length=203),
        Never(),
    ]
    for alone in inner:
        subject = Exhaust(alone, length=203)
        scores = np.random.default_rng(1).permutation(203)
        for batch, score in enumerate(scores, 1):
            subject.decide(score, want)
            assert subject.spent <= subject.allowed, batch
        budget = math.floor(alone.account.rate * 203)
        assert subject.spent == min(budget, alone.account.total or budget), alone
        assert alone.seen == 0, "the policy given is not used up"


def test_exhaust_leaves_a_policy_alone_until_it_must() -> None:
    plain, wrapped = BudgetPaced(0.3), Exhaust(BudgetPaced(0.3), length=200)
    scores = np.random.default_rng(2).normal(size=190)
    assert [wrapped.decide(score) for score in scores] == [plain.decide(score) for score in scores]


def test_exhaust_passes_reset_and_the_record_on() -> None:
    subject = Exhaust(BudgetPaced(0.5), length=10)
    for score in range(6):
        subject.decide(score)
    assert subject.last == subject.policy.last
    subject.reset(account=False)
    assert subject.seen == 6
    assert len(subject.policy.state_dict()["scores"]) == 0


@pytest.mark.parametrize("delay", [0, 1, 60, 101, 150, 199])
@pytest.mark.parametrize(
    "alone",
    [BudgetPaced(0.5), BudgetPaced(0.5, total=30), Uniform(0.5), Random(0.5), Random(0.5, exact=True, length=200)],
    ids=repr,
)
def test_asked_early_every_answer_comes_before_the_end_and_the_budget_is_the_same(alone: Policy, delay: int) -> None:
    subject = early(alone, length=200, delay=delay)
    asked = [subject.decide(score) for score in np.random.default_rng(3).normal(size=200)]
    assert sum(asked[200 - delay :]) == 0
    assert sum(asked) == subject.spent == min(alone.account.total or 100, 200 - delay)
    assert alone.seen == 0, "the policy given is not used up"


def test_several_labels_a_batch_make_up_for_little_time() -> None:
    subject = early(Uniform(0.5), length=100, delay=75, labels=3)
    assert sum(subject.decide(0.0, want=3) for _ in range(100)) == 50


def test_nobody_is_asked_who_could_only_answer_after_the_end() -> None:
    assert isinstance(early(Uniform(0.5), length=40, delay=40), Never)


def test_always_gives_no_more_than_its_labels() -> None:
    subject = Always(labels=2)
    assert [subject.decide(0.0, want) for want in (1, 2, 3)] == [1, 2, 2]


@pytest.mark.parametrize("make", [BudgetPaced, Uniform, Random])
def test_a_ratio_that_no_batch_can_take_is_refused(make: Callable[..., Policy]) -> None:
    subject = make(1.5)
    with pytest.raises(errors.BadConfig, match=r"1\.5 labels a batch"):
        subject.decide(1.0)
    assert subject.seen == 0
    assert subject.decide(1.0, want=2) in (0, 1)
    assert subject.decide(1.0, want=1) in (0, 1), "a last, smaller batch may take fewer"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Random(0.2, exact=True), "needs length"),
        (lambda: Random(0.2, exact=True, length=9, credit=1), "sets its own"),
        (lambda: Random(0.2, length=9), "exact=True"),
        (lambda: Always(labels=0), "labels=0"),
        (lambda: Exhaust(Uniform(0.1, per="sample"), length=9), "per='batch'"),
        (lambda: Exhaust(Uniform(0.1), length=0), "length=0"),
        (lambda: early(Always(), length=9, delay=2), "no ratio per batch"),
        (lambda: early(Uniform(0.1, per="sample"), length=9, delay=2), "no ratio per batch"),
        (lambda: early(BudgetPaced(0.1, preset="authors", length=9), length=9, delay=2), "without a preset"),
        (lambda: early(Uniform(0.1), length=9, delay=-1), "delay=-1"),
        (lambda: policy("pased"), "Did you mean 'paced'"),
        (lambda: policy("uniform", window=3), "It takes ratio, total, per"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Callable[[], Policy], words: str) -> None:
    with pytest.raises(errors.BadConfig, match=words):
        make()


def test_policies_are_found_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = [policy(name) for name in ("paced", "uniform", "random", "always", "never")]
    assert [type(each) for each in built] == [BudgetPaced, Uniform, Random, Always, Never]
    assert policy("paced", ratio=0.1, slack=2).spent == 0


class Idle(Policy):
    """Wishes for nothing."""

    def __init__(self) -> None:
        super().__init__(Account(1))

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        return 0, 0.0, 0.0


def test_exhaust_begins_when_as_many_labels_a_batch_as_are_taken_now_just_cover_the_rest() -> None:
    policy = Exhaust(Idle(), length=10)
    assert [policy.decide(0.0, want=2) for _ in range(10)] == [0] * 5 + [2] * 5
