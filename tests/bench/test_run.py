"""Does a run end with the same numbers whatever happens on the way, and never write over another one?"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.victim import killed_at
from PIL import Image

from wise_atta import errors, rng, who
from wise_atta.bench import run as runs
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.record import Folder, read_json, read_parquet, unpack_bits, unpack_numbers
from wise_atta.bench.stream_cache import CachedStream, StreamCache
from wise_atta.bench.table import rows
from wise_atta.bench.verify import verify
from wise_atta.data import models, open_stream, train
from wise_atta.data.streams import PictureStream, Truth

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


def same_rows(folder: Path, other: Path) -> None:
    """Every row that two runs have written, without how long it took."""
    for name in ("steps", "queries", "pictures"):
        rows, wanted = (read_parquet(place / f"{name}.parquet") for place in (folder, other))
        for row in (*rows, *wanted):
            row.pop("ms", None)
        assert rows == wanted


def picture_tree(root: Path, classes: Sequence[str], count: int = 4, first: int = 0) -> Path:
    """`root/set/class/picture`, small pictures of noise, whose pixels but not their names depend on `first`."""
    for number, name in enumerate(classes):
        (root / "set" / name).mkdir(parents=True)
        for place in range(count):
            pixels = rng.numpy(first + count * number + place, "picture").integers(0, 256, (32, 32, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(root / "set" / name / f"{place}.png")
    return root


def named(*classes: str, seed: int = 0) -> models.SourceModel:
    """A random network whose logits stand for these classes."""
    model = models.load(f"wise_atta/resnet18_w32@random:{seed}")
    module = models.with_classes(model.module, len(classes))
    return dataclasses.replace(model, module=module, classes=classes, weights_hash="")


PICTURES = Experiment(data="tree:set", model="named", method="source", batch=4, threads=1)


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
        asked = {"policy": None, "ratio": None, "delay": 0, "noise": 0.0}
        one = Experiment.parse({**ONE.model_dump(), "method": "source", **asked})
    expected = runs.run(one, tmp_path / "whole")
    with pytest.raises(Stopped):
        runs.run(one, tmp_path / "stopped", checkpoint=4, progress=stop_at(batch))
    card = runs.run(one, tmp_path / "stopped", checkpoint=4)
    assert card["results"]["resumed"] == (batch > 4)
    assert results(card) == results(expected)
    assert card["provenance"]["stream"] == expected["provenance"]["stream"], "also the hash of all pixels"
    same_rows(tmp_path / "stopped", tmp_path / "whole")


def test_the_card_holds_what_the_rows_say(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, card = whole
    steps, queries, pictures = (read_parquet(folder / f"{name}.parquet") for name in ("steps", "queries", "pictures"))
    on_card = card["results"]
    assert len(steps) == on_card["batches"] == 12
    assert 100 * sum(row["wrong"] for row in steps) / 96 == pytest.approx(on_card["error"])
    assert (
        sum(row["asked"] for row in steps) == len(queries) == on_card["labels_spent"] <= on_card["labels_allowed"] == 6
    )
    assert all(row["spent"] <= row["batch"] * 0.5 for row in steps)
    assert sum(row["forwards"] for row in steps) == on_card["forwards"]
    assert sum(row["backwards"] for row in steps) == on_card["backwards"]
    assert {row["delay"] for row in steps} == {None, 2.0}, "answers came two batches late, or none came"
    assert all((row["delay"] is not None) == (row["learned"] > 0) for row in steps)
    assert [row["loss"] for row in steps] == [row["loss_sup"] for row in steps], "this network is never certain"
    assert all((row["loss"] is not None) == (row["learned"] > 0) for row in steps)
    assert all((row["drift"] is not None) == (row["asked"] > 0) and row["entropy"] > 0 for row in steps)
    never = [row for row in pictures if not row["asked"]]
    assert 100 * sum(row["wrong"] for row in never) / sum(row["seen"] for row in never) == pytest.approx(
        on_card["error_never_asked"]
    )
    assert read_json(folder / "card.json")["results"] == on_card


def test_where_every_picture_was_asked_for_the_card_has_no_number_for_others(tmp_path: Path) -> None:
    fields = {"policy": "always", "ratio": None, "labels": 8, "delay": 0, "stream": {"limit": 8, "domains": ["fog"]}}
    card = runs.run(Experiment.parse({**ONE.model_dump(), **fields}), tmp_path)
    assert card["results"]["samples_never_asked"] == 0 and card["results"]["error_never_asked"] is None
    json.dumps(card, allow_nan=False)
    assert rows([card])[0].text("error_never_asked") == ""


def test_the_card_keeps_the_first_batch_s_logits_through_an_interruption(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    built = runs.build(ONE)
    logits = built.adapter.predict(next(iter(built.stream))).logits
    first = whole[1]["first_batch"]
    assert first["shape"] == [8, 10]
    assert torch.allclose(torch.tensor(first["logits"]), logits, atol=1e-5)
    with pytest.raises(Stopped):
        runs.run(ONE, tmp_path, checkpoint=4, progress=stop_at(6))
    assert runs.run(ONE, tmp_path, checkpoint=4)["first_batch"] == first


def test_a_run_that_goes_on_with_other_threads_promises_no_digits(tmp_path: Path) -> None:
    free, before = Experiment.parse({**ONE.model_dump(), "threads": None}), torch.get_num_threads()
    try:
        for threads, stop in ((1, 6), (2, 10), (2, 99)):
            torch.set_num_threads(threads)
            with pytest.raises(Stopped) if stop < 12 else contextlib.nullcontext():
                card = runs.run(free, tmp_path, checkpoint=2, progress=stop_at(stop))
    finally:
        torch.set_num_threads(before)
    assert card["provenance"]["excepted"] == ["a move to another place while it ran"]
    verdict = verify(card)
    assert not verdict.exact and "excepts a move" in str(verdict)


@pytest.mark.parametrize("early", [False, True])
def test_a_run_does_not_go_on_with_other_weights(tmp_path: Path, early: bool) -> None:
    with pytest.raises(Stopped):
        runs.run(ONE, tmp_path, checkpoint=2, progress=stop_at(6))
    file = tmp_path / "checkpoint.pt"
    state = torch.load(file, weights_only=True)
    state["inputs"]["model"]["weights_hash"] = "0" * 64
    if early:
        state["weights"] = state["inputs"]["model"]["weights_hash"]
        del state["inputs"], state["digests"]
    torch.save(state, file)
    with pytest.raises(errors.DataError, match="begun with others: the weights here are others"):
        runs.run(ONE, tmp_path)


def test_an_early_checkpoint_is_still_gone_on_from(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        runs.run(ONE, tmp_path, checkpoint=2, progress=stop_at(6))
    file = tmp_path / "checkpoint.pt"
    state = torch.load(file, weights_only=True)
    del state["inputs"], state["digests"]
    torch.save(state, file)
    card = runs.run(ONE, tmp_path)
    assert results(card) == results(whole[1]) and card["provenance"]["stream"]["pixels"] is None


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("classes", "words"), [(["ant", "cow"], "pictures"), (["ant", "bee"], "pixels")])
def test_a_run_does_not_go_on_with_other_pictures(tmp_path: Path, classes: list[str], words: str, held: bool) -> None:
    one = PICTURES.model_copy(update={"model": "wise_atta/resnet18_w32@random", "batch": 2})
    with pytest.raises(Stopped):
        data = picture_tree(tmp_path / "then", ["ant", "bee"])
        runs.run(one, tmp_path / "run", data=data, checkpoint=2, progress=stop_at(3))
    data, cache = picture_tree(tmp_path / "now", classes, first=8), StreamCache() if held else None
    with pytest.raises(errors.DataError, match=f"begun with others: the {words} here are others"):
        runs.run(one, tmp_path / "run", data=data, cache=cache)


def test_a_run_goes_on_with_its_own_teacher_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = {"method": "cema", "policy": None, "ratio": None, "delay": 0, "noise": 0.0, "teacher": "mine"}
    one, load = Experiment.parse({**ONE.model_dump(), **teacher}), runs.load

    def answer_with(seed: int) -> None:
        names = {ONE.model: ONE.model, "mine": f"wise_atta/digits_cnn@random:{seed}"}
        monkeypatch.setattr(runs, "load", lambda name, *_: load(names[name]))

    answer_with(1)
    with pytest.raises(Stopped):
        runs.run(one, tmp_path, checkpoint=2, progress=stop_at(3))
    answer_with(2)
    with pytest.raises(errors.DataError, match="the teacher's weights here are others"):
        runs.run(one, tmp_path)


@pytest.mark.parametrize(("share", "made"), [(0.0, [2]), (math.inf, [2, 4, 6, 8])])
def test_checkpoints_are_made_as_often_as_their_share_of_the_time_allows(
    tmp_path: Path, share: float, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    monkeypatch.setattr(runs, "_CHECKPOINT", 2)
    monkeypatch.setattr(runs, "CHECKPOINT_SHARE", share)
    monkeypatch.setattr(Folder, "checkpoint", lambda self, state: batches.append(state["batch"]))
    card = runs.run(ONE, tmp_path)
    assert batches[: len(made)] == made and len(batches) == (1 if share == 0 else card["results"]["batches"] // 2)


def test_a_card_runs_again_to_the_same_numbers(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, card = whole
    assert results(runs.run(Experiment.read(folder), tmp_path / "again")) == results(card)


def test_a_stream_held_in_memory_gives_the_same_numbers(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    cache = StreamCache(1)
    for name in ("first", "second"):
        assert results(runs.run(ONE, tmp_path / name, cache=cache)) == results(whole[1])


def test_a_stream_held_in_memory_gives_the_same_bits_in_the_same_layout() -> None:
    stream, _ = open_stream(ONE.spec())
    assert isinstance(stream, PictureStream)
    for read, held in zip(stream, CachedStream(stream), strict=True):
        assert isinstance(read.inputs, torch.Tensor) and isinstance(held.inputs, torch.Tensor)
        assert torch.equal(read.inputs, held.inputs)
        assert read.inputs.stride() == held.inputs.stride(), "kernels, and so last bits, are chosen by strides"
        assert (read.ids, read.meta) == (held.ids, held.meta)


def test_streams_of_two_data_folders_are_held_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, spec = StreamCache(), PICTURES.spec()
    roots = [picture_tree(tmp_path / str(first), ["ant", "bee"], first=first) for first in (0, 8)]

    def held(root: Path | None) -> str:
        return str(cache.open(spec, root, device=torch.device("cpu"), workers=0)[0].describe()["pixels"])

    first, second = (held(root) for root in roots)
    assert first != second and first == held(tmp_path / "8" / ".." / "0")
    monkeypatch.setenv("WISE_ATTA_DATA", str(roots[1]))
    assert held(None) == second


def test_a_finished_run_is_not_repeated(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, card = whole
    assert runs.run(ONE, folder, progress=stop_at(1))["results"] == card["results"]


def test_a_run_that_another_finished_meanwhile_is_not_repeated(tmp_path: Path) -> None:
    class Slow(StreamCache):
        """Takes so long to open the stream that another has run it by then."""

        def open(self, *args: Any, **options: Any) -> Any:
            runs.run(ONE, tmp_path)
            return super().open(*args, **options)

    card = runs.run(ONE, tmp_path, cache=Slow(), progress=stop_at(1))
    assert card == read_json(tmp_path / "card.json")
    assert not (tmp_path / "steps.jsonl").exists(), "a finished folder is left as it is"


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "tent", "policy": None}, "ratio"),
        ({"labels": 9, "ratio": 9}, "labels=9 a batch, but a batch of this stream has 8"),
        ({"method": "eata", "policy": None, "ratio": None}, "'source_data'"),
        ({"method": "cema", "policy": None, "ratio": None}, "'teacher'"),
    ],
)
def test_an_experiment_that_cannot_run_leaves_nothing_behind(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.BadConfig, match=message):
        runs.run(Experiment.parse({**ONE.model_dump(), **fields}), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_guarded_run_counts_trips_and_is_the_same_run_without_one(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    guarded = results(runs.run(ONE.model_copy(update={"guard": True}), tmp_path / "guarded"))
    assert guarded.pop("trips") == 0
    assert guarded == results(whole[1])


def test_two_processes_never_write_to_one_folder(tmp_path: Path) -> None:
    with runs.claimed(tmp_path), pytest.raises(errors.DataError, match="another process"):
        runs.run(ONE, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.DataError, match="file"):
        runs.run(ONE, tmp_path / "file" / "run")


def test_a_teacher_can_answer_in_place_of_the_truth(tmp_path: Path, cache: Path) -> None:
    fields = {**ONE.model_dump(), "delay": 0, "noise": 0.0, "annotator": "teacher", "teacher": "digits"}
    built = runs.build(Experiment.parse(fields))
    assert isinstance(built.adapter.annotator, who.Teacher)
    batch = next(iter(built.stream))
    question = who.Query.of(batch, number=1, index=3, logits=torch.zeros(len(batch), 10))
    wanted = runs.build(Experiment(model="digits", method="source")).adapter.predict(batch, ask=False, learn=False)
    answer = built.adapter.annotator.reply(question)
    assert isinstance(answer, who.Answer) and answer.label == int(wanted.logits[3].argmax())
    card = runs.run(Experiment.parse(fields), tmp_path / "taught")
    truth = runs.run(Experiment.parse({**fields, "annotator": "oracle", "teacher": None}), tmp_path / "told")
    assert card["results"]["labels_spent"] == truth["results"]["labels_spent"], "a teacher's labels are charged, too"
    assert card["digest"] != truth["digest"]
    with pytest.raises(errors.BadConfig, match="'teacher'"):
        Experiment.parse({**fields, "teacher": None})
    with pytest.raises(errors.BadConfig, match="has no use for it"):
        runs.build(Experiment.parse({**fields, "annotator": "oracle"}))


@pytest.mark.parametrize("order", [("dog", "bee", "ant"), ("owl", "ant", "dog", "bee"), ("ant", "bee", "dog")])
def test_classes_are_matched_by_name_as_in_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]
) -> None:
    root, model = picture_tree(tmp_path / "data", ["ant", "bee", "dog"]), named(*order)
    monkeypatch.setattr(runs, "load", lambda *_: model)
    noisy = PICTURES.model_copy(update={"method": "wise", "ratio": 1.0, "noise": 0.5})
    asked = runs.build(noisy, data=root)
    _, truth = open_stream(asked.stream.spec, root)
    assert isinstance(truth, Truth)
    assert all(order[label] == Path(truth.where(sample)).parent.name for sample, label in asked.truth.items())
    for batch in asked.stream:
        asked.adapter.step(batch)
    error = runs.run(PICTURES, tmp_path / "run", data=root)["results"]["error"]
    (decoded,) = train.read(root / "set", model)
    assert error == 100 * train.evaluate(model, decoded)["error"]


def test_a_class_that_the_model_does_not_know_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = picture_tree(tmp_path, ["ant", "bee", "dog"])
    for order, strange in ((("ant", "bee", "cat"), "dog"), (("cat", "owl"), "ant")):
        model = named(*order)
        monkeypatch.setattr(runs, "load", lambda *_, model=model: model)
        with pytest.raises(errors.DataError, match=f"has the class '{strange}', which .* does not know"):
            runs.build(PICTURES, data=root)
    monkeypatch.setattr(runs, "load", lambda *_: named("0", "1", "2"))
    _, truth = open_stream(runs.build(PICTURES, data=root).stream.spec, root)
    assert dict(runs.build(PICTURES, data=root).truth) == dict(truth), "as many under other names are the same"


def test_a_teacher_of_another_order_answers_in_the_student_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = picture_tree(tmp_path, ["ant", "bee", "dog"])
    known = {"student": named("dog", "bee", "ant"), "teacher": named("owl", "ant", "bee", "dog", seed=1)}
    monkeypatch.setattr(runs, "load", lambda name, *_: known[name])
    taught = {"model": "student", "method": "wise", "ratio": 1.0, "annotator": "teacher", "teacher": "teacher"}
    built = runs.build(PICTURES.model_copy(update=taught), data=root)
    batch = next(iter(built.stream))
    assert isinstance(built.adapter.annotator, who.Teacher) and isinstance(batch.inputs, torch.Tensor)
    question = who.Query.of(batch, number=1, index=0, logits=torch.zeros(len(batch), 3))
    answer = built.adapter.annotator.reply(question)
    assert isinstance(answer, who.Answer) and answer.label == int(known["teacher"](batch.inputs)[0, [3, 2, 1]].argmax())
    known["teacher"] = named("ant", "bee")
    with pytest.raises(errors.DataError, match=r"the student .* has the class 'dog'"):
        runs.build(PICTURES.model_copy(update=taught), data=root)


def frames() -> list[tuple[torch.Tensor, int, str]]:
    """Samples of two cameras, whose ids have a slash and a dot."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(1, 32, 32, generator=generator), n % 10, f"camera{n // 16}/frame.{n % 16}") for n in range(32)]


def test_the_ids_of_a_stream_of_one_s_own_are_its_pictures(tmp_path: Path) -> None:
    asks = {"data": "python:bench.test_run:frames", "stream": {"order": "sequential"}, "noise": 0.0, "delay": 0}
    on_card = runs.run(Experiment.parse({**ONE.model_dump(), **asks}), tmp_path)["results"]
    pictures = read_parquet(tmp_path / "pictures.parquet")
    assert [row["picture"] for row in pictures] == [name for _, _, name in frames()]
    assert on_card["samples_never_asked"] == 32 - on_card["labels_spent"] < 32


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(errors.BadConfig, match="nosuch"):
        runs.pick_device("nosuch")


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


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_kill_9_at_a_random_batch_ten_times_over_changes_no_number(tmp_path: Path) -> None:
    long = Experiment.parse({**ONE.model_dump(), "batch": 4, "stream": {"limit": 72, "domains": ["fog", "snow"]}})
    expected = runs.run(long, tmp_path / "whole")
    for trial, batch in enumerate(rng.numpy(0, "kills").integers(1, 36, size=10).tolist()):
        folder = tmp_path / f"killed-{trial}"
        assert killed_at(long, folder, batch, checkpoint=5) == -signal.SIGKILL
        assert not (folder / "card.json").exists()
        card = runs.run(long, folder, checkpoint=5)
        assert card["results"]["resumed"] == (batch > 5)
        assert results(card) == results(expected), f"killed after batch {batch}"
        same_rows(folder, tmp_path / "whole")


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_run_that_is_killed_whenever_it_gets_on_still_ends_with_the_same_numbers(tmp_path: Path) -> None:
    long = Experiment.parse({**ONE.model_dump(), "batch": 4, "stream": {"limit": 72, "domains": ["fog", "snow"]}})
    expected = runs.run(long, tmp_path / "whole")
    for batch in (3, 8, 12, 13, 20, 26, 35):
        assert killed_at(long, tmp_path / "killed", batch, checkpoint=5) == -signal.SIGKILL
    card = runs.run(long, tmp_path / "killed", checkpoint=5)
    assert card["results"]["resumed"] and results(card) == results(expected)
    same_rows(tmp_path / "killed", tmp_path / "whole")
