"""A cache of streams for many runs in one process: batches as 8-bit pixels on their device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wise_atta.data.catalog import named_root
from wise_atta.data.streams import DataStream, PictureStream, StreamSpec, open_stream
from wise_atta.stream import Batch


class CachedStream:
    """A picture stream kept in memory. It gives the same bits as the stream it was read from.

    Parameters
    ----------
    stream
        What to hold; it is read to its end once.
    """

    def __init__(self, stream: PictureStream) -> None:
        self.spec, self.dataset, self._stream = stream.spec, stream.dataset, stream
        self._batches: list[Batch] = []
        # In one piece: between the larger tensors of a batch in the making, pieces would leave memory in holes.
        whole: Tensor | None = None
        start = 0
        for batch in stream:
            assert isinstance(batch.inputs, Tensor)
            pixels = (batch.inputs * 255).round().to(torch.uint8)
            if whole is None:
                whole = pixels.new_empty((stream.samples, *pixels.shape[1:]))
            if pixels.shape[1:] == whole.shape[1:]:
                pixels = whole[start : start + len(pixels)].copy_(pixels)
            start += len(pixels)
            self._batches.append(Batch(pixels, batch.ids, batch.meta))

    def under(self, spec: StreamSpec) -> CachedStream:
        """The same batches under the other of the protocols ctta and ftta, which differ in where methods start anew."""
        other = copy.copy(self)
        other.spec = spec
        return other

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def length(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """The batches from number `start` on, counted from 0."""
        for number, held in enumerate(self._batches[start:], start):
            assert isinstance(held.inputs, Tensor)
            reset = self.spec.protocol == "ftta" and self._stream.arrangement.enters(number)
            meta = {**held.meta, "reset": reset}
            yield Batch(held.inputs.float().div_(self._stream.white), held.ids, meta)

    def picture_of(self, sample_id: str) -> str:
        """Which picture a sample shows, whatever was done to it."""
        return self._stream.picture_of(sample_id)

    @property
    def digests(self) -> list[str]:
        """Hashes of all batches."""
        return self._stream.digests

    def go_on(self, digests: list[str]) -> bool:
        """Whether the batches that another process has read, by their hashes, are also those of here."""
        return self.digests[: len(digests)] == digests

    def describe(self) -> dict[str, Any]:
        return {**self._stream.describe(), "spec": self.spec.to_dict(), "digest": self.spec.digest}


class StreamCache:
    """Streams by description and data folder, each read once, the least recently used let go when there are too many.

    Parameters
    ----------
    keep
        How many streams to hold at once.
    """

    def __init__(self, keep: int = 2) -> None:
        self.keep = keep
        self._streams: dict[tuple[str, str, Path | None], tuple[CachedStream, Mapping[str, int]]] = {}

    def open(
        self, spec: StreamSpec, root: Path | None, *, device: torch.device, workers: int | None
    ) -> tuple[DataStream | CachedStream, Mapping[str, int]]:
        """As `open_stream`, from memory where possible: a stream of one's own may come in its own time."""
        # Neither where methods start anew nor when answers come changes what the batches hold.
        base = replace(spec, protocol="ctta" if spec.protocol == "ftta" else spec.protocol, delay=0)
        folder = named_root(root)
        key = base.digest, str(device), None if folder is None else folder.resolve()
        if key in self._streams:
            cached, truth = self._streams[key] = self._streams.pop(key)
            return cached.under(spec), truth
        stream, truth = open_stream(base, root, device=device, workers=workers)
        if not isinstance(stream, PictureStream):
            return stream, truth
        while len(self._streams) >= self.keep:
            del self._streams[next(iter(self._streams))]
        # Truth looks a label up in its data set; many runs over one stream are served faster by a plain dictionary.
        cached, truth = self._streams[key] = CachedStream(stream), dict(truth)
        return cached.under(spec), truth
