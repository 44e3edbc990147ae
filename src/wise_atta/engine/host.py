"""Copies from a device to the host: they set off at once, and only who needs them waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def send(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Set tensors on their way to the host. Gives where they will be, and a call that waits until they are there.

    They arrive as they are at this moment, whatever the current stream does to them afterwards; another stream has to
    wait for it, as ever. All are on one device. Those that the host can read already are given as they are.
    """
    # To pinned memory, which torch takes for such a copy: for any other it would wait here.
    places = [tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor for tensor in tensors]
    stream = working(tensors)
    if stream is None:
        return places, lambda: None
    sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
    sent.record(stream)
    return places, sent.synchronize


def working(tensors: Sequence[Tensor]) -> torch.cuda.Stream | None:
    """The stream that works on tensors at this moment, if any of them is on a GPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device)
