"""Is a full disk or a broken file told apart from everything else, and does it harm nothing but its own run?"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from wise_atta import errors
from wise_atta.bench import run as runs
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.record import Folder, Log, read_parquet, write_json, write_parquet
from wise_atta.bench.runs import find
from wise_atta.bench.sweep import Places, sweep

SHORT = Experiment(
    data="digits+c",
    model="wise_atta/digits_cnn@random",
    method="bn",
    batch=8,
    stream={"limit": 16, "domains": ["fog"]},
    threads=1,
)
LONG = Experiment.parse({**SHORT.model_dump(), "batch": 2, "stream": {"limit": 240, "domains": ["fog"]}})


@contextmanager
def full_beyond(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def results(card: dict[str, Any]) -> dict[str, Any]:
    kept = copy.deepcopy(card["results"])
    for name in ("seconds", "resumed", "peak_memory"):
        del kept[name]
    return kept


def test_a_full_disk_stops_one_run_of_a_sweep_which_goes_on_when_there_is_space(tmp_path: Path) -> None:
    places, seen = Places(tmp_path), dict[str, Any]()
    with full_beyond(40_000), pytest.raises(errors.DataError, match=r"could not be written.*Free space"):
        sweep([LONG, SHORT], places, checkpoint=10, report=lambda one, result: seen.update({one.digest: result}))
    assert isinstance(seen[LONG.digest], errors.DataError)
    assert seen[SHORT.digest]["results"]["batches"] == 2
    assert not list(tmp_path.rglob("*.part-*")), "nothing half written is left"
    card, _ = sweep([LONG, SHORT], places)
    assert card["results"]["resumed"], "it goes on from its last checkpoint"
    assert results(card) == results(runs.run(LONG, tmp_path / "elsewhere"))


def test_a_disk_that_is_full_from_the_start_leaves_a_clear_error(tmp_path: Path) -> None:
    with full_beyond(10), pytest.raises(errors.DataError, match="could not be written"):
        runs.run(SHORT, tmp_path / "run")
    assert runs.run(SHORT, tmp_path / "run")["results"]["batches"] == 2


@pytest.mark.parametrize("what", ["file in place of the folder", "folder in place of a file"])
def test_a_folder_that_cannot_be_written_stops_one_run_of_a_sweep(tmp_path: Path, what: str) -> None:
    places, seen = Places(tmp_path), dict[str, Any]()
    if what.startswith("file"):
        places.of(LONG).write_text("in the way")
    else:
        (places.of(LONG) / "steps.jsonl").mkdir(parents=True)
    with pytest.raises(errors.DataError, match="not writable"):
        sweep([LONG, SHORT], places, report=lambda one, result: seen.update({one.digest: result}))
    assert seen[SHORT.digest]["results"]["batches"] == 2


@pytest.mark.parametrize("content", [b"", b"PAR1 and then nonsense", b"\x00" * 100])
def test_a_corrupt_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "steps.parquet").write_bytes(content)
    with pytest.raises(errors.DataError, match=r"steps\.parquet is not a readable Parquet file"):
        read_parquet(tmp_path / "steps.parquet")


def test_a_parquet_cut_short_is_named(tmp_path: Path) -> None:
    file = tmp_path / "steps.parquet"
    write_parquet(file, [{"batch": number, "text": "x" * number} for number in range(100)])
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(errors.DataError, match=r"steps\.parquet"):
        read_parquet(file)


class Stopped(Exception):
    pass


def stopped(folder: Path) -> None:
    """A run that was interrupted after its second checkpoint."""

    def progress(number: int, *_: object) -> None:
        if number == 22:
            raise Stopped

    with pytest.raises(Stopped):
        runs.run(LONG, folder, checkpoint=10, progress=progress)


@pytest.mark.parametrize("name", ["checkpoint.pt", "steps.jsonl"])
@pytest.mark.parametrize("content", [b"", b"nonsense\n" * 2000])
def test_a_run_does_not_go_on_from_a_broken_file_but_starts_anew_when_told_to(
    tmp_path: Path, name: str, content: bytes
) -> None:
    stopped(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(errors.DataError, match=f"{name} is broken.*--again"):
        runs.run(LONG, tmp_path)
    card = runs.run(LONG, tmp_path, again=True)
    assert not card["results"]["resumed"] and card["results"]["batches"] == 120


@pytest.mark.parametrize("name", ["card.json", "checkpoint.pt", "pictures.parquet"])
def test_what_cannot_be_taken_away_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(errors.DataError, match=f"{name} could not be written"):
        runs.run(SHORT, tmp_path, again=True)


def test_a_broken_card_is_named_and_run_again_when_told_to(tmp_path: Path) -> None:
    runs.run(SHORT, tmp_path)
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(errors.DataError, match=r"card\.json.*--again"):
        runs.run(SHORT, tmp_path)
    assert runs.run(SHORT, tmp_path, again=True)["results"]["batches"] == 2


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("digest", 5),
        ("experiment.options", None),
        ("results.error", math.nan),
        ("results.by_domain", {"fog": "high"}),
        ("results.labels_spent", "many"),
        ("results.questions", {}),
        ("provenance.stream.spec", []),
        ("provenance.versions", "2.0"),
        ("first_batch", 1),
        ("spread", None),
        ("spread", {"low": 0.0, "high": math.inf}),
    ],
)
def test_a_card_that_was_changed_by_hand_is_named_with_the_field(tmp_path: Path, part: str, value: Any) -> None:
    runs.run(SHORT, tmp_path / "bad")
    runs.run(Experiment.parse({**SHORT.model_dump(), "method": "source"}), tmp_path / "good")
    card = json.loads((tmp_path / "bad" / "card.json").read_text())
    *inside, last = part.split(".")
    holder = card
    for name in inside:
        holder = holder[name]
    holder[last] = value
    write_json(tmp_path / "bad" / "card.json", card)
    message = f"{tmp_path / 'bad' / 'card.json'} is not a run card: '{part}"
    with pytest.raises(errors.DataError, match=f"{re.escape(message)}.*--again runs it once more"):
        runs.run(SHORT, tmp_path / "bad")
    collection = find([tmp_path])
    assert [run.name for run in collection.runs] == ["good"] and collection.problems[0].startswith(message)


def test_the_log_is_appended_to_and_becomes_parquet_at_checkpoints(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.steps.append({"batch": 1})
    folder.checkpoint({})
    folder.steps.append({"batch": 2})
    folder.steps.sync()
    assert read_parquet(tmp_path / "steps.parquet") == [{"batch": 1}]
    assert [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [
        {"batch": 1},
        {"batch": 2},
    ]
    folder.close()
    again = Folder(tmp_path)
    assert again.restore() is not None and again.steps.rows == [{"batch": 1}], "cut back to the checkpoint"
    again.close()


def test_what_cannot_be_written_is_not_counted(tmp_path: Path) -> None:
    log = Log(tmp_path / "steps.jsonl")
    log.append({"batch": 1})
    log.sync()
    with full_beyond(20), pytest.raises(errors.DataError, match=r"steps\.jsonl could not be written"):
        for number in range(2, 9000):
            log.append({"batch": number})
    log.close()


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path) -> None:
    write_json(tmp_path / "card.json", {"a": 1})
    with full_beyond(100), pytest.raises(errors.DataError, match=r"card\.json could not be written"):
        write_json(tmp_path / "card.json", {"a": "x" * 1000})
    assert json.loads((tmp_path / "card.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["card.json"]


def test_a_folder_that_may_not_be_looked_into_is_named_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("closed", "open"):
        runs.run(SHORT, tmp_path / name)
    there, look = tmp_path / "closed", os.scandir

    def scandir(place: str) -> Any:
        if Path(place) == there:
            raise PermissionError(13, "Permission denied", place)
        return look(place)

    # Tests may be run by one who may look everywhere.
    (there / "card.json").unlink()
    monkeypatch.setattr(os, "scandir", scandir)
    collection = find([tmp_path])
    assert [run.name for run in collection.runs] == ["open"]
    assert collection.problems[0].startswith(f"{there / 'card.json'} cannot be read")


def test_a_place_that_cannot_be_looked_at_fails_run_by_run(tmp_path: Path) -> None:
    failed: dict[str, errors.WiseAttaError] = {}
    assert sweep([SHORT, LONG], Places(tmp_path / ("x" * 300)), failed=failed) == []
    assert len(failed) == 2 and all("is not writable" in str(error) for error in failed.values())
