"""Does k-margin spread over unsure samples?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wise_atta import errors
from wise_atta.view import View
from wise_atta.what import KMargin


def view_of(features: Tensor, logits: Tensor | None = None, number: int = 1) -> View:
    logits = torch.zeros(len(features), 3) if logits is None else logits
    return View(number, logits, features, head=lambda f: f, anchor=lambda: logits)


def test_it_goes_from_the_furthest_to_what_is_furthest_from_all_picked() -> None:
    features = torch.tensor([[1.0, 0.0], [5.0, 0.0], [4.9, 0.0], [0.0, 3.0], [0.0, 0.1]])
    assert KMargin().pick(view_of(features), 3) == [1, 3, 0]


def test_a_sure_sample_counts_as_nothing_however_far_it_lies() -> None:
    features = torch.tensor([[100.0, 0.0], [1.0, 0.0]])
    logits = torch.tensor([[99.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert KMargin().pick(view_of(features, logits), 1) == [1]


def test_it_is_the_greedy_choice_of_plain_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    features, logits = torch.randn(20, 4, generator=generator), 2 * torch.randn(20, 5, generator=generator)
    p = logits.softmax(1).sort(descending=True).values
    points = [(1 - (p[i, 0] - p[i, 1])) * features[i] for i in range(20)]
    centres, picked = [torch.zeros(4)], []
    for _ in range(6):
        best = max(set(range(20)) - set(picked), key=lambda i: min(float((points[i] - c).norm()) for c in centres))
        picked.append(best)
        centres.append(points[best])
    assert KMargin().pick(view_of(features, logits), 6) == picked


def test_equal_samples_are_picked_once_each_and_in_a_random_order() -> None:
    same = torch.ones(6, 2)
    orders = {tuple(KMargin().pick(view_of(same, number=number), 6)) for number in range(1, 20)}
    assert all(sorted(order) == list(range(6)) for order in orders) and len(orders) > 10
    assert KMargin(seed=1).pick(view_of(same), 6) == KMargin(seed=1).pick(view_of(same), 6)


def test_more_than_the_batch_holds_is_the_batch_and_none_is_an_error() -> None:
    assert sorted(KMargin().pick(view_of(torch.randn(3, 2)), 9)) == [0, 1, 2]
    with pytest.raises(errors.BadConfig, match="k=0 must be at least 1"):
        KMargin().pick(view_of(torch.randn(3, 2)), 0)
