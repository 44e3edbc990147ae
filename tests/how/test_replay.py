"""Does the replay buffer keep what it should, apart from the batch it came from?"""

from __future__ import annotations

import pytest
import torch
from core.checks import same, saved, stored

from wise_atta import errors
from wise_atta.how import Replay
from wise_atta.how.replay import stack


def filled(size: int | None = 4, count: int = 6) -> Replay:
    buffer = Replay(size, seed=1)
    buffer.add(torch.arange(count * 2.0).view(count, 2), range(count), [(1, row) for row in range(count)])
    return buffer


def test_the_oldest_leave_first() -> None:
    assert [kept.label for kept in filled().kept] == [2, 3, 4, 5]
    assert [kept.label for kept in filled(None).kept] == list(range(6))


def test_samples_are_copies_and_take_no_more_room_than_themselves() -> None:
    batch = torch.zeros(500, 100)
    buffer = Replay(2)
    buffer.add(batch, [0] * 500, [(1, 0)] * 500)
    batch += 1
    assert buffer.kept[0].inputs.sum() == 0
    assert len(stored(buffer.state_dict())) < 10_000


def test_draws_are_seeded_without_repetition_and_differ_from_step_to_step() -> None:
    buffer = filled(None)
    labels = [[kept.label for kept in buffer.sample(3, counter)] for counter in range(30)]
    assert labels == [[kept.label for kept in filled(None).sample(3, counter)] for counter in range(30)]
    assert all(len(set(drawn)) == 3 for drawn in labels) and len({tuple(drawn) for drawn in labels}) > 10
    assert sorted(kept.label for kept in buffer.sample(99, 0)) == list(range(6))


def test_draws_with_replacement_make_up_any_number() -> None:
    buffer = Replay(None, repeat=True, seed=1)
    assert buffer.sample(5, 0) == []
    buffer.add(torch.zeros(3, 2), range(3), [(1, row) for row in range(3)])
    drawn = [kept.label for kept in buffer.sample(40, 0)]
    assert len(drawn) == 40 and set(drawn) == {0, 1, 2}


def test_its_state_survives_a_file() -> None:
    one, other = filled(), Replay(4)
    other.load_state_dict(saved(one.state_dict()))
    assert same(one.state_dict(), other.state_dict())
    one.reset()
    assert len(one) == 0 and len(other) == 4


def test_trees_of_inputs_are_kept_and_put_together_again() -> None:
    tree = {"ids": torch.arange(6).view(3, 2), "more": (torch.rand(3), torch.rand(3, 1))}
    buffer = Replay(None)
    buffer.add(tree, [0, 1, 2], [(1, 0), (1, 1), (1, 2)])
    again = stack([kept.inputs for kept in buffer.kept], torch.device("cpu"))
    assert same(again, tree)


def test_samples_of_different_shapes_are_not_put_together() -> None:
    with pytest.raises(errors.BadInput, match=r"different shapes: \[\(3, 8\), \(3, 9\)\]"):
        stack([{"a": torch.zeros(3, 8)}, {"a": torch.zeros(3, 9)}], torch.device("cpu"))


@pytest.mark.parametrize("size", [0, -3])
def test_a_buffer_that_keeps_nothing_is_refused(size: int) -> None:
    with pytest.raises(errors.BadConfig, match="keeps nothing"):
        Replay(size)
