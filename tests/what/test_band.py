"""Does the band let pass what is neither too sure nor too unsure, and new?"""

from __future__ import annotations

import math

import pytest
import torch
from core.checks import same, saved
from torch import Tensor

from wise_atta import errors
from wise_atta.view import View
from wise_atta.what import Band

# Entropies as shares of ln 3: about 0.00, 0.23, 0.52, 0.89 and 1; two predictions of class 0, two of class 1.
LOGITS = torch.tensor([[12.0, 0.0, 0.0], [3.5, 0.0, 0.0], [0.0, 2.3, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


def view_of(logits: Tensor, number: int = 1) -> View:
    return View(number, logits, logits, head=lambda f: f, anchor=lambda: logits)


def shares() -> list[float]:
    return (view_of(LOGITS).entropy / math.log(3)).tolist()


def test_entropies_on_both_sides_are_left_out() -> None:
    assert [0.0 < share < 1.0001 for share in shares()] == [True] * 5 and shares() == sorted(shares())
    assert Band(above=0.1, below=0.8).pick(view_of(LOGITS), 5) == [1, 2]
    assert Band(below=0.8).pick(view_of(LOGITS), 5) == [0, 1, 2]


def test_what_is_like_what_was_picked_is_left_out() -> None:
    band = Band(below=0.8, epsilon=0.9)
    assert band.pick(view_of(LOGITS[1:2]), 5) == [0]
    assert band.pick(view_of(LOGITS), 5) == [2]


def test_of_too_many_the_least_sure_are_picked_in_the_order_of_the_batch() -> None:
    assert Band(below=0.99).pick(view_of(LOGITS), 2) == [2, 3]
    assert Band(below=0.99).pick(view_of(LOGITS.flip(0)), 2) == [1, 2]


def test_nothing_in_the_band_is_nothing_picked() -> None:
    band = Band(above=0.4, below=0.5)
    assert band.pick(view_of(LOGITS), 5) == [] and band.redundancy.value is None


def test_its_state_survives_a_file_and_reset_forgets_it() -> None:
    one, other = Band(below=0.8, lower=True), Band(below=0.8, lower=True)
    one.pick(view_of(LOGITS), 5)
    other.load_state_dict(saved(one.state_dict()))
    assert same(one.state_dict(), other.state_dict())
    one.reset()
    assert same(one.state_dict(), Band(below=0.8, lower=True).state_dict())
    assert not same(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("options", [{"above": 0.5, "below": 0.5}, {"above": -0.1}, {"below": 0.0}, {"epsilon": 0.0}])
def test_a_band_that_nothing_fits_in_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(errors.BadConfig):
        Band(**options)


def test_a_limit_that_is_lowered_never_rises_above_where_it_began() -> None:
    band = Band(below=0.8, epsilon=2.0, lower=True)
    assert band.pick(view_of(LOGITS[:2]), 5) == [0, 1]
    assert band.pick(view_of(LOGITS[[2, 3, 4]]), 5) == [0], "entropies have risen since, and 0.89 is above 0.8"
    band.pick(view_of(LOGITS[[0] * 200]), 5)
    assert band.pick(view_of(LOGITS[[2]]), 5) == [], "they have fallen since"
