"""Does a run end with the same numbers whatever happens on the way, and never write over another one?"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from wise_atta import errors
from wise_atta.bench import run as runs
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.hold import Held, Shelf
from wise_atta.bench.record import read_json, read_parquet, unpack_bits, unpack_numbers
from wise_atta.data import open_stream
from wise_atta.data.streams import PictureStream

ONE = Experiment(
    data="digits+c",
    model="wise_atta/digits_cnn@random",
    method="wise",
    policy="paced",
    ratio=0.5,
    batch=8,
    stream={"limit": 32, "domains": ["fog", "snow", "contrast"]},
    delay=2,
    noise=0.2,
    threads=1,
)


class Stopped(Exception):
    pass


def stop_at(batch: int) -> runs.Progress:
    def progress(number: int, length: int | None, error: float, spent: int) -> None:
        if number == batch:
            raise Stopped

    return progress


def results(card: dict[str, Any]) -> dict[str, Any]:
    """Results without how long they took."""
    kept = copy.deepcopy(card["results"])
    for name in ("seconds", "resumed", "peak_memory"):
        del kept[name]
    return kept


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, runs.run(ONE, folder)


@pytest.mark.parametrize("method", ["wise", "authors", "source"])
@pytest.mark.parametrize("batch", [3, 4, 9])
def test_an_interrupted_run_ends_with_the_same_numbers(tmp_path: Path, method: str, batch: int) -> None:
    one = ONE
    if method == "authors":
        one = Experiment.parse({**ONE.model_dump(), "options": {"preset": "authors"}, "delay": 0})
    elif method == "source":
        one = Experiment.parse({**ONE.model_dump(), "method": "source", "policy": None, "ratio": None})
    expected = runs.run(one, tmp_path / "whole")
    with pytest.raises(Stopped):
        runs.run(one, tmp_path / "stopped", checkpoint=4, progress=stop_at(batch))
    card = runs.run(one, tmp_path / "stopped", checkpoint=4)
    assert card["results"]["resumed"] == (batch > 4)
    assert results(card) == results(expected)
    for name in ("steps", "queries", "pictures"):
        rows, wanted = (read_parquet(tmp_path / folder / f"{name}.parquet") for folder in ("stopped", "whole"))
        for row in (*rows, *wanted):
            row.pop("ms", None)
        assert rows == wanted


def test_the_card_holds_what_the_rows_say(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, card = whole
    steps, queries, pictures = (read_parquet(folder / f"{name}.parquet") for name in ("steps", "queries", "pictures"))
    found = card["results"]
    assert len(steps) == found["batches"] == 12
    assert 100 * sum(row["wrong"] for row in steps) / 96 == pytest.approx(found["error"])
    assert sum(row["asked"] for row in steps) == len(queries) == found["labels_spent"] <= found["labels_allowed"] == 6
    assert all(row["spent"] <= row["batch"] * 0.5 for row in steps)
    assert sum(row["forwards"] for row in steps) == found["forwards"]
    assert sum(row["backwards"] for row in steps) == found["backwards"]
    assert {row["delay"] for row in steps} == {None, 2.0}, "answers came two batches late, or none came"
    assert all((row["delay"] is not None) == (row["learned"] > 0) for row in steps)
    assert [row["loss"] for row in steps] == [row["loss_sup"] for row in steps], "this network is never certain"
    assert all((row["loss"] is not None) == (row["learned"] > 0) for row in steps)
    assert all((row["drift"] is not None) == (row["asked"] > 0) and row["entropy"] > 0 for row in steps)
    never = [row for row in pictures if not row["asked"]]
    assert 100 * sum(row["wrong"] for row in never) / sum(row["seen"] for row in never) == pytest.approx(
        found["error_never_asked"]
    )
    assert read_json(folder / "card.json")["results"] == found


def test_the_card_keeps_the_first_batch_s_logits_through_an_interruption(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    built = runs.build(ONE)
    logits = built.adapter.predict(next(iter(built.stream))).logits
    found = whole[1]["first_batch"]
    assert found["shape"] == [8, 10]
    assert torch.allclose(torch.tensor(found["logits"]), logits, atol=1e-5)
    with pytest.raises(Stopped):
        runs.run(ONE, tmp_path, checkpoint=4, progress=stop_at(6))
    assert runs.run(ONE, tmp_path, checkpoint=4)["first_batch"] == found


def test_a_card_runs_again_to_the_same_numbers(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, card = whole
    assert results(runs.run(Experiment.read(folder), tmp_path / "again")) == results(card)


def test_a_stream_held_in_memory_gives_the_same_numbers(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shelf = Shelf(1)
    for name in ("first", "second"):
        assert results(runs.run(ONE, tmp_path / name, shelf=shelf)) == results(whole[1])


def test_a_stream_held_in_memory_gives_the_same_bits_in_the_same_layout() -> None:
    stream, _ = open_stream(ONE.spec())
    assert isinstance(stream, PictureStream)
    for read, held in zip(stream, Held(stream), strict=True):
        assert isinstance(read.inputs, torch.Tensor) and isinstance(held.inputs, torch.Tensor)
        assert torch.equal(read.inputs, held.inputs)
        assert read.inputs.stride() == held.inputs.stride(), "kernels, and so last bits, are chosen by strides"
        assert (read.ids, read.meta) == (held.ids, held.meta)


def test_a_finished_run_is_not_repeated(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, card = whole
    assert runs.run(ONE, folder, progress=stop_at(1))["results"] == card["results"]


def test_again_repeats_a_finished_run(tmp_path: Path) -> None:
    runs.run(ONE, tmp_path)
    with pytest.raises(Stopped):
        runs.run(ONE, tmp_path, progress=stop_at(1), again=True)
    assert not (tmp_path / "card.json").exists(), "the card of the run before must not stand for this one"


def test_a_folder_with_another_experiment_is_refused_and_left_alone(tmp_path: Path) -> None:
    other = Experiment.parse({**ONE.model_dump(), "seed": 1})
    runs.run(ONE, tmp_path / "finished")
    before = read_json(tmp_path / "finished" / "card.json")
    with pytest.raises(errors.DataError, match="finished run of another experiment"):
        runs.run(other, tmp_path / "finished")
    assert read_json(tmp_path / "finished" / "card.json") == before
    with pytest.raises(Stopped):
        runs.run(ONE, tmp_path / "unfinished", checkpoint=2, progress=stop_at(5))
    with pytest.raises(errors.DataError, match="unfinished run of another experiment"):
        runs.run(other, tmp_path / "unfinished")
    assert runs.run(ONE, tmp_path / "unfinished", checkpoint=2)["results"]["resumed"]


def test_an_experiment_that_cannot_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(errors.BadConfig, match="ratio"):
        runs.run(Experiment.parse({**ONE.model_dump(), "method": "tent", "policy": None}), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_two_processes_never_write_to_one_folder(tmp_path: Path) -> None:
    with runs.claimed(tmp_path), pytest.raises(errors.DataError, match="another process"):
        runs.run(ONE, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.DataError, match="file"):
        runs.run(ONE, tmp_path / "file" / "run")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(errors.BadConfig, match="nosuch"):
        runs.pick_device("nosuch")


@pytest.mark.heavy
def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    long = Experiment.parse({**ONE.model_dump(), "batch": 4, "stream": {"limit": 320, "domains": ["fog", "snow"]}})
    expected = runs.run(long, tmp_path / "whole")
    (tmp_path / "one.json").write_text(long.model_dump_json())
    command = [sys.executable, "-m", "wise_atta.cli", "run", "one.json", "--out", "killed", "--quiet"]
    kills = 0
    while not (tmp_path / "killed" / "card.json").exists() and kills < 3:
        # Its own process group, so that the kill reaches whatever it started.
        child = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
        seen = _size(tmp_path / "killed" / "checkpoint.pt")
        while child.poll() is None and _size(tmp_path / "killed" / "checkpoint.pt") == seen:
            time.sleep(0.005)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            kills += 1
        child.wait()
    assert kills >= 1, "the run was over before it could be killed"
    card = runs.run(long, tmp_path / "killed")
    assert card["results"]["resumed"]
    assert results(card) == results(expected)


def _size(path: Path) -> tuple[int, int]:
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else (0, 0)


def test_every_sample_s_hit_picture_and_question_can_be_read_back(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, card = whole
    steps, queries, pictures = (read_parquet(folder / f"{name}.parquet") for name in ("steps", "queries", "pictures"))
    wrong, seen, asked = ({row["picture"]: 0 for row in pictures} for _ in range(3))
    for row in steps:
        hits, picked = (unpack_bits(row[name], row["samples"]) for name in ("hits", "picked"))
        assert row["wrong"] == (~hits).sum() and row["asked"] == picked.sum()
        for hit, mark, place in zip(hits, picked, unpack_numbers(row["pictures"]), strict=True):
            name = pictures[place]["picture"]
            wrong[name], seen[name], asked[name] = wrong[name] + (not hit), seen[name] + 1, asked[name] + mark
    assert [(row["wrong"], row["seen"]) for row in pictures] == [(wrong[name], seen[name]) for name in wrong]
    assert {name for name, count in asked.items() if count} == {row["picture"] for row in pictures if row["asked"]}
    assert sum(asked.values()) == len(queries) == card["results"]["labels_spent"]
