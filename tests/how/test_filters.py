"""Which samples pass, and what is remembered of them?"""

from __future__ import annotations

import math

import pytest
import torch

from wise_atta import errors
from wise_atta.how import Average, Redundancy, confident


def test_confidence_is_measured_against_the_number_of_classes() -> None:
    just_below, just_above = 0.4 * math.log(1000) - 1e-6, 0.4 * math.log(1000) + 1e-6
    assert confident(torch.tensor([just_below, just_above], dtype=torch.float64), 1000).tolist() == [True, False]


def test_nothing_is_redundant_before_something_was_kept() -> None:
    redundancy = Redundancy(epsilon=0.05)
    redundancy.follow(torch.zeros(0, 3))
    assert redundancy.new(torch.eye(3)).all()


def test_the_mean_prediction_follows_the_kept_ones() -> None:
    redundancy = Redundancy(epsilon=0.5, momentum=0.9)
    redundancy.follow(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    redundancy.follow(torch.tensor([[0.0, 1.0]]))
    torch.testing.assert_close(redundancy.value, torch.tensor([0.675, 0.325]))


def test_a_saved_average_is_not_shared_with_the_running_one() -> None:
    average = Average(0.5)
    average.follow(torch.tensor(1.0))
    state = average.state_dict()
    average.follow(torch.tensor(3.0))
    other = Average(0.5)
    other.load_state_dict(state)
    assert (other.value, average.value) == (1.0, 2.0)
    other.reset()
    assert other.state_dict() == {"value": None}


@pytest.mark.parametrize("momentum", [-0.1, 1.1])
def test_a_momentum_outside_its_range_is_refused(momentum: float) -> None:
    with pytest.raises(errors.BadConfig, match="momentum"):
        Average(momentum)
