"""Copies of the user's module, its head and its normalisation layers: what is read off it before anything runs."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from wise_atta import errors


def copy_structure(model: nn.Module) -> nn.Module:
    """A copy of the module tree that shares every tensor with it.

    Parameters are seen through detached twins, which use the same memory but never collect a gradient.
    """
    found = [tensor for module in model.modules() for tensor in tensors_in(vars(module))]
    shared: dict[int, Any] = {
        id(t): nn.Parameter(t.detach(), requires_grad=False) if isinstance(t, nn.Parameter) else t for t in found
    }
    return _copied(model, shared)


def copy_whole(model: nn.Module) -> nn.Module:
    """A copy of the module with tensors of its own; those that a forward left in it are cut loose from their graph."""
    found = [tensor for module in model.modules() for tensor in tensors_in(vars(module))]
    return _copied(model, {id(t): t.detach().clone() for t in found if not t.is_leaf})


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors that a module keeps in its attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


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


def unwrap(model: nn.Module) -> nn.Module:
    if isinstance(model, torch.jit.ScriptModule):
        raise errors.BadConfig("a scripted module cannot be adapted: give the module it was made from")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise errors.BadConfig("layers of the model have no shape yet: run it once on a batch, then adapt it")
    inner = getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def is_norm(module: nn.Module) -> bool:
    if isinstance(module, _BatchNorm | nn.LayerNorm | nn.GroupNorm | _InstanceNorm):
        return True
    # Norm layers of other libraries (RMSNorm and the like) go by their name and a vector of weights.
    if "norm" not in type(module).__name__.lower():
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 1


def find_head(model: nn.Module) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    declared = getattr(model, "get_classifier", None)
    if callable(declared):
        head = declared()
        if isinstance(head, nn.Linear) and id(head) in names:
            return str(names[id(head)])
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise errors.HeadNotFound(
            "the model has no linear layer, so no head was found. Name the layer that turns features into logits "
            f"with head='…'. Layers: {', '.join(name for name, _ in model.named_modules() if name)}"
        )
    return str(linear[-1])


def check_head(model: nn.Module, name: str) -> str:
    known = [n for n, _ in model.named_modules() if n]
    if name not in known:
        raise errors.HeadNotFound(str(errors.unknown("layer", name, known)))
    return name


def checksum(values: Tensor) -> int:
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes()) if values.numel() else 0


def some_values(tensor: Tensor) -> Tensor:
    """Some values of a tensor, without reading all of it."""
    tensor = tensor.detach()
    while tensor.dim() > 1:
        tensor = tensor[..., 0]
    return tensor.reshape(-1)[:16].double()


def outside_inference_mode(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
