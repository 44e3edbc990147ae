"""Do the utilities measure what they say, at the cost that they say?"""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor

from wise_atta import errors
from wise_atta.view import View
from wise_atta.when import (
    UTILITIES,
    Count,
    LowKEntropy,
    MeanDrift,
    MeanEntropy,
    TopKDrift,
    TopKEntropy,
    Utility,
    utility,
)


class Anchor:
    """An anchor that counts its forwards."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.calls = logits, 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return self.logits


def batch(n: int = 12, classes: int = 5) -> tuple[View, Anchor]:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(n, classes, generator=generator)
    anchor = Anchor(logits + torch.randn(n, classes, generator=generator))
    return View(1, logits, logits, head=lambda features: features, anchor=anchor), anchor


def entropies(view: View) -> list[float]:
    """H of every row, term by term."""
    rows = view.logits.double().softmax(dim=1).tolist()
    return [-sum(p * math.log(p) for p in row) for row in rows]


def drifts(view: View, anchor: Anchor) -> list[float]:
    """‖p − p̄‖₂ of every row, term by term."""
    current, slow = view.logits.double().softmax(dim=1).tolist(), anchor.logits.double().softmax(dim=1).tolist()
    return [math.dist(p, q) for p, q in zip(current, slow, strict=True)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_each_utility_is_its_formula() -> None:
    view, anchor = batch()
    entropy, drift = sorted(entropies(view)), sorted(drifts(view, anchor))
    expected = {
        Count(): sum(h < 0.4 * math.log(5) for h in entropy),
        Count(threshold_fraction=0.7): sum(h < 0.7 * math.log(5) for h in entropy),
        MeanEntropy(): -mean(entropy),
        MeanEntropy(sign=1): mean(entropy),
        TopKEntropy(k=3): -mean(entropy[-3:]),
        LowKEntropy(k=3): -mean(entropy[:3]),
        LowKEntropy(): -mean(entropy[:8]),
        TopKEntropy(): -mean(entropy[-8:]),
        TopKDrift(): mean(drift[-8:]),
        MeanDrift(): mean(drift),
        TopKDrift(k=3): mean(drift[-3:]),
        TopKDrift(k=99, sign=-1): -mean(drift),
    }
    assert 0 < expected[Count()] < expected[Count(threshold_fraction=0.7)] < 12
    for subject, value in expected.items():
        result = subject(view)
        assert result.shape == () and result.is_floating_point()
        assert result.item() == pytest.approx(value, abs=1e-5), subject


@pytest.mark.parametrize("name", UTILITIES)
def test_only_drift_costs_the_anchors_forward(name: str) -> None:
    view, anchor = batch()
    subject = utility(name)
    subject(view)
    assert anchor.calls == subject.needs_anchor == ("drift" in name)


@pytest.mark.parametrize("name", ["count", "mean-entropy", "topk-entropy", "lowk-entropy"])
def test_a_confident_batch_comes_before_an_unsure_one(name: str) -> None:
    view, anchor = batch()
    unsure = View(2, view.logits / 10, view.features, view.head, anchor)
    assert utility(name)(view) > utility(name)(unsure)


@pytest.mark.parametrize("name", ["mean-drift", "topk-drift"])
def test_a_batch_that_moved_comes_first(name: str) -> None:
    view, _ = batch()
    still = View(2, view.logits, view.features, view.head, lambda: view.logits)
    assert utility(name)(view) > utility(name)(still)


def test_a_count_is_exact_in_half_precision() -> None:
    logits = torch.zeros(3001, 4, dtype=torch.bfloat16)
    logits[:, 0] = 30
    assert Count()(View(1, logits, logits, lambda features: features, lambda: logits)).item() == 3001


@pytest.mark.parametrize("name", UTILITIES)
def test_utilities_are_values(name: str) -> None:
    subject: Utility = utility(name)
    assert subject == copy.deepcopy(subject) == pickle.loads(pickle.dumps(subject)) == eval(repr(subject))
    with pytest.raises(AttributeError):
        subject.needs_anchor = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("count", {"threshold_fraction": 0}, "threshold_fraction=0"),
        ("mean-entropy", {"sign": 0}, "sign=0"),
        ("topk-drift", {"k": 0}, "k=0"),
        ("mean-drift", {"k": 3}, "It takes sign"),
        ("mean-drfit", {}, "Did you mean 'mean-drift'"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict, words: str) -> None:
    with pytest.raises(errors.BadConfig, match=words):
        utility(name, **options)
