"""Layouts of data sets: trees of classes and domains, ImageNet-C's grid, CIFAR's arrays, the hub, digits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wise_atta import errors
from wise_atta.data.archives import Archive, join, open_archive
from wise_atta.data.datasets import Dataset, Files, Hub, Npy, Place, Rows
from wise_atta.data.pictures import SUFFIXES, Pixels

Report = Callable[[errors.DataError], None]


def fail(error: errors.DataError) -> None:
    """What a reader does about an error unless it is told otherwise."""
    raise error


@dataclass(frozen=True)
class ClassFolder:
    """A folder `class/picture`: the files of each class."""

    archive: Archive
    folder: str
    files: Mapping[str, Sequence[str]]
    ignored: tuple[str, ...]

    def pictures(self, classes: Sequence[str], domain: str = "") -> Files:
        number = {name: label for label, name in enumerate(classes)}
        names = [f"{name}/{file}" for name, files in self.files.items() for file in files]
        labels = [number[name] for name, files in self.files.items() for _ in files]
        return Files(self.archive, self.folder, names, np.array(labels, dtype=np.int64), domain)


def class_folder(archive: Archive, folder: str, report: Report = fail) -> ClassFolder:
    """Read one folder of class folders. An empty class, or a picture beside the classes, is an error."""
    loose, names = archive.children(folder)
    ignored = [join(folder, name) for name in loose]
    for name in loose:
        if _is_picture(name):
            where = archive.where(join(folder, name))
            report(errors.DataError(f"{where} lies beside the class folders: move it into the one of its class"))
    classes: dict[str, list[str]] = {}
    for name in names:
        path = join(folder, name)
        if _is_junk(name):
            ignored.append(path + "/")
            continue
        files, below = archive.children(path)
        if any(not _is_junk(inner) for inner in below):
            where = archive.where(join(path, below[0]))
            report(errors.DataError(f"{where} is a folder where pictures were expected: the layout is class/picture"))
        classes[name] = [file for file in files if _is_picture(file)]
        ignored += [join(path, file) for file in files if not _is_picture(file)]
        if not classes[name]:
            report(errors.DataError(f"{archive.where(path)} holds no picture: fill or remove the class folder"))
    if not classes:
        report(errors.DataError(f"{archive.where(folder)} holds no class folder"))
    return ClassFolder(archive, folder, classes, tuple(ignored))


def number_classes(
    name: str, folders: Sequence[ClassFolder], space: str
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """The classes, and where they stand among the model's outputs.

    `space` is `own` (all folder names, sorted), `imagenet` (the 1,000 WordNet ids, whichever of them occur) or
    `imagenet-subset` (only those that occur, with a mask).
    """
    names = sorted({name for folder in folders for name in folder.files})
    if space == "own":
        return tuple(names), None
    from wise_atta.data.models import imagenet_classes

    everything = imagenet_classes()
    number = {wnid: label for label, wnid in enumerate(everything)}
    for folder in folders:
        for wnid in folder.files:
            if wnid not in number:
                where = folder.archive.where(join(folder.folder, wnid))
                raise errors.DataError(f"{where} is not one of ImageNet's 1,000 classes, as those of {name} must be")
    return (everything, None) if space == "imagenet" else (tuple(names), tuple(number[wnid] for wnid in names))


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not _is_junk(name)


def _is_junk(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _root(archive: Archive, below: int) -> str:
    """The folder from which pictures lie `below` levels down. What lies beside the way there must hold no pictures."""
    first = next((name for name in archive.walk() if _is_picture(name.rpartition("/")[2])), None)
    if first is None:
        raise errors.DataError(f"{archive.path} holds no picture")
    parts = first.split("/")
    if len(parts) < below:
        layout = "/".join(("domain", "class", "picture")[-below:])
        raise errors.DataError(f"{archive.where(first)} does not fit the layout {layout}")
    way = parts[:-below]
    for depth, step in enumerate(way):
        parent = "/".join(way[:depth])
        files, folders = archive.children(parent)
        for other in [name for name in files if _is_picture(name)] + [name for name in folders if not _is_junk(name)]:
            if other != step:
                where = archive.where(join(parent, other))
                raise errors.DataError(f"{where} lies beside {step!r}, in which the pictures are: remove one of them")
    return "/".join(way)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def read_tree(
    name: str, archives: Sequence[Archive], *, space: str = "own", domains: bool | None = None, report: Report = fail
) -> Dataset:
    """Read `class/picture`, or `domain/class/picture`, or several archives of `class/picture` as one domain each.

    `domains` says whether there is a level of domains; None looks. An archive `pacs-photo.zip` of a data set `pacs` is
    the domain `photo`.
    """
    by_domain: dict[str, ClassFolder] = {}
    for archive in archives:
        stem = archive.path.name if archive.path.is_dir() else archive.path.stem
        if domains is None:
            first = next((path for path in archive.walk() if _is_picture(path.rpartition("/")[2])), "")
            level = 3 if first.count("/") >= 2 else 2
        else:
            level = 3 if domains and not stem.startswith(f"{name}-") else 2
        root = _root(archive, level)
        if level == 2:
            by_domain[stem.removeprefix(f"{name}-") if domains else name] = class_folder(archive, root, report)
        else:
            for domain in archive.children(root)[1]:
                if not _is_junk(domain):
                    by_domain[domain] = class_folder(archive, join(root, domain), report)
    classes, mask = number_classes(name, list(by_domain.values()), space)
    named = domains or set(by_domain) != {name}

    def place(domain: str, severity: int | None) -> Place:
        return Place(domain, severity, by_domain[domain].pictures(classes, domain if named else ""))

    ignored = tuple(file for folder in by_domain.values() for file in folder.ignored)
    return Dataset(name, classes, place, tuple(by_domain), mask=mask, ignored=ignored)


def read_grid(name: str, archives: Sequence[Archive], *, space: str = "own", report: Report = fail) -> Dataset:
    """Read `corruption/severity/class/picture`, at whatever depth, spread over any number of archives."""
    grids: dict[str, dict[int, tuple[Archive, str]]] = {}
    for archive in archives:
        for folder, severities in _grids(archive, "", depth=3):
            corruption = folder.rpartition("/")[2] or archive.path.name
            if corruption in grids:
                raise errors.DataError(f"{archive.where(folder)}: {corruption!r} was already found elsewhere")
            grids[corruption] = {int(severity): (archive, join(folder, severity)) for severity in severities}
    if not grids:
        raise errors.DataError(f"{archives[0].path} does not have the layout corruption/severity/class/picture")
    if space == "own":
        parts = [class_folder(*place, report) for grid in grids.values() for place in grid.values()]
        classes, mask = number_classes(name, parts, space)
    else:
        classes, mask = number_classes(name, [], space)

    def place(domain: str, severity: int | None) -> Place:
        here = grids[domain].get(severity or 0)
        if here is None:
            raise errors.DataError(f"{name} has no severity {severity} of {domain!r}; it has {sorted(grids[domain])}")
        folder = class_folder(*here, report)
        number_classes(name, [folder], space)
        return Place(domain, severity, folder.pictures(classes))

    steps = tuple(sorted({severity for grid in grids.values() for severity in grid}))
    return Dataset(name, classes, place, tuple(grids), steps, mask=mask)


def _grids(archive: Archive, folder: str, depth: int) -> Iterator[tuple[str, list[str]]]:
    folders = [name for name in archive.children(folder)[1] if not _is_junk(name)]
    severities = [name for name in folders if re.fullmatch("[1-5]", name)]
    if severities:
        yield folder, severities
    elif depth:
        for name in folders:
            yield from _grids(archive, join(folder, name), depth - 1)


def read_npy(name: str, archive: Archive, *, classes: Sequence[str] | None = None, report: Report = fail) -> Dataset:
    """Read `corruption.npy` and `labels.npy` as CIFAR-10-C has them: five blocks of rows, one a severity."""
    files = {path.rpartition("/")[2].removesuffix(".npy"): path for path in archive.walk() if path.endswith(".npy")}
    if "labels" not in files:
        raise errors.DataError(f"{archive.path} has no labels.npy")
    stored = Npy(archive, files.pop("labels"))
    where, labels = archive.where(stored.name), np.array(stored())
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) % 5 or not len(labels):
        raise errors.DataError(
            f"{where} has shape {labels.shape} and type {labels.dtype}: five equal blocks of whole numbers are needed"
        )
    blocks = labels.reshape(5, -1).astype(np.int64)
    highest = len(classes) if classes else int(labels.max()) + 1
    if labels.min() < 0 or labels.max() >= highest:
        raise errors.DataError(
            f"{where} has labels from {labels.min()} to {labels.max()}: 0 to {highest - 1} was expected"
        )
    if (blocks != blocks[0]).any():
        raise errors.DataError(
            f"{where}: the labels of the five severities differ, so it is not the labels of this set"
        )

    def array(domain: str) -> Npy:
        npy = Npy(archive, files[domain])
        rows = npy()
        if rows.ndim != 4 or rows.shape[3] != 3 or rows.dtype != np.uint8 or len(rows) != len(labels):
            raise errors.DataError(
                f"{archive.where(files[domain])} has shape {rows.shape} and type {rows.dtype}: "
                f"({len(labels)}, height, width, 3) of uint8 was expected"
            )
        return npy

    def place(domain: str, severity: int | None) -> Place:
        start = ((severity or 1) - 1) * blocks.shape[1]
        rows = Rows(array(domain), blocks[0], name=archive.where(files[domain]), start=start)
        return Place(domain, severity, rows)

    names = tuple(classes or (str(label) for label in range(highest)))
    return Dataset(name, names, place, tuple(sorted(files)), (1, 2, 3, 4, 5))


def read_digits(train: bool) -> Dataset:
    """scikit-learn's grey digits: those that `wise-atta train digits` learns from, or the others."""
    from wise_atta.data.train import RECIPES, digits, split

    parts = split(digits(), RECIPES["digits"].held_out, RECIPES["digits"].seed)
    part, name = (parts[0], "digits-train") if train else (parts[1], "digits")
    images = part.pixels.permute(0, 2, 3, 1).numpy()
    rows = Rows(_InMemory(images), part.labels.numpy(), name="scikit-learn's digits", prefix=f"{name}/")
    return Dataset(name, part.classes, lambda domain, severity: Place(domain, severity, rows), (name,), channels=1)


