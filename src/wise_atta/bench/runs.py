"""Finished runs: folders, cards and bundles of them, read into one shape.

A bundle is one zip file with the cards and rows of many runs. What runs over one stream have in common (the order of
its pictures) is in it once, and numbers of steps have 32 bits, so that hundreds of runs fit into a few megabytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
from numpy.typing import NDArray

from wise_atta import errors
from wise_atta.bench.experiment import below, read_cards, whole
from wise_atta.bench.record import read_json, read_parquet, replace_file, unpack_bits, unpack_numbers

BUNDLE_VERSION = 1
_INSIDE = ("bundle.json", "steps.parquet", "queries.parquet", "streams.parquet")
# Can be computed from other columns, or is kept once for all runs over a stream.
_LEFT_OUT = ("error", "pictures")
# What zip archives, their compression and JSON say of bytes that make no sense; of a part that is not there, KeyError,
# and of a compression or an encryption that is not known, NotImplementedError, which is a RuntimeError.
_BROKEN = (OSError, EOFError, KeyError, RuntimeError, ValueError, zipfile.BadZipFile, lzma.LZMAError, zlib.error)
_OLD = "it was recorded by a release that did not keep {lacks}; run it again with --again"


class _Head(pydantic.BaseModel):
    """What a bundle says beside its tables. Of each run, more is looked at when it is read."""

    model_config = pydantic.ConfigDict(strict=True)

    runs: list[dict[str, Any]]
    pictures: list[list[str]]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Parameters
    ----------
    name
        Of its folder.
    where
        What it was read from: its folder, or a bundle.
    card
        The run card.
    steps, queries
        Rows by batch, and by question.
    names
        The pictures of the stream, in order of first appearance: what the numbers in `pictures` stand for.
    """

    name: str
    where: Path
    card: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    queries: Sequence[Mapping[str, Any]]
    names: tuple[str, ...]

    @property
    def experiment(self) -> Mapping[str, Any]:
        experiment: Mapping[str, Any] = self.card["experiment"]
        return experiment

    @property
    def results(self) -> Mapping[str, Any]:
        results: Mapping[str, Any] = self.card["results"]
        return results

    @property
    def provenance(self) -> Mapping[str, Any]:
        provenance: Mapping[str, Any] = self.card["provenance"]
        return provenance

    @property
    def domains(self) -> list[str]:
        """Of every batch."""
        return [str(row["domain"]) for row in self.steps]

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Samples of every batch."""
        return np.array([row["samples"] for row in self.steps], dtype=np.int64)

    @cached_property
    def hits(self) -> NDArray[np.bool_]:
        """Whether each sample of the stream was predicted right, before any update on its batch."""
        return self._bits("hits")

    @cached_property
    def picked(self) -> NDArray[np.bool_]:
        """Whether each sample of the stream was asked for."""
        return self._bits("picked")

    @cached_property
    def pictures(self) -> NDArray[np.int64]:
        """Which picture each sample of the stream shows, as a place in `names`."""
        self._needs("pictures")
        try:
            pictures = np.concatenate([unpack_numbers(str(row["pictures"])) for row in self.steps])
        except ValueError as error:
            raise errors.DataError(f"{self.where}: the pictures of {self.name} cannot be read: {error}") from error
        if len(pictures) != self.sizes.sum() or (len(pictures) and pictures.max() >= len(self.names)):
            raise errors.DataError(f"{self.where}: steps and pictures of {self.name} do not belong together")
        return pictures

    @cached_property
    def never_asked(self) -> NDArray[np.bool_]:
        """Whether each sample shows a picture that was asked for in no domain."""
        asked = np.zeros(len(self.names), dtype=bool)
        asked[self.pictures[self.picked]] = True
        return ~asked[self.pictures]

    def _needs(self, column: str) -> None:
        if not self.steps or column not in self.steps[0]:
            raise errors.DataError(f"{self.where}: {_OLD.format(lacks=f'{column!r} of every sample')}")

    def _bits(self, column: str) -> NDArray[np.bool_]:
        self._needs(column)
        try:
            return np.concatenate([unpack_bits(str(row[column]), row["samples"]) for row in self.steps])
        except ValueError as error:
            raise errors.DataError(f"{self.where}: {column!r} of {self.name} cannot be read: {error}") from error


def visits(domains: Sequence[str]) -> list[tuple[int, int, str]]:
    """Where each domain begins and ends, every time that it comes.

    >>> visits(["fog", "fog", "snow", "fog"])
    [(0, 2, 'fog'), (2, 3, 'snow'), (3, 4, 'fog')]
    """
    begins = [t for t in range(len(domains)) if t == 0 or domains[t] != domains[t - 1]]
    ends = [*begins[1:], len(domains)] if begins else []
    return [(start, end, domains[start]) for start, end in zip(begins, ends, strict=True)]


@dataclass(frozen=True)
class Found:
    """Runs that could be read, and for each that could not, why."""

    runs: tuple[Run, ...]
    problems: tuple[str, ...] = ()


def find(paths: Sequence[Path]) -> Found:
    """All finished runs in folders, cards and bundles. A run that cannot be read does not hide the others.

    Raises
    ------
    DataError
        If nothing could be read.
    """
    runs: dict[tuple[Path, int], Run] = {}
    problems: list[str] = []
    for path in paths:
        try:
            for number, run in _below(path, problems):
                runs.setdefault((run.where.resolve(), number), run)
        except errors.DataError as error:
            problems.append(str(error))
    if not runs:
        raise errors.DataError("; ".join(problems) if problems else "no run was given")
    return Found(tuple(runs.values()), tuple(problems))


def distinct(runs: Iterable[Run]) -> list[Run]:
    """Each run once: the same experiment with the same outcome, whether copied or repeated, is no second seed."""
    first: dict[tuple[str, ...], Run] = {}
    for run in runs:
        outcome = (str(row.get("hits", row["wrong"])) for row in run.steps)
        first.setdefault((str(run.card.get("digest")), *outcome), run)
    return list(first.values())


def read(path: Path) -> Run:
    """One run from its folder, its card, or a bundle; `BUNDLE#DIGEST` is the one of that digest.

    A card that stands alone gives a run without rows.
    """
    if (path / "card.json").is_file():
        return _folder(path / "card.json")
    if not path.is_dir() and ("#" in path.name or path.suffix == ".json"):
        cards = read_cards(path, results=True)
        if len(cards) == 1 and not (path.parent / "steps.parquet").exists() and ".zip" not in path.name:
            return Run(path.name, path, cards[0], (), (), ())
    here = find([path])
    if len(here.runs) != 1 or here.problems:
        held = f"{path} holds {len(here.runs)} runs where one is needed: name its folder, or a bundle's as FILE#DIGEST"
        raise errors.DataError("; ".join([held, *here.problems]))
    return here.runs[0]


def _below(path: Path, problems: list[str]) -> Iterable[tuple[int, Run]]:
    """The runs at a place, each with its number among those of its folder or bundle, where names may be the same."""
    name, _, wanted = path.name.partition("#")
    place = path if path.exists() else path.with_name(name)
    if place.is_dir():
        cards = below(place, "card.json")
        if not cards:
            raise errors.DataError(f"no card.json below {place}: was a run finished there?")
        for card in cards:
            try:
                yield 0, _folder(card)
            except errors.DataError as error:
                problems.append(str(error))
    elif not place.exists():
        raise errors.DataError(f"{place} does not exist")
    elif place.suffix == ".json":
        yield 0, _folder(place)
    else:
        wrong: list[str] = []
        matching = [(number, run) for number, run in _bundled(place, wrong) if run.card["digest"].startswith(wanted)]
        if not matching:
            lacks = f"{place} holds no run{f' of digest {wanted}' if wanted else ''}"
            raise errors.DataError("; ".join([lacks, *wrong]))
        # Where one is named, it does not matter what else is there.
        problems += [] if wanted else wrong
        yield from matching


def _folder(card: Path) -> Run:
    content = whole(read_json(card), str(card))
    folder = card.parent
    missing = [name for name in ("steps", "pictures") if not (folder / f"{name}.parquet").is_file()]
    if missing:
        raise errors.DataError(f"{card} has no {' and no '.join(f'{name}.parquet' for name in missing)} beside it")
    steps, queries, pictures = (
        read_parquet(path) if (path := folder / f"{name}.parquet").exists() else []
        for name in ("steps", "queries", "pictures")
    )
    _check_rows(content, steps, str(folder))
    return Run(folder.name, folder, content, steps, queries, tuple(row["picture"] for row in pictures))


def _check_rows(card: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse rows that are not those of the card, such as half a copy or those of another run."""
    try:
        error = 100 * sum(row["wrong"] for row in steps) / sum(row["samples"] for row in steps)
    except (LookupError, TypeError, ZeroDivisionError) as broken:
        raise errors.DataError(f"{where}: its steps cannot be read: {broken!r}") from broken
    results = card["results"]
    if len(steps) != results["batches"] or not math.isclose(error, results["error"], abs_tol=1e-6):
        raise errors.DataError(
            f"{where}: its steps are not those of its card, {len(steps)} batches with {error:.4f} % error there, "
            f"{results['batches']} with {results['error']:.4f} % here. Copy or run it again"
        )


