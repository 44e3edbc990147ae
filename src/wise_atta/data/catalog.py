"""Data sets by name: where they come from, and what they look like as published."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wise_atta import errors
from wise_atta.data import layouts
from wise_atta.data.corruptions.tables import CORRUPTIONS, EXTRA
from wise_atta.data.datasets import Dataset

# What can stand after a clean data set's name.
SUFFIXES = {"c": CORRUPTIONS, "extra": EXTRA}


@dataclass(frozen=True)
class Download:
    """An official archive. A `checksum`, `md5:…` or `sha256:…`, stands here only with the `source` that has it."""

    url: str
    size: int | None = None
    checksum: str | None = None
    source: str | None = None

    @property
    def file(self) -> str:
        return self.url.partition("?")[0].rpartition("/")[2]


@dataclass(frozen=True)
class Entry:
    """What is known about a data set.

    Parameters
    ----------
    layout
        `classes` (class/picture), `domains` (domain/class/picture), `grid` (corruption/severity/class/picture), `npy`
        or `digits`.
    places
        Where it may lie under the data folder. The first alternative of which anything exists is taken, all of it.
    space
        What its classes are, see `layouts.number_classes`.
    domains
        In published order; empty for a data set with one domain, which then has the data set's name.
    published
        Pictures a domain (and severity), as published.
    classes
        How many classes, as published.
    resize, crop, views
        See `Dataset`.
    downloads, folder
        Official archives, and the folder below the data folder that they go to.
    """

    name: str
    title: str
    layout: str
    places: tuple[tuple[str, ...], ...]
    home: str
    licence: str
    space: str = "own"
    domains: tuple[str, ...] = ()
    published: int | tuple[int, ...] | None = None
    classes: int | None = None
    resize: int | None = None
    crop: int | None = None
    views: int = 1
    downloads: tuple[Download, ...] = ()
    folder: str = ""

    def counts(self) -> dict[str, int] | None:
        """Pictures by domain, as published."""
        domains = self.domains or (self.name,)
        if self.published is None:
            return None
        numbers = self.published if isinstance(self.published, tuple) else (self.published,) * len(domains)
        return dict(zip(domains, numbers, strict=True))


def _zenodo(record: int, file: str, size: int, md5: str) -> Download:
    # Zenodo shows the MD5 of every file on the page of its record.
    page = f"https://zenodo.org/records/{record}"
    return Download(f"{page}/files/{file}?download=1", size, f"md5:{md5}", page)


def _berkeley(file: str, size: int, sha256: str, name: str) -> Download:
    source = f"https://github.com/tensorflow/datasets/blob/333639b/tensorflow_datasets/url_checksums/{name}.txt"
    return Download(f"https://people.eecs.berkeley.edu/~hendrycks/{file}", size, f"sha256:{sha256}", source)


_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_IMAGENET_TERMS = "pictures: ImageNet's terms of access (non-commercial research)"

ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            name="imagenet-c",
            title="ImageNet-C: the validation set under 15 corruptions at 5 severities, 224 px",
            layout="grid",
            places=(("ImageNet-C",), ("imagenet-c",), ("noise.tar", "blur.tar", "weather.tar", "digital.tar")),
            home="https://github.com/hendrycks/robustness",
            licence=f"CC BY 4.0; {_IMAGENET_TERMS}",
            space="imagenet",
            domains=tuple(CORRUPTIONS),
            published=50_000,
            classes=1000,
            crop=224,
            downloads=(
                _zenodo(2235448, "noise.tar", 22_565_673_785, "e80562d7f6c3f8834afb1ecf27252745"),
                _zenodo(2235448, "blur.tar", 7_112_704_951, "2d8e81fdd8e07fef67b9334fa635e45c"),
                _zenodo(2235448, "weather.tar", 12_797_438_995, "33ffea4db4d93fe4a428c40a6ce0c25d"),
                _zenodo(2235448, "digital.tar", 7_757_510_705, "89157860d7b10d5797849337ca2e5c03"),
            ),
            folder="ImageNet-C",
        ),
        Entry(
            name="imagenet-r",
            title="ImageNet-R: renditions of 200 ImageNet classes",
            layout="classes",
            places=(("imagenet-r",), ("ImageNet-R",), ("imagenet-r.tar",)),
            home="https://github.com/hendrycks/imagenet-r",
            licence=f"MIT (repository); {_IMAGENET_TERMS}",
            space="imagenet-subset",
            published=30_000,
            classes=200,
            resize=256,
            crop=224,
            downloads=(
                _berkeley(
                    "imagenet-r.tar",
                    2_191_079_936,
                    "18c6bf493b39a0d975d48e587437f562caab9c52ae6327dcfa9dd8eb54aa1b52",
                    "imagenet_r",
                ),
            ),
        ),
        Entry(
            name="imagenet-k",
            title="ImageNet-K, that is ImageNet-Sketch: drawings of the 1,000 ImageNet classes",
            layout="classes",
            places=(("sketch",), ("imagenet-sketch",), ("ImageNet-Sketch",), ("ImageNet-Sketch.zip",)),
            home="https://github.com/HaohanWang/ImageNet-Sketch",
            licence="not stated by the authors' page on the hub",
            space="imagenet",
            published=50_889,
            classes=1000,
            resize=256,
            crop=224,
            downloads=(
                Download(
                    "https://huggingface.co/datasets/songweig/imagenet_sketch/resolve/main/data/ImageNet-Sketch.zip"
                ),
            ),
        ),
        Entry(
            name="imagenet-a",
            title="ImageNet-A: natural pictures of 200 ImageNet classes that ResNet-50 gets wrong",
            layout="classes",
            places=(("imagenet-a",), ("ImageNet-A",), ("imagenet-a.tar",)),
            home="https://github.com/hendrycks/natural-adv-examples",
            licence=f"MIT (repository); {_IMAGENET_TERMS}",
            space="imagenet-subset",
            published=7_500,
            classes=200,
            resize=256,
            crop=224,
            downloads=(
                _berkeley(
                    "imagenet-a.tar",
                    687_552_512,
                    "3bb3632277e6ba6392ea64c02ddbf4dd2266c9caffd6bc09c9656d28f012589e",
                    "imagenet_a",
                ),
            ),
        ),
        Entry(
            name="imagenet",
            title="ImageNet-1k, validation set, in folders by class",
            layout="classes",
            places=(("imagenet/val",), ("ILSVRC2012_val",), ("imagenet-val.zip",), ("imagenet-val.tar",)),
            home="https://image-net.org/download.php",
            licence=_IMAGENET_TERMS,
            space="imagenet",
            published=50_000,
            classes=1000,
            resize=256,
            crop=224,
        ),
        Entry(
            name="imagenet-sample",
            title="500 ImageNet pictures, one for every second class, three crops each; very likely training pictures",
            layout="classes",
            places=(("imagenet-sample.zip",), ("imagenet-sample",)),
            home="a file of your own: any folder or zip of class/picture",
            licence=_IMAGENET_TERMS,
            space="imagenet",
            published=500,
            classes=500,
            resize=256,
            crop=224,
            views=3,
        ),
        Entry(
            name="cifar10-c",
            title="CIFAR-10-C as released: 15 corruptions at 5 severities, 32 px",
            layout="npy",
            places=(("CIFAR-10-C",), ("CIFAR-10-C.tar",)),
            home="https://zenodo.org/records/2535967",
            licence="CC BY 4.0",
            domains=tuple(CORRUPTIONS),
            published=10_000,
            classes=10,
            downloads=(_zenodo(2535967, "CIFAR-10-C.tar", 2_918_471_680, "56bf5dcef84df0e2308c6dcbcbbd8499"),),
        ),
        Entry(
            name="cifar100-c",
            title="CIFAR-100-C as released: 15 corruptions at 5 severities, 32 px",
            layout="npy",
            places=(("CIFAR-100-C",), ("CIFAR-100-C.tar",)),
            home="https://zenodo.org/records/3555552",
            licence="CC BY 4.0",
            domains=tuple(CORRUPTIONS),
            published=10_000,
            classes=100,
            downloads=(_zenodo(3555552, "CIFAR-100-C.tar", 2_918_473_216, "11f0ed0f1191edbf9fa23466ae6021d3"),),
        ),
        Entry(
            name="cifar10",
            title="CIFAR-10, test set, as picture files in folders by class",
            layout="classes",
            places=(("cifar10-test.zip",), ("cifar10/test",)),
            home="https://www.cs.toronto.edu/~kriz/cifar.html",
            licence="not stated",
            published=10_000,
            classes=10,
        ),
        Entry(
            name="cifar10-train",
            title="CIFAR-10, training set, as picture files in folders by class",
            layout="classes",
            places=(("cifar10-train.zip",), ("cifar10/train",)),
            home="https://www.cs.toronto.edu/~kriz/cifar.html",
            licence="not stated",
            published=50_000,
            classes=10,
        ),
        Entry(
            name="pacs",
            title="PACS: 7 classes as photo, art painting, cartoon and sketch",
            layout="domains",
            places=(
                tuple(f"pacs-{domain}.zip" for domain in ("photo", "art_painting", "cartoon", "sketch")),
                ("PACS",),
                ("pacs",),
                ("PACS.zip",),
            ),
            home="https://domaingeneralization.github.io/#data (by hand: no address that a program can read)",
            licence="not stated",
            domains=("photo", "art_painting", "cartoon", "sketch"),
            published=(1_670, 2_048, 2_344, 3_929),
            classes=7,
            resize=144,
            crop=128,
        ),
        Entry(
            name="digits",
            title="scikit-learn's digits, grey, 32 px, the part that `wise-atta train digits` does not see",
            layout="digits",
            places=(),
            home="https://archive.ics.uci.edu/dataset/80",
            licence="CC BY 4.0",
            published=896,
            classes=10,
        ),
        Entry(
            name="digits-train",
            title="scikit-learn's digits, grey, 32 px, the part that `wise-atta train digits` learns from",
            layout="digits",
            places=(),
            home="https://archive.ics.uci.edu/dataset/80",
            licence="CC BY 4.0",
            published=901,
            classes=10,
        ),
    )
}
ALIASES = {"imagenet-sketch": "imagenet-k"}


def named_root(root: str | Path | None = None) -> Path | None:
    """The folder that is named for the data, there or not: `root`, or what WISE_ATTA_DATA says."""
    chosen = root or os.environ.get("WISE_ATTA_DATA")
    return Path(chosen).expanduser() if chosen else None


def data_root(root: str | Path | None = None) -> Path:
    """The folder with the data, see `named_root`."""
    path = named_root(root)
    if path is None:
        raise errors.DataError("where is the data? Give a folder (--data) or set WISE_ATTA_DATA to it")
    if not path.is_dir():
        raise errors.DataError(f"{path} is not a folder: give the one that holds the data (--data or WISE_ATTA_DATA)")
    return path


def find(entry: Entry, root: Path) -> list[Path]:
    """The paths of a data set under the data folder; empty if it is not there."""
    for alternative in entry.places:
        here = [root / place for place in alternative if (root / place).exists()]
        if here:
            return here
    return []


def lookup(name: str) -> Entry:
    """The entry of that name.

    >>> lookup("imagenet-sketch").published
    50889
    """
    name = ALIASES.get(name, name)
    if name not in ENTRIES:
        raise errors.unknown("data set", name, (*ENTRIES, *ALIASES))
    return ENTRIES[name]


def open_dataset(name: str, root: str | Path | None = None, *, report: layouts.Report = layouts.fail) -> Dataset:
    """Open a data set by name.

    Parameters
    ----------
    name
        One of `ENTRIES`; `tree:PATH` for class/picture or domain/class/picture, `grid:PATH` for
        corruption/severity/class/picture, `npy:PATH` for CIFAR-10-C's layout, each a folder, a zip or a tar below
        `root`; `hf:NAME` for a Hugging Face dataset. With `+c` after a clean one, its pictures under our own
        15 corruptions, computed on the fly; with `+extra`, under the four further ones, which tuning uses.
    root
        The folder with the data; WISE_ATTA_DATA if not given.
    report
        Called with each error found; by default it is raised.

    Examples
    --------
    >>> open_dataset("digits+c").domains[:2]
    ('gaussian_noise', 'shot_noise')
    """
    clean, plus, suffix = name.rpartition("+")
    if plus and suffix in SUFFIXES:
        dataset = open_dataset(clean, root, report=report)
        if dataset.severities:
            raise errors.BadConfig(f"{clean} is corrupted already: leave out the +{suffix}")
        return replace(layouts.corrupted(dataset, SUFFIXES[suffix]), name=name)
    kind, colon, place = name.partition(":")
    if colon and kind == "hf":
        return layouts.read_hub(name)
    if colon and kind in ("tree", "grid", "npy"):
        archives = layouts.open_all([_existing(data_root(root) / place)])
        if kind == "npy":
            return _ordered(layouts.read_npy(name, archives[0]), CORRUPTIONS)
        if kind == "grid":
            return _ordered(layouts.read_grid(name, archives, report=report), CORRUPTIONS)
        return layouts.read_tree(place, archives, report=report)
    entry = lookup(name)
    dataset = _read(entry, root, report)
    if entry.domains:
        missing = tuple(domain for domain in entry.domains if domain not in dataset.domains)
        dataset = replace(_ordered(dataset, entry.domains), missing=missing)
    return replace(
        dataset,
        name=entry.name,
        published=entry.counts(),
        resize=entry.resize,
        crop=entry.crop,
        views=entry.views,
    )


def _read(entry: Entry, root: str | Path | None, report: layouts.Report) -> Dataset:
    if entry.layout == "digits":
        return layouts.read_digits(entry.name == "digits-train")
    folder = data_root(root)
    paths = find(entry, folder)
    for item in entry.downloads:
        part = folder / entry.folder / (item.file + ".part")
        if part.exists():
            raise errors.DataError(f"{part} is half downloaded: `wise-atta data fetch {entry.name}` goes on from there")
    if not paths:
        raise errors.DataError(
            f"{entry.name} is not in {folder}: looked for {', '.join(' + '.join(place) for place in entry.places)}. "
            + (f"`wise-atta data fetch {entry.name}` gets it." if entry.downloads else f"It comes from {entry.home}.")
        )
    archives = layouts.open_all(paths)
    if entry.layout == "npy":
        names = _CIFAR10 if entry.classes == 10 else tuple(str(label) for label in range(entry.classes or 0))
        return layouts.read_npy(entry.name, archives[0], classes=names)
    if entry.layout == "grid":
        return layouts.read_grid(entry.name, archives, space=entry.space, report=report)
    return layouts.read_tree(entry.name, archives, space=entry.space, domains=entry.layout == "domains", report=report)


def _ordered(dataset: Dataset, order: Sequence[str]) -> Dataset:
    """Published domains first, in published order; further ones, such as the four extra corruptions, after them."""
    known = [domain for domain in order if domain in dataset.domains]
    return replace(dataset, domains=(*known, *(domain for domain in dataset.domains if domain not in known)))


def _existing(path: Path) -> Path:
    if not path.exists():
        raise errors.DataError(f"{path} does not exist")
    return path