@dataclass(frozen=True)
class _InMemory:
    array: Pixels

    def __call__(self) -> Pixels:
        return self.array


def read_hub(name: str) -> Dataset:
    """Read `hf:NAME`, `hf:NAME@SPLIT` or `hf:NAME#CONFIG@SPLIT` with the `datasets` package; splits are the domains.

    NAME is one on the hub or a local folder that `datasets.load_dataset` understands. The columns are found by their
    types: the one of pictures and the one of class labels.
    """
    try:
        import datasets as hub  # type: ignore[import-untyped]
    except ImportError as error:
        raise errors.MissingExtra(f"{name} needs the package `datasets`: pip install datasets") from error
    path, _, split = name.removeprefix("hf:").partition("@")
    path, _, config = path.partition("#")
    try:
        loaded = hub.load_dataset(path, config or None)
    except Exception as error:  # the package raises classes of its own, of the hub's client and of the HTTP library
        raise errors.DataError(f"{name} cannot be opened with load_dataset: {error}") from error
    parts: dict[str, Any] = {str(key): part for key, part in loaded.items() if not split or str(key) == split}
    if not parts:
        raise errors.unknown(f"split of {name}", split, [str(key) for key in loaded])
    splits: dict[str, Hub] = {}
    classes: tuple[str, ...] = ()
    for key, part in parts.items():
        images = [column for column, kind in part.features.items() if isinstance(kind, hub.Image)]
        labels = [column for column, kind in part.features.items() if isinstance(kind, hub.ClassLabel)]
        if len(images) != 1 or len(labels) != 1:
            raise errors.DataError(
                f"{name}, split {key}: one column of pictures and one of class labels is needed, "
                f"it has {dict(part.features)}"
            )
        classes = tuple(part.features[labels[0]].names)
        numbers = np.array(part[labels[0]], dtype=np.int64)
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= len(classes)):
            raise errors.DataError(f"{name}, split {key} has labels outside 0 to {len(classes) - 1}: unlabelled rows?")
        rows = part.cast_column(images[0], hub.Image(decode=False))
        splits[key] = Hub(rows, images[0], numbers, f"{name.partition('@')[0]}@{key}")
    return Dataset(name, classes, lambda domain, severity: Place(domain, severity, splits[domain]), tuple(splits))


