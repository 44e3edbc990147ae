"""Does the sorted window give numpy's quantiles, and forget exactly?"""

import numpy as np
from hypothesis import given, settings, strategies as st

from wise_atta.when.window import Window

exactly = settings(derandomize=True, deadline=None, max_examples=300)
scores = st.floats(-1e300, 1e300).map(lambda score: score + 0.0)
tied = st.integers(0, 3).map(float)


@exactly
@given(
    values=st.lists(scores | tied, min_size=1, max_size=40),
    level=st.floats(0, 1) | st.integers(0, 20).map(lambda i: i / 20),
)
def test_quantiles_are_those_of_numpy_to_the_bit(values: list[float], level: float) -> None:
    got = np.float64(Window(len(values), values).quantile(level))
    assert got.tobytes() == np.quantile(np.array(values), level).tobytes()


def test_quantiles_stay_those_of_numpy_while_the_window_slides() -> None:
    generator = np.random.default_rng(0)
    window, kept = Window(100), []
    for score, level in zip(generator.normal(size=2000).round(1) + 0.0, generator.random(2000), strict=True):
        window.push(float(score))
        kept = [*kept, float(score)][-100:]
        assert list(window) == kept
        assert window.quantile(level) == np.quantile(kept, level)
        assert window.rank(kept[0]) == (sum(k > kept[0] for k in kept), kept.count(kept[0]))


@exactly
@given(size=st.integers(1, 5), values=st.lists(tied, min_size=1, max_size=12), last=tied)
def test_a_push_can_be_taken_back(size: int, values: list[float], last: float) -> None:
    window = Window(size, values)
    before = list(window), [window.quantile(level) for level in (0, 0.3, 0.7, 1)]
    window.push(last)
    window.pull()
    assert (list(window), [window.quantile(level) for level in (0, 0.3, 0.7, 1)]) == before
