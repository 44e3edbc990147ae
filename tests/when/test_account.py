"""Does the account keep its promise to the label?"""

import copy
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from wise_atta import errors
from wise_atta.when import Account

exactly = settings(derandomize=True, deadline=None, max_examples=100)


def test_a_decimal_ratio_earns_what_it_says() -> None:
    assert 0.29 * 100 < 29, "floats fall short here, so this test can fail"
    account = Account(0.29)
    account.earn(100)
    assert account.allowed == 29
    assert Account(np.float32(0.29)).rate == Account("0.29").rate == Fraction(29, 100)
    assert Account("1/3").earned(3) == 1


@exactly
@given(
    hundredths=st.integers(0, 300),
    credit=st.integers(0, 5),
    total=st.none() | st.integers(0, 40),
    moves=st.lists(st.tuples(st.sampled_from(["earn", "spend", "refund"]), st.integers(0, 12)), max_size=60),
)
def test_no_sequence_of_moves_overdraws(
    hundredths: int, credit: int, total: int | None, moves: list[tuple[str, int]]
) -> None:
    account = Account(hundredths / 100, credit=credit, total=total)
    seen = spent = 0
    for move, amount in moves:
        allowed = hundredths * seen // 100 + credit
        allowed = allowed if total is None else min(allowed, total)
        assert (account.seen, account.spent, account.allowed, account.available) == (
            seen,
            spent,
            allowed,
            allowed - spent,
        )
        if move == "earn":
            account.earn(amount)
            seen += amount
        elif move == "spend" and amount <= allowed - spent:
            account.spend(amount)
            spent += amount
        elif move == "spend":
            with pytest.raises(errors.Overdraft):
                account.spend(amount)
        elif amount <= spent:
            account.refund(amount)
            spent -= amount
        else:
            with pytest.raises(errors.BadInput):
                account.refund(amount)
        assert 0 <= account.spent <= account.allowed


def test_unlimited_credit_stops_only_at_the_total() -> None:
    account = Account(0.1, credit=math.inf)
    account.spend(1000)
    assert account.available == math.inf
    capped = Account(0.1, credit=math.inf, total=3)
    assert capped.available == 3


def test_a_known_length_rounds_the_budget() -> None:
    account = Account.for_length(0.1, 782)
    assert (account.total, account.allowed, account.earned(782)) == (78, 78, 78)


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": -0.1},
        {"ratio": math.nan},
        {"ratio": math.inf},
        {"ratio": "many"},
        {"ratio": "1/0"},
        {"ratio": 1.5, "per": "sample"},
        {"ratio": 0.5, "per": "hour"},
        {"ratio": 0.5, "credit": -1},
        {"ratio": 0.5, "credit": 1.5},
        {"ratio": 0.5, "total": -1},
    ],
)
def test_terms_outside_their_range_are_refused(options: dict) -> None:
    with pytest.raises(errors.BadConfig, match=next(reversed(options))):
        Account(**options)


def test_a_failed_move_changes_nothing() -> None:
    account = Account(0.5)
    account.earn(4)
    account.spend(1)
    before = account.state_dict()
    for move in (
        lambda: account.spend(2),
        lambda: account.spend(-1),
        lambda: account.earn(-1),
        lambda: account.earn(0.5),
        lambda: account.refund(2),
        lambda: account.take_back(1, 2),
    ):
        with pytest.raises(errors.WiseAttaError):
            move()
        assert account.state_dict() == before


def test_state_and_copies_go_on_where_it_stood() -> None:
    account = Account("1/3", credit=2, total=50)
    account.earn(10)
    account.spend(4)
    loaded = Account("1/3", credit=2, total=50)
    loaded.load_state_dict(account.state_dict())
    for twin in (loaded, copy.deepcopy(account), pickle.loads(pickle.dumps(account))):
        assert (twin.seen, twin.spent, twin.allowed) == (10, 4, 5)
    assert repr(account) == "Account('1/3', per='batch', credit=2, total=50)"
    assert eval(repr(account)).state_dict() == Account("1/3", credit=2, total=50).state_dict()


@pytest.mark.parametrize(
    "change",
    [{"ratio": "1/4"}, {"per": "sample"}, {"credit": 1}, {"total": 9}, {"version": 99}, {"spent": 100}, {"seen": -1}],
)
def test_a_foreign_or_damaged_state_is_refused(change: dict) -> None:
    account = Account(0.5)
    account.earn(4)
    state = account.state_dict()
    with pytest.raises(errors.StateMismatch):
        account.load_state_dict({**state, **change})
    with pytest.raises(errors.StateMismatch):
        account.load_state_dict({})
    assert account.state_dict() == state
