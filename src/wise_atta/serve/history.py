"""The recent history of a stream: counts and times, second by second, and more coarsely for longer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wise_atta.serve import api

# Seconds that one point covers, and how many points are kept: ten minutes, two hours, three days.
STEPS = {api.Resolution.FINE: 600, api.Resolution.MEDIUM: 720, api.Resolution.COARSE: 864}
# Of a point that is complete only so many classes are kept by name: a thousand of them would fill the memory.
_CLASSES = 12
# Upper ends in seconds of the bins that waiting times are counted in, 12 % apart; beyond them is one bin more.
_EDGES = 1e-4 * 1.12 ** np.arange(120)


@dataclass
class _Slot:
    """What happened from `at` on, for as long as one point covers."""

    at: float
    seen: NDArray[np.int64] | None = None
    classes: dict[int, int] = field(default_factory=dict)
    waits: NDArray[np.int32] = field(default_factory=lambda: np.zeros(len(_EDGES) + 1, np.int32))
    requests: int = 0
    pictures: int = 0
    batches: int = 0
    learned: int = 0
    skipped: int = 0
    entropy: float = 0.0
    gauges: dict[str, float] = field(default_factory=dict)

    def close(self) -> None:
        """Keep the commonest classes only."""
        self.classes, self.seen = self.named(), None

    def named(self) -> dict[int, int]:
        """How often the commonest classes were predicted, commonest first."""
        if self.seen is None:
            return self.classes
        best = np.argsort(-self.seen, kind="stable")[:_CLASSES]
        return {int(label): int(self.seen[label]) for label in best if self.seen[label]}


class History:
    """The latest of a stream, in as much memory after a year as after a day.

    Examples
    --------
    >>> history = History()
    >>> history.answered(0.2, [0.010, 0.012], 1.5, np.array([3, 0, 1]), skipped=False)
    >>> history.answered(0.9, [0.300], 0.5, np.array([1, 0, 0]), skipped=True)
    >>> history.learned(2.5, spent=1, allowed=2)
    >>> first, second = history.points(step=1)
    >>> first.requests, first.pictures, first.skipped, first.classes, first.entropy
    (3, 5, 1, {0: 4, 2: 1}, 0.4)
    >>> second.at, second.learned, second.spent, second.entropy
    (2.0, 1, 1, None)
    >>> [point.at for point in history.points(step=1, since=1.5)]
    [2.0]
    """

    def __init__(self) -> None:
        self._slots: dict[int, deque[_Slot]] = {step: deque(maxlen=count) for step, count in STEPS.items()}
        self._lock = threading.Lock()

    def answered(
        self,
        now: float,
        waits: Sequence[float],
        entropy: float,
        seen: NDArray[np.int64],
        *,
        skipped: bool,
        **gauges: float,
    ) -> None:
        """A micro-batch was answered.

        Parameters
        ----------
        now
            Seconds since 1970.
        waits
            How long each of its requests took, in seconds.
        entropy
            Of its predictions, summed.
        seen
            How often each class was predicted.
        skipped
            Whether it is not learned.
        gauges
            `spent`, `allowed`, `drift` and `waiting` as they stand.
        """
        counts = np.bincount(np.searchsorted(_EDGES, waits), minlength=len(_EDGES) + 1).astype(np.int32)
        with self._lock:
            for slot in self._now(now):
                slot.requests += len(waits)
                slot.pictures += int(seen.sum())
                slot.batches += 1
                slot.skipped += skipped
                slot.entropy += entropy
                slot.seen = seen.copy() if slot.seen is None else slot.seen + seen
                slot.waits += counts
                slot.gauges |= gauges

    def learned(self, now: float, **gauges: float) -> None:
        """A micro-batch was learned; the gauges stand as given."""
        with self._lock:
            for slot in self._now(now):
                slot.learned += 1
                slot.gauges |= gauges

    def points(self, *, step: int = 1, since: float = 0.0) -> list[api.Point]:
        """What happened in steps of so many seconds, oldest first; only points that end after `since`."""
        with self._lock:
            return [_point(slot, step) for slot in self._slots[step] if slot.at + step > since]

    def latency(self, since: float) -> api.Latency | None:
        """How long requests took since a moment of the last ten minutes; empty if there were none."""
        with self._lock:
            waits = sum((slot.waits for slot in self._slots[1] if slot.at + 1 > since), np.zeros(len(_EDGES) + 1, int))
        total = int(waits.sum())
        if not total:
            return None
        return api.Latency(requests=total, p50_s=quantile(waits, 0.5), p99_s=quantile(waits, 0.99))

    def _now(self, now: float) -> list[_Slot]:
        """The slots of this moment. Should the clock go back, the latest ones take what comes."""
        current = []
        for step, slots in self._slots.items():
            start = now // step * step
            if not slots or slots[-1].at < start:
                if slots:
                    slots[-1].close()
                slots.append(_Slot(start))
            current.append(slots[-1])
        return current


def quantile(waits: NDArray[np.integer], share: float) -> float:
    """The time within which a share of the counted requests was answered: the upper end of its bin, in seconds.

    >>> counts = np.bincount(np.searchsorted(_EDGES, [0.01] * 99 + [0.5]), minlength=len(_EDGES) + 1)
    >>> 0.01 <= quantile(counts, 0.5) < 0.0112, 0.5 <= quantile(counts, 0.999) < 0.56
    (True, True)
    """
    place = int(np.searchsorted(np.cumsum(waits), share * waits.sum()))
    return float(_EDGES[min(place, len(_EDGES) - 1)])


def _point(slot: _Slot, step: int) -> api.Point:
    some = slot.requests > 0
    return api.Point(
        at=slot.at,
        seconds=step,
        requests=slot.requests,
        pictures=slot.pictures,
        batches=slot.batches,
        learned=slot.learned,
        skipped=slot.skipped,
        entropy=slot.entropy / slot.pictures if slot.pictures else None,
        classes=slot.named(),
        p50_s=quantile(slot.waits, 0.5) if some else None,
        p99_s=quantile(slot.waits, 0.99) if some else None,
        spent=_whole(slot.gauges.get("spent")),
        allowed=_whole(slot.gauges.get("allowed")),
        waiting=_whole(slot.gauges.get("waiting")),
        drift=slot.gauges.get("drift"),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
