"""The check of a data set: counted, hashed and decoded; each missing or broken file is named."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wise_atta import errors
from wise_atta.data import catalog, fetch
from wise_atta.data.datasets import Dataset, Files, Pictures, Place

# Called with how many pictures were looked at and how many there are.
Progress = Callable[[int, int], None]


@dataclass
class Findings:
    """What a check found. `manifest` has the size and hash of every picture, `sha256` sums it up."""

    name: str
    domains: dict[str, int] = field(default_factory=dict)
    classes: int = 0
    problems: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    manifest: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def pictures(self) -> int:
        return sum(self.domains.values())

    @property
    def sha256(self) -> str:
        text = "".join(f"{name} {size} {digest}\n" for name, (size, digest) in sorted(self.manifest.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """All but the manifest, as plain values."""
        return {
            "name": self.name,
            "pictures": self.pictures,
            "domains": self.domains,
            "classes": self.classes,
            "sha256": self.sha256,
            "problems": self.problems,
            "ignored": self.ignored,
        }


def check(
    name: str,
    root: str | Path | None = None,
    *,
    decode: bool = True,
    manifest: Path | None = None,
    progress: Progress | None = None,
) -> Findings:
    """Look at every picture of a data set.

    Parameters
    ----------
    name
        See `open_dataset`; of `NAME+c` it is the clean pictures that are checked.
    decode
        Whether pictures are decoded as well as hashed.
    manifest
        A file to compare with: what is missing, new or changed since it was written is a problem. Written if it does
        not exist and nothing is wrong.

    Examples
    --------
    >>> findings = check("digits")
    >>> findings.pictures, findings.problems
    (896, [])
    """
    clean, _, suffix = name.rpartition("+")
    name = clean if suffix in catalog.SUFFIXES else name
    findings = Findings(name)
    try:
        dataset = catalog.open_dataset(name, root, report=lambda error: findings.problems.append(str(error)))
        places = list(_places(dataset, findings))
    except errors.DataError as error:
        findings.problems.append(str(error))
        return findings
    _archives(name, root, findings)
    _count(dataset, places, findings)
    _compare_places(dataset, places, findings)
    total = sum(len(place.pictures) for place in places)
    done = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for place in places:
            look = partial(_look, place.pictures, decode)
            results = pool.map(look, range(len(place.pictures)))
            for index, (facts, problem) in enumerate(results):
                if facts is not None:
                    findings.manifest[f"{place.name}/{place.pictures.names[index]}"] = facts
                if problem is not None:
                    findings.problems.append(problem)
                done += 1
                if progress is not None:
                    progress(done, total)
    if manifest is not None:
        _compare_manifest(findings, manifest)
    return findings


def _places(dataset: Dataset, findings: Findings) -> Iterator[Place]:
    for domain in dataset.domains:
        for severity in dataset.severities or (None,):
            try:
                yield dataset.place(domain, severity)
            except errors.DataError as error:
                findings.problems.append(str(error))


def _look(pictures: Pictures, decode: bool, index: int) -> tuple[tuple[int, str] | None, str | None]:
    """Size and hash of one picture, and what is wrong with it."""
    facts = None
    try:
        if isinstance(pictures, Files):
            data = pictures.read(index)
            facts = len(data), hashlib.sha256(data).hexdigest()
        if decode or facts is None:
            pixels = np.ascontiguousarray(pictures.get(index))
            facts = facts or (pixels.nbytes, hashlib.sha256(pixels.data).hexdigest())
    except errors.DataError as error:
        return facts, str(error)
    return facts, None


def _archives(name: str, root: str | Path | None, findings: Findings) -> None:
    """Archives that were fetched must still have the bytes that came."""
    if name not in catalog.ENTRIES or not catalog.ENTRIES[name].places:
        return
    folder = catalog.data_root(root)
    entry = catalog.ENTRIES[name]
    record = fetch.read_record(folder)
    for item in entry.downloads:
        path = folder / entry.folder / item.file
        if path.exists():
            try:
                fetch.verify(path, item, record.get(path.relative_to(folder).as_posix()))
            except errors.DataError as error:
                findings.problems.append(str(error))


def _count(dataset: Dataset, places: list[Place], findings: Findings) -> None:
    findings.domains = {place.name: len(place.pictures) for place in places}
    findings.ignored = list(dataset.ignored)
    findings.classes = len(np.unique(np.concatenate([np.empty(0, int), *(place.pictures.labels for place in places)])))
    findings.problems += [f"{dataset.name}: the domain {domain!r} is missing" for domain in dataset.missing]
    for place in places:
        published = (dataset.published or {}).get(place.domain)
        if published is not None and len(place.pictures) != published:
            problem = f"{dataset.name}, {place.name}: {len(place.pictures):,} pictures, {published:,} were published"
            findings.problems.append(problem)
    entry = catalog.ENTRIES.get(dataset.name)
    if entry is not None and entry.classes is not None and findings.classes != entry.classes:
        findings.problems.append(f"{dataset.name}: {findings.classes} classes, {entry.classes} were published")


def _compare_places(dataset: Dataset, places: list[Place], findings: Findings) -> None:
    """Under every corruption and severity the same pictures must be there."""
    if not dataset.severities or not places:
        return
    everything = {name: place for place in places for name in place.pictures.names}
    for place in places:
        for name in sorted(everything.keys() - set(place.pictures.names)):
            problem = f"{dataset.name}: {place.name}/{name} is missing; {everything[name].name} has it"
            findings.problems.append(problem)


def _compare_manifest(findings: Findings, path: Path) -> None:
    if not path.exists():
        if not findings.problems:
            path.write_text(json.dumps(findings.manifest, indent=0, sort_keys=True) + "\n")
        return
    try:
        before = {name: (int(size), str(digest)) for name, (size, digest) in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise errors.DataError(f"{path} is not a manifest ({error}): remove it to have it written anew") from error
    for name in sorted(before.keys() | findings.manifest.keys()):
        if before.get(name) != findings.manifest.get(name):
            change = "missing" if name not in findings.manifest else "new" if name not in before else "changed"
            findings.problems.append(f"{findings.name}: {name} is {change} since {path} was written")
