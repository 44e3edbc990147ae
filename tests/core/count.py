"""How often was the network run? Kernels counted below the level of modules, where no copy can hide."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):
    """Counts kernels by name: forwards as ("convolution", with gradients?, samples), backwards by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, bool, int]] = Counter()
        self.backwards: Counter[str] = Counter()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.copies += name == "clone"
        if name.endswith("_backward"):
            self.backwards[name] += 1
        elif name in ("convolution", "addmm"):
            rows = args[0] if name == "convolution" else args[1]
            self.calls[name, torch.is_grad_enabled(), len(rows)] += 1
        return func(*args, **(kwargs or {}))

    def forwards(self, layers: int = 2) -> dict[tuple[bool, int], float]:
        """(with gradients?, samples) → forwards, of a net with so many convolutions."""
        return {key[1:]: n / layers for key, n in self.calls.items() if key[0] == "convolution"}
