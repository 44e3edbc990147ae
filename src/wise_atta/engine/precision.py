"""How a network is run: fp32, tf32 or bf16, channels last, compiled or recorded, BatchNorm kernels called directly."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]

Convert: TypeAlias = Callable[[Tensor], Tensor]
Context: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]

# Layers whose kernels take bf16 inputs beside fp32 parameters and statistics.
_MIXED = (_BatchNorm, nn.LayerNorm)


@dataclass(eq=False)
class RunOptions:
    """How replicas run, and where.

    `frozen` are converted tensors by the place that uses them, for all replicas. `moments` gives mean and biased
    variance of a BatchNorm layer's input, where they are not those of the input alone.
    """

    device: torch.device
    dtype: torch.dtype
    precision: Precision | None
    channels_last: bool
    compile: bool
    graphs: bool
    blocks: tuple[str, ...]
    moments: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    frozen: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def quick(self) -> bool:
        """Whether other kernels than the usual ones run, so that sums may be taken in another order."""
        return self.precision is not None or self.channels_last or self.compile

    @property
    def reorders(self) -> bool:
        """Whether batch statistics are summed in an order that suits the CPU. Never unless something was asked for."""
        return self.quick and self.device.type == "cpu" and not self.compile

    def conversion(self, module: nn.Module, head: nn.Module, parameter: Tensor) -> Convert | None:
        """What is done to a parameter before the layer uses it, if anything. Under bf16 norm layers and head stay."""
        keeps = isinstance(module, _MIXED) or module is head
        narrow = self.precision == "bf16" and parameter.is_floating_point() and not keeps
        turn = self.channels_last and parameter.dim() == 4
        if not narrow and not turn:
            return None

        def convert(tensor: Tensor) -> Tensor:
            tensor = tensor.bfloat16() if narrow else tensor
            return channels_last(tensor) if turn else tensor

        return convert


class _Switch:
    """Whether matrix products of float32 may use TF32: one setting of the process, held by all who want the same.

    Whoever wants the other setting waits; the last to leave puts back what was there.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._mode: bool | None = None
        self._before: tuple[bool, bool] = (False, False)

    @contextlib.contextmanager
    def held(self, allow: bool) -> Iterator[None]:
        cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        with self._changed:
            while self._users and self._mode is not allow:
                self._changed.wait()
            if not self._users:
                self._before = (cuda.allow_tf32, cudnn.allow_tf32)
                cuda.allow_tf32 = cudnn.allow_tf32 = self._mode = allow
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    cuda.allow_tf32, cudnn.allow_tf32 = self._before
                    self._changed.notify_all()


_tf32 = _Switch()


def products(precision: Precision | None, device: torch.device) -> Context:
    """The setting for float32 products that a precision asks for. None, and every device but CUDA: as it is."""
    if precision is None or device.type != "cuda":
        return contextlib.nullcontext
    return functools.partial(_tf32.held, precision != "fp32")


def lowered(precision: Precision | None, device: torch.device) -> Context:
    """Where convolutions and products run in bf16, if a precision asks for that."""
    return (
        functools.partial(torch.autocast, device.type, torch.bfloat16)
        if precision == "bf16"
        else contextlib.nullcontext
    )


def without_autocast(module: nn.Module, device: torch.device) -> None:
    """Let a layer run in the precision of its parameters, the head for one."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return plain(*args, **kwargs)

    module.forward = forward


def widen(value: Any) -> Any:
    """A floating tensor in fp32; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def straight(norm: _BatchNorm) -> None:
    """Let a plain BatchNorm layer call its kernel without looking anything up twice: a GPU waits for the host there."""
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return
    parameters, buffers = norm._parameters, norm._buffers

    def forward(x: Tensor) -> Tensor:
        return torch.batch_norm(
            x,
            parameters["weight"],
            parameters["bias"],
            buffers["running_mean"],
            buffers["running_var"],
            norm.training or buffers["running_mean"] is None,
            1.0,  # as they are bound: the statistics of this batch, not an average
            norm.eps,
            torch.backends.cudnn.enabled,
        )

    norm.forward = forward  # type: ignore[assignment, method-assign]


def channels_last(tensor: Tensor) -> Tensor:
    """Pictures and filters with the channels innermost; anything else as it is."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
