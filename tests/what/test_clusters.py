"""Do clusters ask where no old anchor is?"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from core.checks import same, saved
from torch import Tensor

from wise_atta import errors, rng
from wise_atta.view import View
from wise_atta.what import Clusters
from wise_atta.what.clusters import k_means, plus_plus


@dataclass
class Old:
    """Anchors of earlier batches."""

    features: Tensor | None = None
    places: list[tuple[int, int]] = field(default_factory=list)


def view_of(features: Any, sure: tuple[int, ...] = (), number: int = 1) -> View:
    features = torch.as_tensor(features, dtype=torch.float64)
    logits = torch.zeros(len(features), 3, dtype=torch.float64)
    logits[list(sure), 0] = 99
    return View(number, logits, features, head=lambda f: f, anchor=lambda: logits)


def first(points: Any, weights: Any, k: int) -> Any:
    """Start from the first points."""
    return points[:k]


def test_it_asks_for_the_candidate_closest_to_each_centre() -> None:
    features = [[0.0], [9.9], [0.2], [10.0], [0.5], [10.4]]
    assert sorted(Clusters(start=first).pick(view_of(features), 2)) == [2, 3]


def test_a_cluster_with_an_old_anchor_is_not_asked_about() -> None:
    old = Old(torch.tensor([[0.1]], dtype=torch.float64), [(1, 7)])
    features = [[0.0], [0.2], [10.0], [10.2], [9.7]]
    assert Clusters(old).pick(view_of(features, number=2), 1) == [2]


def test_the_largest_free_cluster_comes_first() -> None:
    features = [[0.0], [5.0], [5.1], [5.2], [20.0], [20.1]]
    start = np.array([[0.0], [5.0], [20.0]])
    picked = Clusters(start=lambda points, weights, k: start[:k]).pick(view_of(features), 3)
    assert picked[0] == 2 and sorted(picked)[0] == 0 and len(picked) == 3


def test_sure_samples_are_no_candidates_and_none_left_is_no_question() -> None:
    features = [[0.0], [1.0], [2.0]]
    assert Clusters().pick(view_of(features, sure=(0, 2)), 2) == [1]
    assert Clusters().pick(view_of(features, sure=(0, 1, 2)), 2) == []


def test_weights_follow_the_clusters() -> None:
    old = Old()
    selector = Clusters(old, start=first)
    # Clusters {0, 2, 3} and {1}: row 0 stands for three samples, row 1 for one.
    assert selector.pick(view_of([[0.0], [10.0], [0.1], [-0.1]]), 2) == [0, 1]
    assert selector.state_dict()["weights"] == [[1, 0, 3.0], [1, 1, 1.0]]
    old.features, old.places = torch.tensor([[0.0], [10.0]], dtype=torch.float64), [(1, 0), (1, 1)]
    # Three clusters: the anchor at 0 with one new sample, the anchor at 10 alone, and two new ones at 50.
    start = np.array([[0.0], [10.0], [50.0]])
    selector.start = lambda points, weights, k: start
    assert selector.pick(view_of([[0.2], [50.0], [50.1]], number=2), 1) == [1]
    assert selector.state_dict()["weights"] == [[1, 0, 5.0], [1, 1, 2.0], [2, 1, 2.0]]


def test_a_heavy_anchor_holds_its_centre() -> None:
    points, start = np.array([[0.0], [1.0]]), np.array([[0.3]])
    light, heavy = (k_means(points, np.array([weight, 1.0]), start)[0].item() for weight in (1.0, 9.0))
    assert light == pytest.approx(0.5) and heavy == pytest.approx(0.1)


def test_k_means_ends_where_no_point_has_a_nearer_centre_and_centres_are_means() -> None:
    generator = np.random.default_rng(0)
    points, weights = generator.normal(size=(60, 3)), generator.uniform(0.5, 4, size=60)
    centres, cluster = k_means(points, weights, points[:5].copy())
    distances = np.linalg.norm(points[:, None] - centres, axis=2)
    assert np.array_equal(distances.argmin(axis=1), cluster)
    for own in range(5):
        members = cluster == own
        np.testing.assert_allclose(centres[own], np.average(points[members], axis=0, weights=weights[members]))


def test_a_centre_without_points_stays_and_nothing_is_nan() -> None:
    centres, cluster = k_means(np.zeros((3, 2)), np.ones(3), np.array([[0.0, 0.0], [7.0, 7.0]]))
    assert centres[1].tolist() == [7.0, 7.0] and cluster.tolist() == [0, 0, 0]
    assert len(set(Clusters().pick(view_of(np.zeros((4, 2))), 3))) == 3


def test_starting_points_are_spread_and_seeded() -> None:
    points = np.array([[0.0], [0.1], [100.0]])
    for seed in range(20):
        assert points[2] in plus_plus(points, np.ones(3), 2, rng.numpy(seed, "test"))
        assert sorted(plus_plus(points, np.ones(3), 3, rng.numpy(seed, "test")).flatten()) == [0.0, 0.1, 100.0]
    pick = [Clusters(seed=3).pick(view_of(np.random.default_rng(1).normal(size=(30, 2))), 4) for _ in range(2)]
    assert pick[0] == pick[1]


def test_its_state_survives_a_file_and_reset_forgets_it() -> None:
    one, other = Clusters(), Clusters()
    one.pick(view_of([[0.0], [5.0]]), 2)
    other.load_state_dict(saved(one.state_dict()))
    assert same(one.state_dict(), other.state_dict()) and one.state_dict()["weights"]
    one.reset()
    assert same(one.state_dict(), Clusters().state_dict())


def test_bounds_that_make_no_sense_are_refused() -> None:
    for options in ({"e_h": -1.0}, {"iterations": 0}):
        with pytest.raises(errors.BadConfig, match=next(iter(options))):
            Clusters(**options)


def test_with_m_old_anchors_and_k_labels_there_are_always_k_to_ask() -> None:
    generator = np.random.default_rng(0)
    for m, k in itertools.product((0, 1, 5), (1, 3)):
        old = Old(torch.tensor(generator.normal(size=(m, 2))) if m else None, [(1, row) for row in range(m)])
        assert len(Clusters(old).pick(view_of(generator.normal(size=(12, 2)), number=2), k)) == k
