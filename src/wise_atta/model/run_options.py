"""How a network is run: precision, memory format, compiled or recorded, with which blocks recomputed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from wise_atta.engine import precision as precisions
from wise_atta.engine.precision import Precision

Convert: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class RunOptions:
    """How replicas run, and where. Frozen tensors that must be converted for it are converted once, for all of them."""

    device: torch.device
    dtype: torch.dtype
    precision: Precision | None
    channels_last: bool
    compile: bool
    graphs: bool
    blocks: tuple[str, ...]
    _frozen: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def quick(self) -> bool:
        """Whether other kernels than the usual ones run, so that sums may be taken in another order."""
        return self.precision is not None or self.channels_last or self.compile

    @property
    def reorders(self) -> bool:
        """Whether batch statistics are summed in an order that suits the CPU. Never unless something was asked for."""
        return self.quick and self.device.type == "cpu" and not self.compile

    def conversion(self, module: nn.Module, head: nn.Module, parameter: Tensor) -> Convert | None:
        """What is done to a parameter before the layer uses it, if anything."""
        keeps = precisions.kept_in_fp32(module, head)
        narrow = self.precision == "bf16" and parameter.is_floating_point() and not keeps
        turn = self.channels_last and parameter.dim() == 4
        if not narrow and not turn:
            return None

        def convert(tensor: Tensor) -> Tensor:
            tensor = tensor.bfloat16() if narrow else tensor
            return precisions.channels_last(tensor) if turn else tensor

        return convert

    def frozen(self, place: str, tensor: Tensor, convert: Convert) -> Tensor:
        """A frozen tensor as the layer at this place uses it."""
        if place not in self._frozen:
            self._frozen[place] = convert(tensor)
        return self._frozen[place]
