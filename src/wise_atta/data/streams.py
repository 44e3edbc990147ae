"""Streams by description: one small specification, opened as batches and, apart, the truth.

Workers read and decode; pixels travel as 8 bits, pinned where there is a GPU; corruptions and the step to [0, 1] run on
the device. What arrives depends on the description and the data alone, not on the process or the number of workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import data as torch_data

from wise_atta import errors, rng
from wise_atta.data import catalog
from wise_atta.data.arrangement import GRADUAL, ORDERS, PROTOCOLS, Arrangement, arrange
from wise_atta.data.datasets import Dataset, Place, fingerprint, picture_of
from wise_atta.data.pictures import INTERPOLATIONS
from wise_atta.stream import Batch

# Names under which a combination of options is known.
SHORTHANDS: Mapping[str, Mapping[str, Any]] = {
    "correlated": {"protocol": "ctta", "order": "correlated"},
    "recurring": {"protocol": "ctta", "rounds": 3},
}


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """All that decides what a stream contains, beside the data's own bytes.

    Parameters
    ----------
    data
        A data set by name, see `open_dataset`, or `python:package.module:factory` for an iterable of one's own.
    protocol
        `ctta` domain after domain; `ftta` the same, and the method starts anew at each (`meta["reset"]`); `mixed` all
        domains shuffled together; `gradual` each corruption from severity 1 to 5 and back. Also `correlated` for
        `order="correlated"` and `recurring` for `rounds=3`.
    domains
        Which, in which order; empty for all, in the published order.
    severity
        Of data sets that have severities; `gradual` does not look at it.
    batch
        Samples a batch.
    order
        Of the samples in a domain: `shuffled`, `sequential` (the data set's own order) or `correlated`.
    concentration
        Of the Dirichlet distribution of `correlated`: the smaller, the longer the runs of one class.
    rounds
        How often the domains come, in new order each time.
    cut
        Whether a batch ends where a domain ends; otherwise it is filled up from the next one.
    limit
        At most so many samples of a domain, drawn with the seed; None for all.
    delay
        After how many batches a label arrives. The stream only carries the number, for the annotator.
    resize, crop, interpolation
        Short side and centre square of the pictures, and `bilinear` or `bicubic`. None: what the data set says, see
        `wise-atta data list`. 0: leave as it is.
    seed
        Of order and corruptions.

    Examples
    --------
    >>> spec = StreamSpec(data="cifar10+c", protocol="recurring")
    >>> spec.protocol, spec.rounds
    ('ctta', 3)
    >>> StreamSpec.from_dict(spec.to_dict()) == spec
    True
    """

    data: str
    protocol: str = "ctta"
    domains: tuple[str, ...] = ()
    severity: int = 5
    batch: int = 64
    order: str = "shuffled"
    concentration: float = 0.1
    rounds: int = 1
    cut: bool = True
    limit: int | None = None
    delay: int = 0
    resize: int | None = None
    crop: int | None = None
    interpolation: str = "bilinear"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in SHORTHANDS.get(self.protocol, {}).items():
            if name == "protocol" or getattr(self, name) == _DEFAULTS[name]:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "domains", tuple(self.domains))
        for name, known in (("protocol", PROTOCOLS), ("order", ORDERS), ("interpolation", INTERPOLATIONS)):
            if getattr(self, name) not in known:
                raise errors.unknown(name, getattr(self, name), (*known, *(SHORTHANDS if name == "protocol" else ())))
        lowest = {"batch": 1, "rounds": 1, "delay": 0, "limit": 1, "resize": 0, "crop": 0, "severity": 1}
        for name, least in lowest.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise errors.BadConfig(f"{name}={value!r}: a whole number of at least {least} is needed")
        if self.severity > 5:
            raise errors.BadConfig(f"severity={self.severity}: severities go from 1 to 5")
        if not self.concentration > 0:
            raise errors.BadConfig(f"concentration={self.concentration}: it must be above 0")
        if len(set(self.domains)) != len(self.domains):
            raise errors.BadConfig(
                f"domains={self.domains}: a domain comes again with `rounds`, not by naming it twice"
            )

    def to_dict(self) -> dict[str, Any]:
        """As plain values that JSON and YAML can hold."""
        return {**dataclasses.asdict(self), "domains": list(self.domains)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StreamSpec:
        """The inverse of `to_dict`. Left out values are the defaults; an unknown one is an error."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise errors.unknown("option of a stream", str(name), known)
        if "data" not in values:
            raise errors.BadConfig("a stream needs `data`, the name of a data set")
        return cls(**values)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that stay the same as long as the description does.

        >>> StreamSpec(data="digits").digest
        '64badb98d643d13b'
        """
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(StreamSpec)}


class Truth(Mapping[str, int]):
    """The labels of a stream's samples by id, for an annotator and the scorer. A stream itself never carries them."""

    def __init__(self, places: Sequence[Place], arrangement: Arrangement) -> None:
        self._places = {place.name: (number, place) for number, place in enumerate(places)}
        self._all = list(places)
        self._stride = max((len(place) for place in places), default=1) or 1
        self._used = np.unique(arrangement.domain * self._stride + arrangement.index)

    def __getitem__(self, sample_id: str) -> int:
        number, place, index = self._locate(sample_id)
        code = number * self._stride + index
        at = int(np.searchsorted(self._used, code))
        if at == len(self._used) or self._used[at] != code:
            raise KeyError(sample_id)
        return int(place.labels[index])

    def __iter__(self) -> Iterator[str]:
        for code in self._used:
            number, index = divmod(int(code), self._stride)
            yield self._all[number].id(index)

    def __len__(self) -> int:
        return len(self._used)

    def where(self, sample_id: str) -> str:
        """The file or row that a sample comes from. It names the class folder, so methods must not see it either."""
        _, place, index = self._locate(sample_id)
        return place.where(index)

    def _locate(self, sample_id: str) -> tuple[int, Place, int]:
        name, _, key = sample_id.rpartition("/")
        if name not in self._places:
            raise KeyError(sample_id)
        number, place = self._places[name]
        try:
            return number, place, place.find(key)
        except KeyError:
            raise KeyError(sample_id) from None


class _Read(NamedTuple):
    """What a worker sends: pixels [n, height, width, channels] in 8 bits, and their hash."""

    pixels: Tensor
    digest: bytes


class _Reader(torch_data.Dataset[_Read | errors.DataError]):
    """Batch number → its pixels. Runs in the workers, so it is all that they get to see."""

    def __init__(self, places: Sequence[Place], arrangement: Arrangement, cut: Mapping[str, Any]) -> None:
        self._places, self._arrangement, self._cut = places, arrangement, cut

    def __getitem__(self, number: int) -> _Read | errors.DataError:
        domains, indices = self._arrangement.batch(number)
        pixels: NDArray[np.uint8] | None = None
        try:
            for row, (domain, index) in enumerate(zip(domains, indices, strict=True)):
                place = self._places[domain]
                one = place.load(int(index), **self._cut)
                if pixels is None:
                    pixels = np.empty((len(indices), *one.shape), dtype=np.uint8)
                if one.shape != pixels.shape[1:]:
                    raise errors.DataError(
                        f"{place.where(int(index))} is {one.shape[1]}×{one.shape[0]} and another picture of its batch "
                        f"{pixels.shape[2]}×{pixels.shape[1]}: give the stream `resize` and `crop`"
                    )
                pixels[row] = one
        except errors.DataError as error:
            # Raised here it would reach the caller wrapped in the worker's traceback.
            return error
        assert pixels is not None
        return _Read(torch.from_numpy(pixels), hashlib.sha256(pixels.data).digest())


class DataStream(ABC):
    """A stream that was opened from a description."""

    spec: StreamSpec

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]: ...

    @property
    @abstractmethod
    def length(self) -> int | None:
        """How many batches there are; None where nobody knows before the end."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a run card needs to know about the data."""

    def picture_of(self, sample_id: str) -> str:
        """Which picture a sample shows, whatever was done to it."""
        return picture_of(sample_id)

    @property
    def digests(self) -> list[str]:
        """Hashes of the batches so far, where pixels are hashed."""
        return []

    def go_on(self, digests: list[str]) -> bool:
        """Whether the batches that another process has read, by their hashes, are also those of here."""
        return True


