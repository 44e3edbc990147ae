"""Random generators, each named by (seed, who, counter), never global.

Generators are counter-based: the draw that a component makes for batch *t* depends on its seed and *t* alone. So a
component has no random state to save, a failed call leaves nothing to undo, and a resumed run draws what it would have
drawn.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

_MASK = (1 << 64) - 1


def numpy(seed: int, who: str, counter: int = 0) -> np.random.Generator:
    """A numpy generator for one component at one moment.

    >>> numpy(0, "policy", 3).random() == numpy(0, "policy", 3).random()
    True
    >>> numpy(0, "policy", 3).random() == numpy(0, "policy", 4).random()
    False
    """
    key = np.array([seed & _MASK, zlib.crc32(who.encode())], dtype=np.uint64)
    # The counter goes to the second word: the first is what the generator itself counts up.
    start = np.array([0, counter & _MASK, 0, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=start))


def torch_cpu(seed: int, who: str, counter: int = 0) -> torch.Generator:
    """A torch generator on the CPU for one component at one moment."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int(numpy(seed, who, counter).integers(1 << 62)))
    return generator
