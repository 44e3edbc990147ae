"""Do redrawn blocks give the deviation that theory gives, and is the break-even ratio where a hand would put it?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from wise_atta import rng
from wise_atta.bench import bootstrap


def slow_break_even(ratios: list[float], differences: list[float]) -> float:
    """One step after the other, as on paper."""
    for place, difference in enumerate(differences):
        if difference < 0:
            if place == 0:
                return ratios[0]
            share = differences[place - 1] / (differences[place - 1] - difference)
            return ratios[place - 1] + share * (ratios[place] - ratios[place - 1])
    return float("inf")


@pytest.mark.parametrize("domains", [["one"] * 400, [name for name in "abcdefghij" for _ in range(40)]])
def test_the_deviation_of_a_share_is_that_of_coin_throws(domains: list[str]) -> None:
    share, batch = 0.3, 16
    deviations = []
    for trial in range(12):
        thrown = rng.numpy(trial, "throws").random((len(domains), batch)) < share
        weights = bootstrap.weights(domains, 1500, rng.numpy(trial, "blocks"))
        deviations.append((weights @ thrown.sum(axis=1) / thrown.size).std())
    expected = np.sqrt(share * (1 - share) / (len(domains) * batch))
    assert np.mean(deviations) == pytest.approx(expected, rel=0.05)


def test_short_domains_do_not_make_it_too_sure() -> None:
    # Eight batches a domain: without the stretching the deviation would come out 13 % too small.
    domains = [f"{name}" for name in range(50) for _ in range(8)]
    thrown = rng.numpy(0, "throws").random((400, 64)) < 0.5
    weights = bootstrap.weights(domains, 4000, rng.numpy(0, "blocks"))
    expected = np.sqrt(0.25 / thrown.size)
    assert (weights @ thrown.mean(axis=1) / 400).std() == pytest.approx(expected, rel=0.08)


def test_batches_that_go_together_widen_the_interval() -> None:
    # Runs of ten equal batches: sampling them one by one would believe in ten times as many.
    blocks = (rng.numpy(0, "throws").random(100) < 0.5).astype(float)
    steady = np.repeat(blocks, 10)
    weights = bootstrap.weights(["one"] * 1000, 1000, rng.numpy(0, "blocks"))
    apart = np.sqrt(0.25 / 1000)
    assert (weights @ steady / 1000).std() > 2 * apart


def test_every_batch_counts_alike_on_average_and_domains_keep_their_size() -> None:
    domains = ["a"] * 20 + ["b"] * 35
    weights = bootstrap.weights(domains, 4000, rng.numpy(1, "blocks"))
    assert np.allclose(weights[:, :20].sum(axis=1), 20, atol=1e-3)
    assert np.allclose(weights[:, 20:].sum(axis=1), 35, atol=1e-3)
    assert np.abs(weights.mean(axis=0) - 1).max() < 0.1


def test_runs_vary_as_much_as_their_mean_does() -> None:
    errors = np.array([10.0, 12.0, 17.0])
    means = bootstrap.draws(3, 20_000, rng.numpy(0, "runs")) @ errors
    assert means.mean() == pytest.approx(errors.mean(), abs=0.05)
    assert means.std() == pytest.approx(errors.std(ddof=1) / np.sqrt(3), rel=0.02)
    assert (bootstrap.draws(1, 5, rng.numpy(0, "runs")) == 1).all(), "one run says nothing about chance"


@pytest.mark.parametrize("streams", [2, 3, 5, 10])
def test_an_interval_over_few_streams_holds_what_is_true_as_often_as_it_says(streams: int) -> None:
    draw, trials = rng.numpy(0, "streams"), 600
    intervals = [
        bootstrap.interval(bootstrap.student(streams, 1000, draw) @ draw.normal(size=streams)) for _ in range(trials)
    ]
    # Of 600 intervals 95 % hold zero, give or take 0.9 %.
    assert sum(low <= 0 <= high for low, high in intervals) / trials == pytest.approx(0.95, abs=0.025)


def test_break_even_of_a_case_worked_out_by_hand() -> None:
    # +3 points at 0.1, +1 at 0.3, −1 at 0.5: zero is half way between 0.3 and 0.5.
    assert bootstrap.break_even([0.1, 0.3, 0.5], np.array([[3.0], [1.0], [-1.0]])).tolist() == pytest.approx([0.4])
    # Better at 0.1, worse at 0.3: the smallest ratio counts.
    assert bootstrap.break_even([0.1, 0.3], np.array([[-1.0], [1.0]])).tolist() == [0.1]
    assert bootstrap.break_even([0.1, 0.3], np.array([[1.0], [0.0]])).tolist() == [np.inf], "as good is not better"


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.floats(-5, 5).map(lambda x: round(x, 2)), min_size=1, max_size=6))
def test_break_even_is_the_slow_one_s(differences: list[float]) -> None:
    ratios = [0.1 * (place + 1) for place in range(len(differences))]
    fast = bootstrap.break_even(ratios, np.array(differences)[:, None])[0]
    assert fast == pytest.approx(slow_break_even(ratios, differences))