class PictureStream(DataStream):
    """A stream of pictures in [0, 1] on a device, float32 [n, channels, height, width], with ids and without labels.

    Each batch's `meta` has `domain` (its name, or `mixed` with one name a sample under `domains`), `severity` where
    there is one, and `reset`, which is True where a method that is judged domain by domain starts anew.
    """

    def __init__(
        self,
        spec: StreamSpec,
        dataset: Dataset,
        places: Sequence[Place],
        arrangement: Arrangement,
        *,
        device: torch.device,
        workers: int,
        prefetch: int,
    ) -> None:
        self.spec, self.dataset, self.places, self.arrangement = spec, dataset, places, arrangement
        self._device, self._workers, self._prefetch = device, workers, prefetch
        # By a plain number a GPU would multiply with its reciprocal, which is off in the last bit.
        self.white = torch.full((), 255.0, device=device)
        resize = dataset.resize if spec.resize is None else spec.resize or None
        crop = dataset.crop if spec.crop is None else spec.crop or None
        self._cut = {"resize": resize, "crop": crop, "interpolation": spec.interpolation}
        self._digests: list[str] = []
        self._digest: str | None = None

    def __len__(self) -> int:
        """How many batches there are."""
        return len(self.arrangement)

    @property
    def length(self) -> int:
        return len(self)

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self.arrangement.index)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """The batches from number `start` on, counted from 0: a run that was interrupted goes on from where it was."""
        reader = _Reader(self.places, self.arrangement, self._cut)
        loader = torch_data.DataLoader(
            reader,
            batch_size=None,
            sampler=range(start, len(self)),
            num_workers=self._workers,
            prefetch_factor=self._prefetch if self._workers else None,
            pin_memory=self._device.type == "cuda",
            # Without one of its own the loader would draw from the global generator.
            generator=rng.torch_cpu(self.spec.seed, "loader"),
        )
        digests = self._digests = self._digests[:start]
        for number, read in enumerate(loader, start):
            if isinstance(read, errors.DataError):
                raise read
            if len(digests) == number:
                digests.append(read.digest.hex())
            yield self._batch(number, read.pixels)
        if len(digests) == len(self):
            self._digest = hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()

    @property
    def digests(self) -> list[str]:
        return list(self._digests)

    def go_on(self, digests: list[str]) -> bool:
        """Whether the last of the batches that another process has read is the same here; the others are believed."""
        self._digests = list(digests)
        if not digests:
            return True
        read = _Reader(self.places, self.arrangement, self._cut)[len(digests) - 1]
        if isinstance(read, errors.DataError):
            raise read
        return read.digest.hex() == digests[-1]

    def _batch(self, number: int, pixels: Tensor) -> Batch:
        domains, indices = self.arrangement.batch(number)
        places = [self.places[domain] for domain in domains]
        ids = [place.id(int(index)) for place, index in zip(places, indices, strict=True)]
        pixels = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2).contiguous()
        inputs = self._corrupt(pixels, domains, indices).float().div_(self.white)
        # One channel leaves the strides open, and kernels choose by them: the same pictures must give the same bits.
        inputs = inputs.flatten().view(inputs.shape)
        return Batch(inputs, ids, self._meta(number, domains))

    def _meta(self, number: int, domains: NDArray[np.int64]) -> dict[str, Any]:
        here = {self.places[domain].domain for domain in domains}
        severities = {self.places[domain].severity for domain in domains}
        meta: dict[str, Any] = {"domain": here.pop() if len(here) == 1 else "mixed"}
        if meta["domain"] == "mixed":
            meta["domains"] = tuple(self.places[domain].domain for domain in domains)
        if len(severities) == 1 and (severity := severities.pop()) is not None:
            meta["severity"] = severity
        meta["reset"] = self.spec.protocol == "ftta" and self.arrangement.enters(number)
        return meta

    def _corrupt(self, pixels: Tensor, domains: NDArray[np.int64], indices: NDArray[np.int64]) -> Tensor:
        for domain in np.unique(domains):
            place = self.places[domain]
            if place.corruption is None:
                continue
            chosen = np.flatnonzero(domains == domain)
            keys = [place.key(int(indices[row])) for row in chosen]
            rows = slice(None) if len(chosen) == len(pixels) else torch.from_numpy(chosen).to(pixels.device)
            pixels[rows] = corrupt_pixels(pixels[rows], place, keys, self.spec.seed)
        return pixels

    def describe(self) -> dict[str, Any]:
        """How many samples of how many, which pictures, how they are cut; after a whole pass a hash of all pixels."""
        used = np.bincount(self.arrangement.domain, minlength=len(self.places))
        return {
            "spec": self.spec.to_dict(),
            "digest": self.spec.digest,
            "samples": self.samples,
            "batches": len(self),
            "classes": len(self.dataset.classes),
            "masked": self.dataset.mask is not None,
            "domains": {
                place.name: {"used": int(count), "here": len(place), "published": self._published(place)}
                for place, count in zip(self.places, used, strict=True)
            },
            "fingerprint": fingerprint(self.places),
            "pixels": self._digest,
            "frost": _frost(self.places),
            **self._cut,
        }

    def _published(self, place: Place) -> int | None:
        number = (self.dataset.published or {}).get(place.domain)
        return None if number is None else number * place.views

    def __str__(self) -> str:
        here = sum(len(place) for place in self.places)
        published = [self._published(place) for place in self.places]
        text = f"{self.spec.data}: {self.samples:,} samples, {len(self):,} batches of {self.spec.batch}"
        text += f", from {here:,} in {len(self.places)} domain{'s' * (len(self.places) != 1)}"
        if None in published:
            return text
        whole = sum(number for number in published if number is not None)
        return text + (" (all that were published)" if whole == here else f" ({whole:,} were published)")


