"""Fingerprint: what tells the states of one model from those of another."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from wise_atta.model.layout import Layout
from wise_atta.model.network import Network


def fingerprint(network: Network, layout: Layout, source: Tensor) -> dict[str, Any]:
    """Names, shapes, and checksums: of all source values that adapt, and of a few values of every tensor."""
    values = source.cpu().contiguous()
    tensors = [tensor for tensor in (*network.model.parameters(), *network.model.buffers()) if tensor.numel()]
    return {
        "groups": {group: list(names) for group, names in layout.groups.items()},
        "shapes": {name: list(shape) for name, shape in layout.shapes.items()},
        "dtype": str(values.dtype),
        "classes": None if network.classes is None else network.classes.tolist(),
        "source": _checksum(values),
        "network": _checksum(torch.cat([_some_values(tensor) for tensor in tensors]).cpu()) if tensors else 0,
    }


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes()) if values.numel() else 0


def _some_values(tensor: Tensor) -> Tensor:
    """Some values of a tensor, without reading all of it."""
    tensor = tensor.detach()
    while tensor.dim() > 1:
        tensor = tensor[..., 0]
    return tensor.reshape(-1)[:16].double()
