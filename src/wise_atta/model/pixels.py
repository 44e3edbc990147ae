"""Normalisation of pictures, before the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wise_atta import errors
from wise_atta.stream import Inputs


class Pixels:
    """(x − mean)/std of pictures in [0, 1], one number a channel; other inputs as they are if none are given."""

    def __init__(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
        if (mean is None) != (std is None):
            raise errors.BadConfig("give both mean and std, or neither")
        if mean is not None and std is not None and (len(mean) != len(std) or min(std, default=0) <= 0):
            raise errors.BadConfig(f"mean and std need one number a channel, std above 0, not {mean} and {std}")
        self.mean, self.std = mean, std
        self._tensors = None if mean is None or std is None else (torch.tensor(mean), torch.tensor(std))
        self._moved = False

    def __call__(self, inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
        if self._tensors is None:
            return inputs
        if not isinstance(inputs, Tensor):
            raise errors.BadConfig("mean and std apply to a single tensor of pictures, not to a tree of tensors")
        if not inputs.is_floating_point():
            raise errors.BadInput(f"mean and std apply to numbers in [0, 1], not to {inputs.dtype}: convert the inputs")
        channels = inputs.shape[1] if inputs.dim() > 1 else 0
        if len(self._tensors[0]) not in (1, channels):
            raise errors.BadInput(f"mean and std have {len(self._tensors[0])} channels, the inputs {channels}")
        if not self._moved:
            # On the device once: a copy from the host would make every forward wait for it.
            self._tensors = self._tensors[0].to(device, dtype), self._tensors[1].to(device, dtype)
            self._moved = True
        mean, std = (t.to(inputs).view(1, -1, *[1] * (inputs.dim() - 2)) for t in self._tensors)
        return (inputs - mean) / std