# ---- bundles ---------------------------------------------------------------------------------------------------------


def bundle(paths: Sequence[Path], out: Path, *, queries: bool = True) -> Found:
    """Put finished runs into one small file that `find` reads, each once.

    Parameters
    ----------
    paths
        Folders of runs, or other bundles.
    out
        The file to write, such as `runs.zip`.
    queries
        Whether the questions go in as well; `value` and `compare` do without them.
    """
    if out.exists() and not _is_bundle(out):
        raise errors.DataError(f"{out} is there and no bundle, so it is not written over: choose another name")
    read = find(paths)
    bundled = Found(tuple(distinct(read.runs)), read.problems)
    streams: dict[str, int] = {}
    listed, steps, questions, orders, names = [], [], [], [], []
    for number, run in enumerate(bundled.runs):
        order = [str(row.get("pictures", "")) for row in run.steps]
        key = hashlib.sha256(json.dumps([order, run.names]).encode()).hexdigest()
        if key not in streams:
            streams[key] = len(streams)
            names.append(run.names)
            orders += [{"stream": streams[key], "pictures": text} for text in order]
        listed.append({"name": run.name, "card": run.card, "stream": streams[key]})
        steps += [{"run": number} | {k: v for k, v in row.items() if k not in _LEFT_OUT} for row in run.steps]
        questions += [{"run": number, **row} for row in run.queries] if queries else []
    head = {"bundle_version": BUNDLE_VERSION, "runs": listed, "pictures": names}
    _write_bundle(out, json.dumps(head).encode(), *(_parquet(rows) for rows in (steps, questions, orders)))
    return bundled


