"""Layers of a replica that run otherwise than in the user's module: the first, those in place, recomputed blocks."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

from wise_atta import errors

# Their backward needs their input, which in place is copied first: one more pass over the memory.
_NEED_INPUT = (nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Mish, nn.SiLU, nn.Threshold)
_MAKE_NEW = (_ConvNd, _BatchNorm, nn.Linear, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True, eq=False)
class First:
    """What the first layer of a network gave, under which autocast, and its version: it may be written over."""

    output: Tensor
    version: int
    autocast: tuple[bool, torch.dtype]


class FirstLayer:
    """The layer that a network begins with, where it does not adapt: two forwards of the same inputs need it once.

    That is the first layer without layers inside that the network registers, if it is a convolution or a product, and
    if the network calls it once, on its own input. Of other networks nothing is ever known. A network that writes over
    what the layer gave is found out by the versions of tensors; only a write to `.data` goes unseen.

    Attributes
    ----------
    inputs
        What the network is called on, and the version of it.
    """

    def __init__(self, network: nn.Module, adapts: Callable[[nn.Module], bool], compile: bool) -> None:
        self.inputs: tuple[Tensor, int] | None = None
        self._keeps = False
        self._calls = 0
        self._known: First | None = None
        self._kept: First | None = None
        # With and without gradients: whether the network was seen to leave the output as it is, by giving it a copy.
        self._harmless: dict[bool, bool] = {}
        self._copy: Tensor | None = None
        layer = next(part for part in network.modules() if not part._modules)
        if not isinstance(layer, _ConvNd | nn.Linear) or adapts(layer):
            return
        # Compiled, it would be a part of something larger, which cannot be left out.
        disable: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
        forward = disable(self._forward) if compile else self._forward
        layer.forward = functools.partial(forward, layer.forward)  # type: ignore[method-assign]

    def _forward(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs, version = self.inputs or (None, 0)
        if len(args) != 1 or kwargs or inputs is None or args[0] is not inputs or inputs._version != version:
            return plain(*args, **kwargs)
        self._calls += 1
        grad, kind = torch.is_grad_enabled(), inputs.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        if self._known is not None and self._known.autocast == autocast:
            if grad not in self._harmless:
                self._copy = self._known.output.clone()
            if self._harmless.get(grad, True):
                return self._known.output if self._copy is None else self._copy
        output = plain(*args)
        if self._keeps and grad and isinstance(output, Tensor):
            self._kept = First(output.detach(), output._version, autocast)
        return output

    @contextlib.contextmanager
    def known(self, first: First | None, keeps: bool) -> Iterator[list[First]]:
        """Within this, the layer gives what is known for the network's input, or keeps what it gives, if wanted.

        At the end the list holds that, if it can serve another forward.
        """
        self._known = first if first is not None and first.output._version == first.version else None
        self._keeps, kept = keeps, list[First]()
        try:
            yield kept
            if self._calls == 1 and self._kept is not None and self._kept.output._version == self._kept.version:
                kept.append(self._kept)
        finally:
            if self._copy is not None:
                self._harmless[torch.is_grad_enabled()] = self._copy._version == 0
            self.inputs = self._known = self._kept = self._copy = None
            self._calls = 0


def in_place(module: nn.Module, compiled: bool) -> list[dict[str, Any]]:
    """Attributes of activations to be in place without a graph, and not with one, where they would copy their input.

    Only those of timm's norm layers and those that follow a layer in a plain sequence, and stand nowhere else: there
    nobody else sees their input, and what they return is used.
    """
    # What is compiled has no such copies, and would be compiled again at every change.
    owners = [] if compiled else list(module.modules())
    places = Counter(child for owner in owners for child in owner._modules.values())
    pairs: list[tuple[nn.Module, nn.Module]] = []
    for owner in owners:
        if type(owner).__module__ == "timm.layers.norm_act":
            pairs += ((owner, child) for child in owner.children())
        elif type(owner) is nn.Sequential:
            pairs += itertools.pairwise(owner)
    return [
        vars(layer)
        for before, layer in pairs
        if isinstance(before, _MAKE_NEW) and isinstance(layer, _NEED_INPUT) and layer.inplace and places[layer] == 1
    ]


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
    chosen = blocks(model) if wanted is True else list(wanted or ())
    if wanted is True and not chosen:
        raise errors.BadConfig(
            "checkpointing=True found no chain of blocks in this model: name the layers to recompute with "
            "checkpointing=['…']"
        )
    known = [name for name, _ in model.named_modules() if name]
    for name in chosen:
        if name not in known:
            raise errors.unknown("layer to recompute", name, known)
    return tuple(chosen)


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