def _frost(places: Sequence[Place]) -> str | None:
    """Where the textures of frost come from, if there is any: another source gives other pictures."""
    from wise_atta.data.corruptions import frost_source

    return frost_source() if any(place.corruption == "frost" for place in places) else None


def corrupt_pixels(pixels: Tensor, place: Place, keys: Sequence[str], seed: int) -> Tensor:
    """Apply a place's corruption to 8-bit pixels; grey is repeated into three channels and averaged afterwards."""
    from wise_atta.data.corruptions import corrupt

    assert place.corruption is not None and place.severity is not None
    grey = pixels.shape[1] == 1
    colour = pixels.expand(-1, 3, -1, -1).contiguous() if grey else pixels
    result = corrupt(colour, place.corruption, place.severity, seed=seed, ids=list(keys))
    return result.float().mean(1, keepdim=True).round().to(torch.uint8) if grey else result


def open_stream(
    spec: StreamSpec,
    root: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    workers: int | None = None,
    prefetch: int = 4,
) -> tuple[DataStream, Mapping[str, int]]:
    """Open what a description describes: the stream, and apart from it the truth.

    Parameters
    ----------
    spec
        The description.
    root
        The folder with the data; WISE_ATTA_DATA if not given.
    device
        Where the batches are wanted; corruptions run there.
    workers
        Processes that decode; None for none on a CPU and up to eight beside a GPU. Changes nothing but the speed.
    prefetch
        Batches that each worker holds ready.

    Examples
    --------
    >>> stream, truth = open_stream(StreamSpec(data="digits", batch=100, limit=250))
    >>> print(stream)
    digits: 250 samples, 3 batches of 100, from 896 in 1 domain (all that were published)
    >>> batch = next(iter(stream))
    >>> batch.inputs.shape, truth[batch.ids[0]] in range(10)
    (torch.Size([100, 1, 32, 32]), True)
    """
    if spec.data.startswith("python:"):
        return from_iterable(_factory(spec.data), spec, device=device)
    dataset = catalog.open_dataset(spec.data, root)
    if dataset.missing and not spec.domains:
        raise errors.DataError(
            f"{spec.data} lacks {', '.join(dataset.missing)} here: add them, or say which domains are meant, such as "
            f"{','.join(dataset.domains)}"
        )
    domains = spec.domains or (tuple(dataset.published) if dataset.published else dataset.domains)
    if spec.protocol == "gradual" and not dataset.severities:
        raise errors.BadConfig(f"{spec.data} has no severities that could rise: choose another protocol")
    steps: Sequence[int | None] = (None,)
    if dataset.severities:
        steps = GRADUAL if spec.protocol == "gradual" else (spec.severity,)
    tour = [(domain, severity) for domain in domains for severity in steps]
    stops = list(dict.fromkeys(tour))
    places = [dataset.place(*stop) for stop in stops]
    arrangement = arrange(
        [place.labels for place in places],
        [stops.index(stop) for stop in tour] * spec.rounds,
        names=[place.domain for place in places],
        batch=spec.batch,
        order=spec.order,
        mixed=spec.protocol == "mixed",
        cut=spec.cut,
        limit=spec.limit,
        concentration=spec.concentration,
        seed=spec.seed,
    )
    device = torch.device(device)
    if workers is None:
        workers = min(8, os.cpu_count() or 1) if device.type == "cuda" else 0
    stream = PictureStream(spec, dataset, places, arrangement, device=device, workers=workers, prefetch=prefetch)
    return stream, Truth(places, arrangement)


