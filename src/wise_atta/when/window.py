"""A sliding window of scores, whose quantiles cost microseconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator


class Window:
    """The last `size` scores, in order of arrival and also sorted.

    Keeping them sorted moves one block of memory a score, where sorting anew would touch every score many times.

    Parameters
    ----------
    size
        How many scores are kept (W).
    scores
        Scores to start with, oldest first.

    Examples
    --------
    >>> window = Window(4, [3.0, 1.0, 4.0, 1.0])
    >>> window.push(5.0)
    >>> list(window), window.quantile(0.5)
    ([1.0, 4.0, 1.0, 5.0], 2.5)
    >>> window.pull()
    >>> list(window)
    [3.0, 1.0, 4.0, 1.0]
    """

    def __init__(self, size: int, scores: Iterable[float] = ()) -> None:
        self.size = size
        self._arrived = deque(scores, maxlen=size)
        self._sorted = sorted(self._arrived)
        self._dropped: float | None = None

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[float]:
        return iter(self._arrived)

    def push(self, score: float) -> None:
        """Append a score and drop the oldest where the window is full."""
        self._dropped = self._arrived[0] if len(self._arrived) == self.size else None
        if self._dropped is not None:
            del self._sorted[bisect_left(self._sorted, self._dropped)]
        self._arrived.append(score)
        insort(self._sorted, score)

    def pull(self) -> None:
        """Take back the last push. Only one push can be taken back."""
        del self._sorted[bisect_left(self._sorted, self._arrived.pop())]
        if self._dropped is not None:
            self._arrived.appendleft(self._dropped)
            insort(self._sorted, self._dropped)
            self._dropped = None

    def quantile(self, level: float) -> float:
        """`np.quantile(scores, level)` with its default method, to the bit."""
        last = len(self._sorted) - 1
        position = last * level
        if position >= last:
            return self._sorted[last]
        index = int(position)
        low, high = self._sorted[index], self._sorted[index + 1]
        # numpy goes from the nearer end, so that the result is monotonic in the level.
        weight, step = position - index, high - low
        return high - step * (1 - weight) if weight >= 0.5 else low + step * weight

    def rank(self, score: float) -> tuple[int, int]:
        """How many scores lie above this one, and how many equal it."""
        above = bisect_right(self._sorted, score)
        return len(self._sorted) - above, above - bisect_left(self._sorted, score)
