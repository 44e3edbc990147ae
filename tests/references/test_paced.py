"""Does the package ask when Algorithm 1 says, and when the published code does?"""

from __future__ import annotations

import warnings

import pytest

from references import nets
from wise_atta import rng, when
from wise_atta.reference.wise import BudgetPaced
from wise_atta.reference.wise_published import PublishedPaced

SEEDS = range(4)


def scores(seed: int, count: int = 400, most: int = 12) -> list[float]:
    """Whole numbers, as a count of confident samples is, so that many of them tie."""
    drift = [most * (0.5 + 0.4 * ((t // 80) % 2)) for t in range(count)]
    noise = nets.uniforms(seed)("scores", count).tolist()
    return [float(round(d * u)) for d, u in zip(drift, noise, strict=True)]


def drawn(t: int) -> float:
    """The number that the library draws for batch t."""
    return float(rng.numpy(0, "policy", t).random())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"window": 30, "warmup": 20, "horizon": 10.0, "slack": 3.0}])
def test_the_paper_preset_is_algorithm_1(seed: int, ratio: float, options: dict[str, float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may overspend, as printed
        policy = when.BudgetPaced(ratio, preset="paper", **options)
    decide = BudgetPaced(ratio, draw=drawn, **options)
    assert [policy.decide(s) for s in scores(seed)] == [decide(s) for s in scores(seed)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.123, 0.5, 1.0])
def test_the_authors_preset_is_the_published_budget(seed: int, ratio: float) -> None:
    policy = when.BudgetPaced(ratio, preset="authors", length=400)
    decide = PublishedPaced(ratio, length=400, draw=drawn)
    ours = [policy.decide(s) for s in scores(seed)]
    assert ours == [decide(s) for s in scores(seed)]
    assert sum(ours) <= round(400 * ratio)