def change_bundle(path: Path, change: Callable[[Any], None]) -> None:
    """Let `change` alter the cards of a bundle, one by one; its rows stay as they are."""
    content, rest = _opened(path)
    for one in content["runs"]:
        change(one.get("card"))
    _write_bundle(path, json.dumps(content).encode(), *rest)


def _is_bundle(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return _INSIDE[0] in file.namelist()


def _write_bundle(path: Path, *parts: bytes) -> None:
    def write(part: Path) -> None:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_LZMA) as file:
            for name, content in zip(_INSIDE, parts, strict=True):
                file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_LZMA)

    replace_file(path, write)


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    columns = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    types = [pyarrow.float32() if field.type == pyarrow.float64() else field.type for field in table.schema]
    table = table.cast(pyarrow.schema(zip(table.column_names, types, strict=True)))
    file = io.BytesIO()
    parquet.write_table(table, file, compression="zstd")
    return file.getvalue()


def bundled_cards(path: Path) -> list[tuple[str, Any]]:
    """What a bundle holds as cards, each with words for where it stands; nothing in them is looked at."""
    return [(_place(path, one), one.get("card")) for one in _opened(path)[0]["runs"]]


def _place(path: Path, one: Mapping[str, Any]) -> str:
    return f"{path}: {one.get('name')}"


def _unreadable(path: Path, why: object) -> errors.DataError:
    return errors.DataError(f"{path} is neither a folder of runs nor a readable bundle: {why}")


def _opened(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    """The head of a bundle, and its tables as they are in the file."""
    try:
        with zipfile.ZipFile(path) as file:
            head, *rest = (file.read(name) for name in _INSIDE)
        content = json.loads(head)
    except _BROKEN as error:
        raise _unreadable(path, error) from error
    version = content.get("bundle_version", 0) if isinstance(content, dict) else None
    if isinstance(version, int) and version > BUNDLE_VERSION:
        raise errors.DataError(
            f"{path} is a bundle of version {version}, this release reads up to {BUNDLE_VERSION}: update wise-atta"
        )
    try:
        _Head.model_validate(content)
    except pydantic.ValidationError as error:
        raise _unreadable(path, f"{_INSIDE[0]} holds something else") from error
    return content, rest


def _bundled(path: Path, problems: list[str]) -> Iterator[tuple[int, Run]]:
    """The runs of a bundle with their numbers; `problems` takes those that cannot be read."""
    import pyarrow
    from pyarrow import parquet

    content, tables = _opened(path)
    try:
        steps, questions, orders = (parquet.read_table(io.BytesIO(part)).to_pylist() for part in tables)
        steps_of, queries_of, order_of = _by(steps, "run"), _by(questions, "run"), _by(orders, "stream")
    except (*_BROKEN, TypeError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error
    for number, one in enumerate(content["runs"]):
        where, stream = _place(path, one), one.get("stream")
        try:
            card = whole(one.get("card"), where)
            rows = [
                row | {"error": row["wrong"] / row["samples"], "pictures": there["pictures"]}
                for row, there in zip(steps_of.get(number, []), order_of.get(stream, []), strict=True)
            ]
            names = tuple(content["pictures"][stream])
            _check_rows(card, rows, where)
        except errors.DataError as error:
            problems.append(str(error))
        except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
            problems.append(f"{where}: its steps cannot be read: {error!r}")
        else:
            yield number, Run(str(one.get("name")), path, card, rows, queries_of.get(number, []), names)


def _by(rows: Sequence[dict[str, Any]], column: str) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.pop(column), []).append(row)
    return groups
