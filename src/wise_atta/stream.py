"""Batches and streams of them: inputs, never labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, Union

from torch import Tensor

from wise_atta import errors

# One tensor, or a tree of tensors whose first dimension is the batch: a mapping is passed to the model as keyword
# arguments, a sequence as positional ones.
Inputs: TypeAlias = Union[Tensor, Mapping[str, "Inputs"], Sequence["Inputs"]]  # noqa: UP007  # a recursive alias


@dataclass(frozen=True)
class Batch:
    """A batch of inputs with, if the stream has them, names of the samples and facts about the batch.

    Parameters
    ----------
    inputs
        A tensor [n, …] or a tree of them. Pixels are in [0, 1].
    ids
        One name a sample, for the people who answer and for the records.
    meta
        Facts about the batch, such as its domain. Never labels.
    """

    inputs: Inputs
    ids: Sequence[str] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ids is not None and len(self.ids) != len(self):
            raise errors.BadInput(f"{len(self.ids)} ids for {len(self)} samples: give one id a sample, or none")

    def __len__(self) -> int:
        return size(self.inputs)


class Stream(Protocol):
    """Anything that yields batches in the order in which they arrive."""

    def __iter__(self) -> Iterator[Batch]: ...


def leaves(inputs: Inputs) -> list[Tensor]:
    """The tensors of a tree, in a fixed order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, Mapping):
        return [leaf for value in inputs.values() for leaf in leaves(value)]
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        return [leaf for value in inputs for leaf in leaves(value)]
    raise errors.BadInput(f"inputs must be a tensor or a tree of tensors, not {type(inputs).__name__}")


def tree_map(function: Any, inputs: Inputs) -> Inputs:
    """The same tree with `function` applied to every tensor."""
    if isinstance(inputs, Tensor):
        result: Inputs = function(inputs)
        return result
    if isinstance(inputs, Mapping):
        return {name: tree_map(function, value) for name, value in inputs.items()}
    return tuple(tree_map(function, value) for value in inputs)


def size(inputs: Inputs) -> int:
    """How many samples there are; all tensors of the tree must agree."""
    sizes = {len(leaf) if leaf.dim() else 0 for leaf in leaves(inputs)}
    if len(sizes) != 1:
        raise errors.BadInput(f"the tensors of one batch have different first dimensions: {sorted(sizes)}")
    return sizes.pop()
