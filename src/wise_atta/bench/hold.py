"""How do many runs share one decoding? The stream's batches are held as 8-bit pixels on their device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from wise_atta import errors
from wise_atta.data.streams import DataStream, PictureStream, StreamSpec, open_stream
from wise_atta.stream import Batch


class Held:
    """A picture stream kept in memory. It gives the same bits as the stream it was read from.

    Parameters
    ----------
    stream
        What to hold; it is read to its end once.
    """

    def __init__(self, stream: PictureStream) -> None:
        self.spec, self.dataset, self._described = stream.spec, stream.dataset, stream
        self._batches = [
            Batch((batch.inputs * 255).round().to(torch.uint8), batch.ids, batch.meta)
            for batch in stream
            if isinstance(batch.inputs, torch.Tensor)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def length(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """The batches from number `start` on, counted from 0."""
        for held in self._batches[start:]:
            assert isinstance(held.inputs, torch.Tensor)
            yield Batch(held.inputs.float().div_(255), held.ids, held.meta)

    def describe(self) -> dict[str, Any]:
        return self._described.describe()


class Shelf:
    """Streams by description, each read once, the least recently used let go when there are too many.

    Parameters
    ----------
    keep
        How many streams to hold at once.
    """

    def __init__(self, keep: int = 2) -> None:
        self.keep = keep
        self._held: dict[tuple[str, str], tuple[Held, Mapping[str, int]]] = {}

    def open(
        self, spec: StreamSpec, root: Path | None, *, device: torch.device, workers: int | None
    ) -> tuple[DataStream | Held, Mapping[str, int]]:
        """As `open_stream`, from memory where possible."""
        key = spec.digest, str(device)
        if key in self._held:
            self._held[key] = self._held.pop(key)
            return self._held[key]
        stream, truth = open_stream(spec, root, device=device, workers=workers)
        if not isinstance(stream, PictureStream):
            raise errors.BadConfig(f"{spec.data} comes in its own time and cannot be held in memory")
        while len(self._held) >= self.keep:
            del self._held[next(iter(self._held))]
        self._held[key] = Held(stream), truth
        return self._held[key]
