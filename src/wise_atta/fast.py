"""How can the same network run faster, or in less memory? Precision, memory format, sums, recomputed activations."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
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


# Their backward needs their input, which in place is copied first: one more pass over the memory.
_NEED_INPUT = (nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Mish, nn.SiLU, nn.Threshold)
_MAKE_NEW = (_ConvNd, _BatchNorm, nn.Linear, nn.GroupNorm, nn.LayerNorm)


class InPlace:
    """Activations that are in place without a graph, and not with one, where they would copy their input.

    Only those of timm's norm layers and those that follow a layer in a plain sequence, and stand nowhere else: there
    nobody else sees their input, and what they return is used.
    """

    def __init__(self, module: nn.Module, compiled: bool) -> None:
        # What is compiled has no such copies, and would be compiled again at every change.
        owners = [] if compiled else list(module.modules())
        places = Counter(child for owner in owners for child in owner._modules.values())
        self._found = [
            vars(layer)
            for owner in owners
            for before, layer in self._pairs(owner)
            if isinstance(before, _MAKE_NEW) and isinstance(layer, _NEED_INPUT) and layer.inplace and places[layer] == 1
        ]
        self._graph = False

    @staticmethod
    def _pairs(owner: nn.Module) -> Iterable[tuple[nn.Module, nn.Module]]:
        if type(owner).__module__ == "timm.layers.norm_act":
            return ((owner, child) for child in owner.children())
        return itertools.pairwise(owner) if type(owner) is nn.Sequential else ()

    def set(self, graph: bool) -> None:
        """What follows keeps a graph, or does not."""
        if graph != self._graph:
            self._graph = graph
            for layer in self._found:
                layer["inplace"] = not graph


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
        self._given: First | None = None
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
            if self._given is not None and self._given.autocast == autocast and self._is_harmless():
                return self._given.output if self._copy is None else self._copy
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
    def known(self, given: First | None, keeps: bool) -> Iterator[None]:
        """Within this, the layer gives what is known for the network's input, or keeps what it gives, if wanted."""
        self._given = given if given is not None and given.output._version == given.version else None
        self._keeps = keeps
        try:
            yield
        finally:
            if self._copy is not None:
                self._harmless[torch.is_grad_enabled()] = self._copy._version == 0
            self._inputs = self._given = self._kept = self._copy = None
            self._calls = 0

    def enters(self, inputs: Tensor) -> None:
        """The network is called on these inputs."""
        self._inputs = inputs, inputs._version

    def _is_input(self, x: object) -> bool:
        return self._inputs is not None and x is self._inputs[0] and self._inputs[0]._version == self._inputs[1]

    def _is_harmless(self) -> bool:
        grad = torch.is_grad_enabled()
        if grad not in self._harmless and self._given is not None:
            self._copy = self._given.output.clone()
        return self._harmless.get(grad, True)


def _autocast(device: torch.device) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


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


# -- batch statistics on a CPU ------------------------------------------------------------------------------------


def moments(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and biased variance of every channel, by sums that use the whole width of a CPU; None where there are none.

    For contiguous float32 pictures torch's own kernel adds one number at a time, which takes longer than all the rest
    of the layer. With channels last it does not, and nothing is to be gained.

    >>> mean, var = moments(torch.arange(24.0).view(2, 3, 4))
    >>> mean.tolist(), [round(value, 4) for value in var.tolist()]
    ([7.5, 11.5, 15.5], [37.25, 37.25, 37.25])
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.dim() < 3 or not x.numel() or not x.is_contiguous():
        return None
    rows = x.detach().flatten(2)
    count = rows.shape[0] * rows.shape[2]
    mean = rows.sum(2).double().sum(0) / count
    var = _squares(rows) / count - mean.square()
    # E[x²] − μ² loses the digits that both have in common. Channels where these are many are gone through once more.
    far = (mean.square() > 10 * var).nonzero().flatten()
    if len(far):
        var[far] = _squares(rows[:, far] - mean[far].float().unsqueeze(1)) / count
    return mean.float(), var.float()


def _squares(rows: Tensor) -> Tensor:
    """Σ x² of every channel: within a row in float32, over rows in float64."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=2)
    return norms.double().square().sum(0)


class _Normalise(torch.autograd.Function):
    """Batch normalisation whose moments are known already. The gradient goes through them as usual."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.eps = eps
        out: Tensor = functional.batch_norm(x, mean, var, weight, bias, eps=eps)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        found: tuple[Tensor | None, ...] = torch.ops.aten.native_batch_norm_backward(
            grads[0], x, weight, None, None, mean, inverse, True, ctx.eps, ctx.needs_input_grad[:3]
        )
        return *found, None, None, None


class _Normalising(TorchFunctionMode):
    """Inside, layers that normalise by the batch take its `moments`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.batch_norm:
            return _batch_norm(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    count = x.numel() // x.shape[1]
    found = moments(x) if training and count > 1 else None
    if found is None:
        return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    mean, var = found
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * (count / (count - 1)), momentum)
    out: Tensor = _Normalise.apply(x, weight, bias, mean, var, eps)
    return out


def quicken(norm: nn.Module) -> None:
    """Let a BatchNorm layer take the `moments` of its batch, whatever else its forward does."""
    plain = norm.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Normalising():
            return plain(*args, **kwargs)

    norm.forward = forward


# -- memory of the process ------------------------------------------------------------------------------------------

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_memory() -> bool:
    """Let this process keep the memory that it frees, for its next tensors; whether that could be done.

    Large tensors on a CPU otherwise come fresh from the system and go back to it, and writing to fresh memory costs an
    interrupt every four kilobytes. It is a setting of the whole process and cannot be taken back: the process then
    stays as large as it was at its peak, unless `release_memory` is called. Threads that are started later share one
    heap, since those of their own are too small for large tensors; so call it before there are any. Only glibc, the C
    library of most Linux systems, has it: elsewhere nothing happens, and the answer is False.
    """
    libc = _glibc()
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
    return libc is not None and all(libc.mallopt(option, value) for option, value in settings)


def release_memory() -> None:
    """Give all memory back to the system that is free at the moment, where glibc is the C library."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):  # Windows has no such function, other systems no such name
        return None
    return ctypes.CDLL(None) if version else None
