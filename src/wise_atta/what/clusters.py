"""Samples that stand for regions which no label has reached: the centres of clusters without an old anchor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from wise_atta import rng
from wise_atta.part import at_least, running
from wise_atta.view import View
from wise_atta.what.selector import Selector, check_count

Points: TypeAlias = NDArray[np.float64]
# (points [n, d], weights [n], k) → centres [k, d] to start from.
Start: TypeAlias = Callable[[Points, Points, int], Points]

# So many weights are remembered; those of samples whose label never came are forgotten at last.
_REMEMBER = 10_000


class Memory(Protocol):
    """Samples that were labelled before: where each came from (batch, row), and its features now."""

    @property
    def places(self) -> Sequence[tuple[int, int]]: ...

    @property
    def features(self) -> Tensor | None: ...


@dataclass(kw_only=True, eq=False)
class Clusters(Selector):
    """Weighted k-means over old anchors and new candidates; asks where a cluster holds no old anchor (SimATTA).

    Candidates are samples with H ≥ e_h. With m old anchors and k labels to ask for there are m + k clusters, so that at
    least k hold no old anchor. Of these the largest come first, and each is stood for by the candidate closest to its
    centre, at equal distance the first in the batch. A candidate weighs 1; an anchor weighs as much as the number of
    samples of its cluster when it was picked, and gains (samples in its cluster, anchors included)/(old anchors in its
    cluster) whenever clusters are formed again, as in the published code.

    Parameters
    ----------
    memory
        The old anchors. None: there are none.
    e_h
        Entropy, in nats, from which on a sample is a candidate.
    iterations
        At most so many rounds of k-means.
    start
        Gives the centres to start from, instead of a seeded k-means++.
    seed
        Of k-means++.
    """

    memory: Memory | None = field(default=None, kw_only=False, repr=False)
    e_h: float = 0.1
    iterations: int = 100
    start: Start | None = field(default=None, repr=False)
    balance: bool = field(default=False, init=False, repr=False)  # no option: it does not rank classes
    _weights: dict[tuple[int, int], float] = running({}, key="weights")

    def __post_init__(self) -> None:
        at_least(0, e_h=self.e_h)
        at_least(1, iterations=self.iterations)

    def pick(self, view: View, k: int = 1) -> list[int]:
        check_count(k)
        rows = (view.entropy >= self.e_h).nonzero().flatten().tolist()
        if not rows:
            return []
        fresh = _array(view.features[rows])
        old, places = fresh[:0], list[tuple[int, int]]()
        if self.memory is not None and self.memory.features is not None:
            old, places = _array(self.memory.features), list(self.memory.places)
        points = np.concatenate([old, fresh])
        known = dict(self._weights)
        weights = np.array([known.get(place, 1.0) for place in places] + [1.0] * len(fresh))
        k = min(k, len(fresh))
        if self.start is None:
            centres = plus_plus(points, weights, len(old) + k, rng.numpy(self.seed, "clusters", view.number))
        else:
            centres = self.start(points, weights, len(old) + k)
        centres, cluster = k_means(points, weights, centres, self.iterations)

        sizes = np.bincount(cluster, minlength=len(centres))
        holds = np.bincount(cluster[: len(old)], minlength=len(centres))
        free = np.flatnonzero(holds == 0)
        for place, own in zip(places, cluster, strict=False):
            known[place] = known.get(place, 1.0) + float(sizes[own] / holds[own])
        picked: list[int] = []
        for centre in free[np.argsort(-sizes[free], kind="stable")][:k]:
            distance = np.linalg.norm(fresh - centres[centre], axis=1)
            distance[[rows.index(row) for row in picked]] = np.inf
            # Two samples are always equally far from their mean: what rounding makes of that must not decide.
            best = int(np.argmax(distance <= distance.min() * (1 + 1e-9)))
            picked.append(rows[best])
            known[view.number, rows[best]] = float(max(sizes[centre], 1))
        self._weights = dict([*known.items()][-_REMEMBER:])
        return picked

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"weights": [[*place, weight] for place, weight in self._weights.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._weights = {(batch, row): weight for batch, row, weight in state["weights"]}


def k_means(
    points: Points, weights: Points, centres: Points, iterations: int = 100
) -> tuple[Points, NDArray[np.int64]]:
    """Weighted k-means: centres, and for each point the number of its own. A centre without points stays.

    >>> points = np.array([[0.0], [2.0], [10.0]])
    >>> k_means(points, np.array([1.0, 3.0, 1.0]), np.array([[0.0], [9.0]]))
    (array([[ 1.5], [10. ]]), array([0, 0, 1]))
    """
    cluster = np.argmin(_squared_distances(points, centres), axis=1)
    for _ in range(iterations):
        member = (cluster == np.arange(len(centres))[:, None]) * weights
        mass = member.sum(axis=1, keepdims=True)
        centres = np.where(mass > 0, member @ points / np.where(mass > 0, mass, 1), centres)
        before, cluster = cluster, np.argmin(_squared_distances(points, centres), axis=1)
        if np.array_equal(before, cluster):
            break
    return centres, cluster


def plus_plus(points: Points, weights: Points, k: int, generator: np.random.Generator) -> Points:
    """Centres for k-means to start from: points drawn with a probability ∝ weight × squared distance to the nearest."""
    chosen: list[int] = []
    nearest = np.ones(len(points))
    for _ in range(k):
        odds = weights * nearest
        # Where all points coincide with centres any will do.
        odds = odds if odds.sum() > 0 else weights
        ladder = np.cumsum(odds)
        chosen.append(min(int(np.searchsorted(ladder, generator.random() * ladder[-1], side="right")), len(points) - 1))
        distance = _squared_distances(points, points[chosen[-1:]])[:, 0]
        nearest = distance if len(chosen) == 1 else np.minimum(nearest, distance)
    return points[chosen]


def _squared_distances(a: Points, b: Points) -> Points:
    distances: Points = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return np.maximum(distances, 0)


def _array(features: Tensor) -> Points:
    array: Points = features.detach().flatten(1).double().cpu().numpy()
    return array