def corrupted(clean: Dataset, corruptions: Sequence[str]) -> Dataset:
    """A clean data set with corruptions to be applied on the fly: every clean domain under every corruption."""
    one = len(clean.domains) == 1
    domains = {name if one else f"{domain}+{name}": (domain, name) for domain in clean.domains for name in corruptions}

    def place(domain: str, severity: int | None) -> Place:
        base, corruption = domains[domain]
        return Place(domain, severity, clean.place(base).pictures, corruption=corruption)

    numbers = None
    if clean.published is not None:
        numbers = {domain: clean.published[base] for domain, (base, _) in domains.items() if base in clean.published}
    return replace(
        clean,
        name=f"{clean.name}+c",
        places=place,
        domains=tuple(domains),
        severities=(1, 2, 3, 4, 5),
        published=numbers,
        _opened={},
    )


def open_all(paths: Sequence[Path]) -> list[Archive]:
    """Open each path; a folder that holds nothing but archives stands for those."""
    archives: list[Archive] = []
    for path in paths:
        inside = sorted(file for file in path.iterdir() if file.suffix in (".tar", ".zip")) if path.is_dir() else []
        folders = path.is_dir() and any(entry.is_dir() and not _is_junk(entry.name) for entry in path.iterdir())
        archives += [open_archive(file) for file in inside] if inside and not folders else [open_archive(path)]
    return archives
