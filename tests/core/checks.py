"""When are two states the same, and is a module as it was?"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def same(a: Any, b: Any) -> bool:
    """Equality to the bit, through trees of tensors, arrays and plain values; NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def saved(state: Any) -> Any:
    """The state as it comes back from a file, read by someone who trusts nobody."""
    return loaded(stored(state))


def stored(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def look(module: nn.Module) -> dict[str, Any]:
    """All that a user can see of a module, down to the identity and the bits of its tensors."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "bits": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "places": {name: (id(tensor), tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()},
        "requires_grad": {name: tensor.requires_grad for name, tensor in tensors.items()},
        "grad": {name: tensor.grad is None for name, tensor in tensors.items()},
        "training": {name: part.training for name, part in module.named_modules()},
        "attributes": {name: sorted(vars(part)) for name, part in module.named_modules()},
        "hooks": {
            name: len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks)
            for name, part in module.named_modules()
        },
    }