class IterableStream(DataStream):
    """A stream over samples that come one by one, in the order in which they come.

    Labels are taken off on the way and are in `truth` from the moment their batch was handed out.
    """

    def __init__(self, samples: Iterable[Any], spec: StreamSpec, truth: dict[str, int], device: torch.device) -> None:
        self.spec, self._samples, self._truth, self._device = spec, samples, truth, device

    @property
    def length(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        """The description, and how many samples have come so far."""
        return {"spec": self.spec.to_dict(), "digest": self.spec.digest, "samples": len(self._truth)}

    def picture_of(self, sample_id: str) -> str:
        """The id itself: what its parts mean is known to whoever gave it."""
        return sample_id

    def __iter__(self) -> Iterator[Batch]:
        inputs: list[Tensor] = []
        ids: list[str] = []
        for number, sample in enumerate(self._samples):
            if self.spec.limit is not None and number == self.spec.limit:
                break
            pixels, label, sample_id = self._sample(number, sample)
            if self._truth.setdefault(sample_id, label) != label:
                raise errors.DataError(f"sample {sample_id!r} of {self.spec.data} came with two different labels")
            inputs.append(pixels)
            ids.append(sample_id)
            if len(inputs) == self.spec.batch:
                yield self._batch(inputs, ids)
                inputs, ids = [], []
        if inputs:
            yield self._batch(inputs, ids)

    def _batch(self, inputs: list[Tensor], ids: list[str]) -> Batch:
        shapes = {tuple(one.shape) for one in inputs}
        if len(shapes) > 1:
            raise errors.DataError(f"{self.spec.data} gives samples of shapes {sorted(shapes)}: one shape is needed")
        return Batch(torch.stack(inputs).to(self._device), ids, {"domain": self.spec.data, "reset": False})

    def _sample(self, number: int, sample: Any) -> tuple[Tensor, int, str]:
        if not isinstance(sample, tuple | list) or len(sample) not in (2, 3):
            raise errors.DataError(
                f"sample {number} of {self.spec.data} is a {type(sample).__name__}, "
                "not (input, label) or (input, label, id)"
            )
        pixels = torch.as_tensor(np.array(sample[0]) if not isinstance(sample[0], Tensor) else sample[0])
        if pixels.dtype == torch.uint8:
            pixels = pixels.float().div(255)
        elif not pixels.is_floating_point() or not 0 <= float(pixels.min()) <= float(pixels.max()) <= 1:
            raise errors.DataError(
                f"sample {number} of {self.spec.data} is neither 8-bit nor a float in [0, 1]: normalisation belongs to "
                "the model"
            )
        sample_id = str(sample[2]) if len(sample) == 3 else f"{number:08d}"
        return pixels, int(sample[1]), sample_id


def from_iterable(
    samples: Iterable[Any], spec: StreamSpec | None = None, *, device: str | torch.device = "cpu"
) -> tuple[IterableStream, Mapping[str, int]]:
    """A stream over one's own `IterableDataset`, or any iterable, of (input, label) or (input, label, id).

    Inputs are [channels, height, width], in 8 bits or as floats in [0, 1]; they come in their own order. Of `spec` only
    `data`, `batch`, `limit` and `delay` may say something.

    >>> stream, truth = from_iterable([(torch.zeros(1, 8, 8), 3), (torch.ones(1, 8, 8), 5)])
    >>> [batch.ids for batch in stream], dict(truth)
    ([['00000000', '00000001']], {'00000000': 3, '00000001': 5})
    """
    spec = spec or StreamSpec(data="iterable", order="sequential")
    plain = StreamSpec(data=spec.data, batch=spec.batch, limit=spec.limit, delay=spec.delay, order="sequential")
    for name, value in plain.to_dict().items():
        if spec.to_dict()[name] != value:
            raise errors.BadConfig(
                f"{spec.data} is iterated in its own order, so {name}={spec.to_dict()[name]!r} has no meaning: "
                f"give {value!r}"
            )
    truth: dict[str, int] = {}
    return IterableStream(samples, spec, truth, torch.device(device)), truth


def _factory(name: str) -> Iterable[Any]:
    module, _, function = name.removeprefix("python:").partition(":")
    try:
        samples = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.BadConfig(
            f"{name}: no such factory ({error}); python:package.module:function is needed"
        ) from error
    if not isinstance(samples, Iterable):
        raise errors.BadConfig(f"{name} gave a {type(samples).__name__}, which cannot be iterated over")
    return samples
