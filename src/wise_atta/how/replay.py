"""A buffer of past samples for another look, on the CPU, the oldest leaving first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wise_atta import errors, rng
from wise_atta.part import Part, running
from wise_atta.stream import Inputs, tree_map

# (stored, wanted, counter) → places in the buffer.
Draw: TypeAlias = Callable[[int, int, int], Sequence[int]]


@dataclass(frozen=True, eq=False)
class Kept:
    """One sample without a batch dimension, its class, the weight of its loss, and where it came from (batch, row)."""

    inputs: Inputs
    label: int
    weight: float
    place: tuple[int, int]


@dataclass(eq=False)
class Replay(Part):
    """A buffer of samples with their classes.

    Parameters
    ----------
    size
        How many are kept at most; None keeps all.
    name, seed
        A draw depends on the seed, the buffer's name and the counter given with it.
    repeat
        Draw with replacement, so that a few stored samples make up any number.
    draw
        What chooses the samples instead.

    Examples
    --------
    >>> buffer = Replay(size=3)
    >>> buffer.add(torch.arange(4.0).unsqueeze(1), labels=[0, 1, 0, 1], places=[(1, row) for row in range(4)])
    >>> [kept.place for kept in buffer.kept]
    [(1, 1), (1, 2), (1, 3)]
    >>> len(buffer.sample(2, counter=0)), len(buffer.sample(9, counter=0))
    (2, 3)
    """

    size: int | None = 300
    _: KW_ONLY
    name: str = "replay"
    repeat: bool = False
    draw: Draw | None = field(default=None, repr=False)
    seed: int = 0
    kept: list[Kept] = running([], key="kept")

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise errors.BadConfig(f"a buffer of size {self.size} keeps nothing: give at least 1, or None to keep all")

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where the samples came from, oldest first."""
        return [kept.place for kept in self.kept]

    def add(
        self,
        inputs: Inputs,
        labels: Sequence[int],
        places: Sequence[tuple[int, int]],
        weights: Sequence[float] | None = None,
    ) -> None:
        """Keep copies of the samples of a batch."""
        here, kept = tree_map(lambda leaf: leaf.detach().cpu(), inputs), list(self.kept)
        for row, (label, place) in enumerate(zip(labels, places, strict=True)):
            # A copy of its own: a view would keep the whole batch in memory and in every saved state.
            sample = tree_map(lambda leaf, row=row: leaf[row].clone(), here)
            kept.append(Kept(sample, int(label), 1.0 if weights is None else weights[row], place))
        self.kept = kept if self.size is None else kept[-self.size :]

    def sample(self, count: int, counter: int) -> list[Kept]:
        """Any `count` of them, or without replacement all if there are fewer."""
        if not self.kept:
            return []
        draw = self._random if self.draw is None else self.draw
        return [self.kept[place] for place in draw(len(self), count if self.repeat else min(count, len(self)), counter)]

    def _random(self, stored: int, count: int, counter: int) -> list[int]:
        generator = rng.numpy(self.seed, self.name, counter)
        places = generator.integers(stored, size=count) if self.repeat else generator.permutation(stored)[:count]
        return [int(place) for place in places]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "kept": [[kept.inputs, kept.label, kept.weight, *kept.place] for kept in self.kept]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.kept = [Kept(inputs, label, weight, (batch, row)) for inputs, label, weight, batch, row in state["kept"]]


def stack(samples: Sequence[Inputs], device: torch.device) -> Inputs:
    """Samples without a batch dimension, trees of one shape, as one batch."""
    trees: list[Any] = [*samples]
    if isinstance(trees[0], Tensor):
        shapes = {tuple(tensor.shape) for tensor in trees}
        if len(shapes) > 1:
            raise errors.BadInput(
                f"samples of several batches are learned together here, and have different shapes: {sorted(shapes)}. "
                "Bring the inputs to one shape before they are predicted on"
            )
        return torch.stack(trees).to(device)
    if isinstance(trees[0], Mapping):
        return {name: stack([tree[name] for tree in trees], device) for name in trees[0]}
    return tuple(stack([tree[place] for tree in trees], device) for place in range(len(trees[0])))
