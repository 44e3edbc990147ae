"""Copies of the user's module: of its structure alone, or with tensors of their own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wise_atta import errors


def copy_structure(model: nn.Module) -> nn.Module:
    """A copy of the module tree that shares every tensor with it.

    Parameters are seen through detached twins, which use the same memory but never collect a gradient.
    """
    shared: dict[int, Any] = {
        id(t): nn.Parameter(t.detach(), requires_grad=False) if isinstance(t, nn.Parameter) else t
        for module in model.modules()
        for t in _tensors(vars(module))
    }
    return _copied(model, shared)


def copy_whole(model: nn.Module) -> nn.Module:
    """A copy of the module with tensors of its own; those that a forward left in it are cut loose from their graph."""
    tensors = [tensor for module in model.modules() for tensor in _tensors(vars(module))]
    return _copied(model, {id(t): t.detach().clone() for t in tensors if not t.is_leaf})


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors that a module keeps in its attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _copied(model: nn.Module, known: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, known)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError) as error:
        raise errors.BadConfig(
            f"the model cannot be copied: {error}. Keep what cannot be (locks, open files, …) out of the module, or "
            "give it a __deepcopy__"
        ) from error
