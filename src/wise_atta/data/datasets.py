"""`Dataset`: named domains, each a list of pictures with their classes, read where they lie.

A picture is known by a key made from its path inside the data set, never by the path itself: folders are named after
classes, and whoever sees a sample's id must not see its label. The same picture under several corruptions, severities
or crops has one key. Pictures are listed in the order of their sorted paths (arrays: by row).
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wise_atta import errors
from wise_atta.data.archives import Archive, join
from wise_atta.data.pictures import Pixels, decode, fit

if TYPE_CHECKING:
    from PIL.Image import Image

# ---- one list of pictures --------------------------------------------------------------------------------------------


class Pictures:
    """A list of pictures and their classes.

    Parameters
    ----------
    names
        What identifies each picture, the same wherever it occurs.
    labels
        One class a picture.
    """

    def __init__(self, names: Sequence[str], labels: NDArray[np.int64]) -> None:
        self.names = names
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def get(self, index: int) -> Image | Pixels:
        """One picture: decoded but neither resized nor cropped."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """How to call a picture in a message."""
        raise NotImplementedError

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """64 bits a picture, from its name."""
        digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in self.names)
        keys = np.frombuffer(digests, dtype="<u8").astype(np.uint64)
        if len(np.unique(keys)) != len(keys):
            raise errors.DataError(f"two pictures share one key, such as {self.where(0)}: rename one of them")
        return keys

    @cached_property
    def _by_key(self) -> NDArray[np.int64]:
        return np.argsort(self.keys)

    def find(self, key: int) -> int:
        """The number of the picture with that key; KeyError if there is none."""
        at = int(np.searchsorted(self.keys, np.uint64(key), sorter=self._by_key))
        if at == len(self) or int(self.keys[self._by_key[at]]) != key:
            raise KeyError(key)
        return int(self._by_key[at])


class Files(Pictures):
    """Picture files in one folder of an archive, given as paths below it."""

    def __init__(
        self, archive: Archive, folder: str, files: Sequence[str], labels: NDArray[np.int64], domain: str = ""
    ) -> None:
        super().__init__([join(domain, file) for file in files] if domain else files, labels)
        self.archive, self.folder, self.files = archive, folder, files

    def read(self, index: int) -> bytes:
        return self.archive.read(join(self.folder, self.files[index]))

    def get(self, index: int) -> Image:
        return decode(self.read(index), self.where(index))

    def where(self, index: int) -> str:
        return self.archive.where(join(self.folder, self.files[index]))


class Rows(Pictures):
    """Rows of an array of pictures [n, height, width, channels], in memory or in an npy file that is mapped on use."""

    def __init__(
        self,
        array: Callable[[], Pixels],
        labels: NDArray[np.int64],
        *,
        name: str,
        start: int = 0,
        prefix: str = "",
    ) -> None:
        super().__init__([f"{prefix}{row}" for row in range(len(labels))], labels)
        self._open, self._name, self._start = array, name, start
        self._array: Pixels | None = None

    def get(self, index: int) -> Pixels:
        if self._array is None:
            self._array = self._open()
        return self._array[self._start + index]

    def where(self, index: int) -> str:
        return f"{self._name}, row {self._start + index}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}  # a mapped file would be sent as a copy of its whole contents


@dataclass(frozen=True)
class Npy:
    """An npy file inside an archive, opened by calling it: mapped where possible, read where compressed."""

    archive: Archive
    name: str

    def __call__(self) -> NDArray[Any]:
        where = self.archive.where(self.name)
        span = self.archive.span(self.name)
        try:
            if span is None:
                return np.load(io.BytesIO(self.archive.read(self.name)), allow_pickle=False)
            with span.path.open("rb") as file:
                file.seek(span.offset)
                version = np.lib.format.read_magic(file)
                header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, fortran, dtype = header[version](file)
                begin = file.tell()
            size = dtype.itemsize * int(np.prod(shape))
            if dtype.hasobject or begin - span.offset + size != span.size:
                raise ValueError(f"{span.size} bytes do not hold an array of shape {shape} and type {dtype}")
            return np.memmap(span.path, dtype=dtype, mode="r", offset=begin, shape=shape, order="F" if fortran else "C")
        except (ValueError, KeyError, OSError, EOFError) as error:
            raise errors.DataError(f"{where} is not a whole npy file ({error}): fetch or copy it again") from error


class Hub(Pictures):
    """One split of a Hugging Face dataset."""

    def __init__(self, rows: Any, column: str, labels: NDArray[np.int64], name: str) -> None:
        super().__init__([f"{name}/{row}" for row in range(len(labels))], labels)
        self._rows, self._column, self._name = rows, column, name

    def get(self, index: int) -> Image:
        entry = self._rows[index][self._column]
        return decode(entry["bytes"] or Path(entry["path"]).read_bytes(), self.where(index))

    def where(self, index: int) -> str:
        return f"{self._name}, row {index}"


# ---- a domain, and all of them ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A domain at one severity: its pictures, how many crops each gives, and the corruption still to be applied.

    A sample is a crop of a picture; its id is `domain/severity/key`, with `.crop` after it where there are several.
    """

    domain: str
    severity: int | None
    pictures: Pictures
    views: int = 1
    corruption: str | None = None

    @property
    def name(self) -> str:
        return self.domain if self.severity is None else f"{self.domain}/{self.severity}"

    def __len__(self) -> int:
        return len(self.pictures) * self.views

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        return np.repeat(self.pictures.labels, self.views)

    def key(self, index: int) -> str:
        """What the sample is, apart from what was done to it."""
        picture, view = divmod(index, self.views)
        key = f"{int(self.pictures.keys[picture]):016x}"
        return key if self.views == 1 else f"{key}.{view}"

    def id(self, index: int) -> str:
        return f"{self.name}/{self.key(index)}"

    def find(self, key: str) -> int:
        """The number of the sample with that key; KeyError if there is none."""
        if not re.fullmatch(r"[0-9a-f]{16}(\.\d+)?", key):
            raise KeyError(key)
        picture, _, view = key.partition(".")
        number = int(view or 0)
        if bool(view) != (self.views > 1) or number >= self.views:
            raise KeyError(key)
        return self.pictures.find(int(picture, 16)) * self.views + number

    def where(self, index: int) -> str:
        return self.pictures.where(index // self.views)

    def load(self, index: int, *, resize: int | None, crop: int | None, interpolation: str) -> Pixels:
        """One sample's pixels before any corruption."""
        picture, view = divmod(index, self.views)
        return fit(
            self.pictures.get(picture),
            self.where(index),
            resize=resize,
            crop=crop,
            where=0.5 if self.views == 1 else view / (self.views - 1),
            interpolation=interpolation,
        )


def picture_of(sample_id: str) -> str:
    """Which picture a sample shows, whatever its domain, severity and crop.

    >>> picture_of("fog/5/00c0ffee00c0ffee.2")
    '00c0ffee00c0ffee'
    """
    return sample_id.rpartition("/")[2].partition(".")[0]


@dataclass(frozen=True)
class Dataset:
    """Domains with one set of classes.

    Parameters
    ----------
    name
        What it was opened by.
    classes
        Names of the classes; a label is a number in this list.
    places
        Opens a domain by (name, severity).
    domains
        Those that are here, in the published order.
    severities
        Empty where the data set has none.
    mask
        Where these classes stand among the model's outputs. None: they are the model's outputs.
    missing
        Published domains that are not here.
    published
        How many pictures each domain has as published; None where nothing is published.
    resize, crop, views
        How its pictures are cut by default: short side, side of the square, number of squares a picture.
    channels
        3, or 1 for grey.
    ignored
        Files that are no pictures and were passed over.
    """

    name: str
    classes: tuple[str, ...]
    places: Callable[[str, int | None], Place]
    domains: tuple[str, ...]
    severities: tuple[int, ...] = ()
    mask: tuple[int, ...] | None = None
    missing: tuple[str, ...] = ()
    published: Mapping[str, int] | None = None
    resize: int | None = None
    crop: int | None = None
    views: int = 1
    channels: int = 3
    ignored: tuple[str, ...] = ()
    _opened: dict[tuple[str, int | None], Place] = field(default_factory=dict, repr=False, compare=False)

    def place(self, domain: str, severity: int | None = None) -> Place:
        """One domain, at one severity where the data set has severities."""
        if domain not in self.domains:
            if domain in self.missing:
                raise errors.DataError(f"{self.name} has no {domain!r} here; it has {', '.join(self.domains)}")
            raise errors.unknown(f"domain of {self.name}", domain, (*self.domains, *self.missing))
        if not self.severities:
            severity = None
        elif severity not in self.severities:
            raise errors.BadConfig(f"{self.name} has severities {self.severities}, not {severity}")
        if (domain, severity) not in self._opened:
            place = self.places(domain, severity)
            self._opened[domain, severity] = replace(place, views=self.views)
        return self._opened[domain, severity]

    def all_places(self) -> Iterator[Place]:
        """Every domain at every severity."""
        for domain in self.domains:
            for severity in self.severities or (None,):
                yield self.place(domain, severity)


def fingerprint(places: Sequence[Place]) -> str:
    """A hash of which pictures with which labels are in these domains; their pixels are not read."""
    digest = hashlib.sha256()
    for place in places:
        digest.update(f"{place.name} {len(place.pictures)} {place.views}\n".encode())
        digest.update(place.pictures.keys.astype("<u8").tobytes() + place.pictures.labels.astype("<i8").tobytes())
    return digest.hexdigest()
