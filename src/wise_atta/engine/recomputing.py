"""Recomputed activations: blocks that keep their input alone, for less memory and one more forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from wise_atta import errors


def blocks(model: nn.Module) -> list[str]:
    """The blocks that a network is a chain of: layers with layers inside, one after the other in a sequence.

    >>> block = lambda: nn.TransformerEncoderLayer(8, 2)
    >>> blocks(nn.Sequential(nn.Linear(4, 8), block(), block(), nn.Linear(8, 2)))
    ['1', '2']
    """
    names: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Sequential | nn.ModuleList):
            continue
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            inside = sum(1 for m in child.modules() if next(m.parameters(recurse=False), None) is not None)
            nested = any(path.startswith(f"{other}.") for other in names)
            if inside > 1 and not nested and not isinstance(child, nn.Sequential | nn.ModuleList):
                names.append(path)
    return names


def check_blocks(model: nn.Module, wanted: bool | Sequence[str]) -> tuple[str, ...]:
    """The names of the blocks whose activations are recomputed."""
    if wanted is False:
        return ()
    if wanted is True:
        chosen = blocks(model)
        if not chosen:
            raise errors.BadConfig(
                "checkpointing=True found no chain of blocks in this model: name the layers to recompute with "
                "checkpointing=['…']"
            )
        return tuple(chosen)
    known = [name for name, _ in model.named_modules() if name]
    for name in wanted:
        if name not in known:
            raise errors.unknown("layer to recompute", name, known)
    return tuple(wanted)


class Lease:
    """A network that stays as it was set up until the graph of its forward is gone: backward runs parts of it again."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def call(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    def __del__(self) -> None:
        self._close()


def recompute(module: nn.Module, lease: Callable[[], Lease | None]) -> None:
    """Let a layer keep its input alone and compute the rest again in the backward, while a lease is given."""
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        current = lease()
        if current is None:
            return plain(*args, **kwargs)
        # Replicas are in eval mode: there is no dropout whose draws would have to come out the same.
        call = functools.partial(current.call, plain)
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = forward
