"""The layer that a network begins with: two forwards of the same inputs need it once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


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
    output
        What the layer gave in this forward; None if nobody wants to know, or if it cannot serve another forward.
    """

    def __init__(self, network: nn.Module, adapts: Callable[[nn.Module], bool], compile: bool) -> None:
        self._inputs: tuple[Tensor, int] | None = None
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
        plain = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs or not self._is_input(args[0]):
                return plain(*args, **kwargs)
            self._calls += 1
            autocast = _autocast(args[0].device)
            if self._known is not None and self._known.autocast == autocast and self._is_harmless():
                return self._known.output if self._copy is None else self._copy
            output = plain(*args)
            if self._keeps and torch.is_grad_enabled() and isinstance(output, Tensor):
                self._kept = First(output.detach(), output._version, autocast)
            return output

        # Compiled, it would be a part of something larger, which cannot be left out.
        disable: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
        layer.forward = disable(forward) if compile else forward  # type: ignore[method-assign]

    @property
    def output(self) -> First | None:
        kept = self._kept if self._calls == 1 else None
        return kept if kept is not None and kept.output._version == kept.version else None

    @contextlib.contextmanager
    def known(self, first: First | None, keeps: bool) -> Iterator[None]:
        """Within this, the layer gives what is known for the network's input, or keeps what it gives, if wanted."""
        self._known = first if first is not None and first.output._version == first.version else None
        self._keeps = keeps
        try:
            yield
        finally:
            if self._copy is not None:
                self._harmless[torch.is_grad_enabled()] = self._copy._version == 0
            self._inputs = self._known = self._kept = self._copy = None
            self._calls = 0

    def enters(self, inputs: Tensor) -> None:
        """The network is called on these inputs."""
        self._inputs = inputs, inputs._version

    def _is_input(self, x: object) -> bool:
        return self._inputs is not None and x is self._inputs[0] and self._inputs[0]._version == self._inputs[1]

    def _is_harmless(self) -> bool:
        grad = torch.is_grad_enabled()
        if grad not in self._harmless and self._known is not None:
            self._copy = self._known.output.clone()
        return self._harmless.get(grad, True)


def _autocast(device: torch.device) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
