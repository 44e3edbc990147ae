"""The record of a run: rows in an append-only log, and from there in Parquet at checkpoints.

A folder of a run holds `card.json`, `steps.parquet`, `queries.parquet` and `pictures.parquet`, and while it runs the
logs `steps.jsonl` and `queries.jsonl` and the state `checkpoint.pt`. Files that readers look at are written under
another name and renamed, so that a kill at any moment leaves the old one or the new one, never half of one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wise_atta import errors


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file, in a folder that is made if need be, so that it is there whole or not at all."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    # torch says RuntimeError where a disk is full.
    except (OSError, RuntimeError) as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _unwritable(path: Path, error: Exception) -> errors.DataError:
    reason = str(error).partition("\n")[0]
    return errors.DataError(
        f"{path} could not be written: {reason}. Free space or choose another place; what was checkpointed is kept"
    )


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=True) + "\n")


def write_cards(path: Path, cards: Iterable[Mapping[str, Any]]) -> None:
    """Write many cards to one file, a line each."""
    lines = ",\n".join(json.dumps(card, ensure_ascii=False) for card in cards)
    write_text(path, f"[\n{lines}\n]\n")


def there(path: Path) -> bool:
    """Whether something is there and may be looked at; `Path.exists` raises where its folder may not be."""
    try:
        return path.exists()
    except OSError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; an error names it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise errors.DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise errors.DataError(f"{path} is not a JSON object")
    return content


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as Parquet, whole or not at all. Columns are those that any row has, in order of appearance."""
    import pyarrow
    from pyarrow import parquet

    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    replace_file(path, lambda part: parquet.write_table(table, part, compression="zstd"))


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Read rows back; a broken file is an error that names it."""
    import pyarrow
    from pyarrow import parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise errors.DataError(f"{path} is not a readable Parquet file: {error}. Copy it or run it again") from error
    return rows


def pack_bits(flags: Sequence[bool]) -> str:
    """One bit a sample, as text: a batch of 64 takes 16 letters.

    >>> pack_bits([True, False, True]), unpack_bits("a0", 3).tolist()
    ('a0', [True, False, True])
    """
    return np.packbits(np.asarray(flags, dtype=bool)).tobytes().hex()


def unpack_bits(text: str, count: int) -> NDArray[np.bool_]:
    """What `pack_bits` packed; empty text is all False. Text of another length than `count` needs is an error."""
    if not text:
        return np.zeros(count, dtype=bool)
    packed = np.frombuffer(bytes.fromhex(text), dtype=np.uint8)
    if len(packed) != -(-count // 8):
        raise ValueError(f"{len(packed)} bytes of bits for {count} samples")
    return np.unpackbits(packed, count=count).astype(bool)


def pack_numbers(numbers: Sequence[int]) -> str:
    """Small whole numbers as text.

    >>> unpack_numbers(pack_numbers([0, 70000])).tolist()
    [0, 70000]
    """
    return base64.b64encode(np.asarray(numbers, dtype="<u4").tobytes()).decode()


def unpack_numbers(text: str) -> NDArray[np.int64]:
    """What `pack_numbers` packed."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<u4").astype(np.int64)


def _broken(path: Path, why: object) -> errors.DataError:
    return errors.DataError(f"{path} is broken ({why}): the run cannot go on from it; --again starts anew")


class Log:
    """An append-only file of JSON rows that can be cut back to where a checkpoint was made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._file = path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.rows.append(dict(row))

    def sync(self) -> int:
        """Put everything on disk; the length in bytes, to cut back to."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return self._file.tell()

    def cut(self, length: int) -> None:
        """Drop what was written after a checkpoint, and read the rest again."""
        self._file.flush()
        if length > self.path.stat().st_size:
            raise _broken(self.path, "it is shorter than at the checkpoint")
        self._file.truncate(length)
        self._file.seek(length)
        try:
            self.rows = [json.loads(line) for line in self.path.read_bytes().splitlines()]
        except ValueError as error:
            raise _broken(self.path, error) from error

    def close(self) -> None:
        # What cannot be written any more is cut off when the run goes on.
        with contextlib.suppress(OSError):
            self._file.close()


class Folder:
    """A run on disk: its logs, its checkpoint, its card."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.steps = Log(path / "steps.jsonl")
            self.queries = Log(path / "queries.jsonl")
        except OSError as error:
            raise errors.DataError(f"results folder {path} is not writable: {error}") from error

    def restore(self) -> dict[str, Any] | None:
        """The last checkpoint, with the logs cut back to it; None, with empty logs, if there is none."""
        file = self.path / "checkpoint.pt"
        if not file.exists():
            self.steps.cut(0)
            self.queries.cut(0)
            return None
        try:
            state: dict[str, Any] = torch.load(file, weights_only=True)
            steps, queries = state["steps"], state["queries"]
        # Zip archives, pickles and torch itself each have errors of their own for bytes that make no sense.
        except Exception as error:
            raise _broken(file, str(error).partition("\n")[0]) from error
        self.steps.cut(steps)
        self.queries.cut(queries)
        return state

    def clear(self) -> None:
        """Forget whatever was here."""
        for name in ("card.json", "checkpoint.pt", "steps.parquet", "queries.parquet", "pictures.parquet"):
            _remove(self.path / name)
        self.steps.cut(0)
        self.queries.cut(0)

    def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Make this the moment to go on from, and show the rows so far."""
        whole = {**state, "steps": self.steps.sync(), "queries": self.queries.sync()}
        replace_file(self.path / "checkpoint.pt", lambda part: torch.save(whole, part))
        self.show()

    def show(self) -> None:
        """Write the rows so far as Parquet."""
        with contextlib.suppress(ImportError):
            write_parquet(self.path / "steps.parquet", self.steps.rows)
            write_parquet(self.path / "queries.parquet", self.queries.rows)

    def finish(self, card: Mapping[str, Any], pictures: Sequence[Mapping[str, Any]] = ()) -> None:
        """The run is over: the card is written last, since it says so."""
        self.steps.sync()
        self.queries.sync()
        self.show()
        with contextlib.suppress(ImportError):
            write_parquet(self.path / "pictures.parquet", pictures)
        write_json(self.path / "card.json", card)
        self.close()
        for name in ("checkpoint.pt", "steps.jsonl", "queries.jsonl"):
            if name == "checkpoint.pt" or (self.path / "steps.parquet").exists():
                (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        self.steps.close()
        self.queries.close()


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold a run's folder, so that two processes never write to it at once."""
    import fcntl

    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / ".lock").open("a+")
    except OSError as error:
        raise errors.DataError(f"results folder {path} is not writable: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise errors.DataError(
                f"{path} is being written by another process ({file.read() or 'unknown'}): wait for it to end"
            ) from error
        # Who it is helps others; a full disk is found out where it matters.
        with contextlib.suppress(OSError):
            file.truncate(0)
            # Past the buffer of the file, which would try again when it is closed.
            os.write(file.fileno(), f"{os.getpid()} on {platform.node()}".encode())
        yield


def forget(path: Path) -> None:
    """Take away a run's card and checkpoint, so that it is run from its beginning."""
    if path.exists():
        with claimed(path):
            for name in ("card.json", "checkpoint.pt"):
                _remove(path / name)
