"""Random numbers of one picture, drawn from its own key: the same in any batch and on any device.

A picture's key is a hash of seed, corruption, severity and its id (or, without an id, its pixels). Fields of noise are
an integer hash of key and pixel number, computed where the picture lies; single numbers such as an angle come from
the key on the host. Only integer operations and host-made tables are involved, so every device draws the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORDS = 16
_FIELD_WORDS = 2
_STEP = -1640531527  # 0x9E3779B9, the golden ratio in 32 bits, as a signed number
_MIX = (-2048144789, -1028477387)  # 0x85EBCA6B and 0xC2B2AE35, MurmurHash3's final mix
NORMAL_UNIT = 1 << 12


class Chance:
    """The random numbers of a batch of pictures, one key each.

    Parameters
    ----------
    words
        The keys, [n, 16] of 32 bits. The first two feed the fields, the others are the single numbers.
    device
        Where the fields are wanted.
    """

    def __init__(self, words: NDArray[np.uint32], device: torch.device) -> None:
        self._words = words
        self._device = device
        first, second = (words[:, i].astype(np.int32) for i in range(_FIELD_WORDS))
        self._first, self._second = (torch.from_numpy(w).to(device, non_blocking=True) for w in (first, second))

    def __len__(self) -> int:
        return len(self._words)

    def scalars(self, count: int) -> NDArray[np.float64]:
        """`count` uniform numbers in [0, 1) for each picture, on the host, [n, count]."""
        if count > _WORDS - _FIELD_WORDS:
            raise ValueError(f"a key holds {_WORDS - _FIELD_WORDS} single numbers; {count} were asked for")
        return self._words[:, _FIELD_WORDS : _FIELD_WORDS + count] / 2.0**32

    def bits(self, *shape: int, stream: int = 0) -> Tensor:
        """32 random bits a place as int32, [n, *shape]. Streams are independent of one another."""
        places = torch.arange(int(np.prod(shape)), dtype=torch.int32, device=self._device).mul_(_STEP)
        value = places[None] + self._first[:, None]
        _mix(value)
        value += self._second[:, None] + stream * _STEP % (1 << 31)
        _mix(value)
        return value.view(len(self), *shape)

    def uniform(self, *shape: int, stream: int = 0) -> Tensor:
        """16-bit numbers, uniform in [0, 65536), as float64."""
        return self.bits(*shape, stream=stream).bitwise_and_(0xFFFF).to(torch.float64)

    def normal(self, *shape: int, stream: int = 0) -> Tensor:
        """Standard normal numbers in whole 4096ths, as float64: 65,536 equally likely quantiles."""
        index = self.bits(*shape, stream=stream).bitwise_and_(0xFFFF)
        return _quantiles(self._device).index_select(0, index.view(-1)).view(index.shape)


def draw(
    seed: int, name: str, severity: int, ids: Sequence[int | str] | None, images: Tensor, device: torch.device
) -> Chance:
    """The random numbers for a batch. Without ids the pixels are the id, which costs a copy to the host."""
    prefix = f"{seed}|{name}|{severity}|".encode()
    own = [str(i).encode() for i in ids] if ids is not None else [p.tobytes() for p in images.cpu().numpy()]
    digests = b"".join(hashlib.blake2b(prefix + o, digest_size=4 * _WORDS).digest() for o in own)
    return Chance(np.frombuffer(digests, dtype="<u4").reshape(len(own), _WORDS), device)


def _mix(value: Tensor) -> None:
    for shift, factor in ((16, _MIX[0]), (13, _MIX[1]), (16, None)):
        # int32 shifts drag the sign along; the mask takes it away again.
        value ^= (value >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        if factor is not None:
            value *= factor


@lru_cache(maxsize=8)
def _quantiles(device: torch.device) -> Tensor:
    middle = (torch.arange(1 << 16, dtype=torch.float64, device="cpu") + 0.5) / (1 << 16)
    quantile = torch.special.ndtri(middle)
    return (quantile / quantile.square().mean().sqrt() * NORMAL_UNIT).round().to(device)
