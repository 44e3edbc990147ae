"""Precision and memory format of a network: fp32, tf32 or bf16, channels last, BatchNorm kernels called directly."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]

# Layers whose kernels take bf16 inputs beside fp32 parameters and statistics.
_MIXED = (_BatchNorm, nn.LayerNorm)


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


def products(precision: Precision | None, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The setting for float32 products that a precision asks for. None, and every device but CUDA: as it is."""
    if precision is None or device.type != "cuda":
        return contextlib.nullcontext()
    return _tf32.held(precision != "fp32")


def lowered(precision: Precision | None, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Where convolutions and products run in bf16, if a precision asks for that."""
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def kept_in_fp32(module: nn.Module, head: nn.Module) -> bool:
    """Whether a layer's own parameters stay in fp32 under bf16: norm layers that can, and the head."""
    return isinstance(module, _MIXED) or module is head


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
