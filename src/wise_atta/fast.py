"""How can the same network run faster, or in less memory? Precision, memory format, recomputed activations."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from wise_atta import errors

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


def channels_last(tensor: Tensor) -> Tensor:
    """Pictures and filters with the channels innermost; anything else as it is."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


# -- recomputed activations ---------------------------------------------------------------------------------------


def blocks(model: nn.Module) -> list[str]:
    """The blocks that a network is a chain of: layers with layers inside, one after the other in a sequence.

    >>> block = lambda: nn.TransformerEncoderLayer(8, 2)
    >>> blocks(nn.Sequential(nn.Linear(4, 8), block(), block(), nn.Linear(8, 2)))
    ['1', '2']
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Sequential | nn.ModuleList):
            continue
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            inside = sum(1 for m in child.modules() if next(m.parameters(recurse=False), None) is not None)
            nested = any(path.startswith(f"{other}.") for other in found)
            if inside > 1 and not nested and not isinstance(child, nn.Sequential | nn.ModuleList):
                found.append(path)
    return found


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
        held = lease()
        if held is None:
            return plain(*args, **kwargs)
        # Replicas are in eval mode: there is no dropout whose draws would have to come out the same.
        call = functools.partial(held.call, plain)
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = forward
