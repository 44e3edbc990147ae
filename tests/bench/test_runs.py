"""Is a run read back whole, from its folder or from a bundle, and is a broken one named while others are shown?"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.made import made, with_head

from wise_atta import errors
from wise_atta.bench import runs
from wise_atta.bench.record import read_json, read_parquet, write_json, write_parquet

WRONG = [[True, False, False], [False, True, True], [False, False, True]]
# The picture of the sample asked for comes once more later on.
PICTURES = np.array([0, 1, 2, 3, 4, 0, 5, 1, 6])


def test_what_was_predicted_and_asked_is_read_back_sample_by_sample(tmp_path: Path) -> None:
    run = made(tmp_path / "a", WRONG, picked={0: [1], 2: [0]}, pictures=PICTURES)
    assert (~run.hits).tolist() == [one for batch in WRONG for one in batch]
    assert np.flatnonzero(run.picked).tolist() == [1, 6]
    assert run.pictures.tolist() == PICTURES.tolist()
    assert np.flatnonzero(~run.never_asked).tolist() == [1, 6, 7], "also where the picture comes again"
    assert 100 * (~run.hits)[run.never_asked].mean() == pytest.approx(run.results["error_never_asked"])


def test_a_bundle_holds_what_the_folders_held(tmp_path: Path) -> None:
    made(tmp_path / "runs" / "a", WRONG, picked={0: [1]}, pictures=PICTURES, ratio=0.5)
    made(tmp_path / "runs" / "b", WRONG[::-1], method="tent")
    made(tmp_path / "runs" / "c", WRONG, method="source", pictures=PICTURES)
    bundled = runs.bundle([tmp_path / "runs"], tmp_path / "runs.zip")
    back = runs.find([tmp_path / "runs.zip"])
    assert [run.name for run in back.runs] == [run.name for run in bundled.runs] == ["a", "b", "c"]
    for run, wanted in zip(back.runs, bundled.runs, strict=True):
        assert run.card == wanted.card and run.names == wanted.names and run.queries == wanted.queries
        assert run.steps == [{name: row[name] for name in row} for row in wanted.steps]
    head = json.loads(zipfile.ZipFile(tmp_path / "runs.zip").read("bundle.json"))
    assert [one["stream"] for one in head["runs"]] == [0, 1, 0], "runs over one stream share its order"


def test_a_bundle_of_bundles_and_one_without_questions(tmp_path: Path) -> None:
    made(tmp_path / "a", WRONG, picked={0: [1]})
    made(tmp_path / "b", WRONG, method="tent")
    runs.bundle([tmp_path / "a"], tmp_path / "a.zip")
    runs.bundle([tmp_path / "a.zip", tmp_path / "b"], tmp_path / "both.zip", queries=False)
    first, second = runs.find([tmp_path / "both.zip"]).runs
    assert first.name == "a" and first.picked.sum() == 1 and not first.queries
    assert second.name == "b" and second.results["error"] == pytest.approx(100 * 4 / 9)


def test_the_same_folder_counts_once(tmp_path: Path) -> None:
    made(tmp_path / "a", WRONG)
    assert len(runs.find([tmp_path, tmp_path / "a", tmp_path / "a" / "card.json"]).runs) == 1


def test_a_folder_that_is_a_link_is_searched_and_a_circle_of_them_is_left(tmp_path: Path) -> None:
    made(tmp_path / "there" / "a", WRONG)
    made(tmp_path / "here" / "b", WRONG, method="tent")
    (tmp_path / "here" / "a").symlink_to(tmp_path / "there" / "a")
    (tmp_path / "here" / "b" / "up").symlink_to(tmp_path / "here")
    assert [run.name for run in runs.find([tmp_path / "here"]).runs] == ["a", "b"]
    assert len(runs.find([tmp_path]).runs) == 2, "each once, however it is reached"


def test_a_broken_run_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    for name in ("cut", "new", "none", "whole"):
        made(tmp_path / name, WRONG)
    file = tmp_path / "cut" / "steps.parquet"
    file.write_bytes(file.read_bytes()[:200])
    card = read_json(tmp_path / "new" / "card.json")
    write_json(tmp_path / "new" / "card.json", {**card, "card_version": 99})
    (tmp_path / "none" / "steps.parquet").unlink()
    collection = runs.find([tmp_path, tmp_path / "nowhere"])
    assert [run.name for run in collection.runs] == ["whole"]
    output = "\n".join(collection.problems)
    assert str(file) in output and "not a readable Parquet file" in output
    assert f"{tmp_path / 'new' / 'card.json'} is of card version 99" in output and "update wise-atta" in output
    assert f"{tmp_path / 'none' / 'card.json'} has no steps.parquet" in output
    assert f"{tmp_path / 'nowhere'} does not exist" in output
    assert len(collection.problems) == 4


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError, match=r"no card\.json below"):
        runs.find([tmp_path])
    (tmp_path / "card.json").write_text('{"card_version": 1}')
    with pytest.raises(errors.DataError, match="not a run card: it has no 'experiment'"):
        runs.find([tmp_path])


@pytest.mark.parametrize("harm", ["text", "cut", "lacks", "newer", "list", "packed"])
def test_a_broken_bundle_is_named(tmp_path: Path, harm: str) -> None:
    made(tmp_path / "a", WRONG)
    file = tmp_path / "runs.zip"
    runs.bundle([tmp_path / "a"], file)
    if harm == "text":
        file.write_text("not a bundle")
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    elif harm == "packed":
        head = zipfile.ZipFile(file).getinfo("bundle.json").header_offset
        content = bytearray(file.read_bytes())
        for place in (head + 8, content.index(b"PK\x01\x02") + 10):  # the compression's number, in both its places
            content[place] = 77
        file.write_bytes(content)
    else:
        with zipfile.ZipFile(file) as old:
            parts = {name: old.read(name) for name in old.namelist()}
        if harm == "lacks":
            del parts["steps.parquet"]
        elif harm == "list":
            parts["bundle.json"] = b"[]"
        else:
            parts["bundle.json"] = json.dumps({"bundle_version": 9}).encode()
        with zipfile.ZipFile(file, "w") as new:
            for name, part in parts.items():
                new.writestr(name, part)
    with pytest.raises(errors.DataError, match=r"runs\.zip is (neither|a bundle of version 9)"):
        runs.find([file])


def test_runs_of_a_release_that_kept_no_hits_say_so(tmp_path: Path) -> None:
    made(tmp_path, WRONG)
    rows = read_parquet(tmp_path / "steps.parquet")
    write_parquet(tmp_path / "steps.parquet", [{k: v for k, v in row.items() if k != "hits"} for row in rows])
    with pytest.raises(errors.DataError, match="did not keep 'hits' of every sample; run it again"):
        _ = runs.read(tmp_path).hits


def test_rows_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    made(tmp_path, WRONG)
    rows = read_parquet(tmp_path / "steps.parquet")
    write_parquet(tmp_path / "steps.parquet", [row | {"hits": "ffff"} for row in rows])
    write_parquet(tmp_path / "pictures.parquet", [{"picture": "p0"}])
    run = runs.read(tmp_path)
    with pytest.raises(errors.DataError, match=r"'hits' of .* cannot be read"):
        _ = run.hits
    with pytest.raises(errors.DataError, match="do not belong together"):
        _ = run.pictures


@pytest.mark.parametrize("rows", [WRONG[:2], [[True] * 3] * 3])
def test_rows_of_another_run_than_the_card_s_are_named(tmp_path: Path, rows: list[list[bool]]) -> None:
    made(tmp_path / "a", WRONG)
    made(tmp_path / "other", rows)
    (tmp_path / "other" / "steps.parquet").replace(tmp_path / "a" / "steps.parquet")
    with pytest.raises(errors.DataError, match=r"a: its steps are not those of its card, . batches"):
        runs.read(tmp_path / "a")
    write_parquet(tmp_path / "a" / "steps.parquet", [{"batch": 1}])
    with pytest.raises(errors.DataError, match=r"a: its steps cannot be read: KeyError\('wrong'\)"):
        runs.read(tmp_path / "a")


def test_one_run_is_wanted_where_one_is_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made(tmp_path / name, WRONG)
    with pytest.raises(errors.DataError, match="holds 2 runs where one is needed"):
        runs.read(tmp_path)


def test_runs_of_one_name_are_all_in_a_bundle_and_a_copy_is_in_it_once(tmp_path: Path) -> None:
    made(tmp_path / "first" / "tent", WRONG, method="tent")
    made(tmp_path / "second" / "tent", WRONG[::-1], method="tent", seed=41)
    both = [tmp_path / "first", tmp_path / "second"]
    runs.bundle(both, tmp_path / "both.zip")
    assert [run.experiment["seed"] for run in runs.find([tmp_path / "both.zip"]).runs] == [0, 41]
    assert len(runs.find([tmp_path / "both.zip"] * 2).runs) == 2
    runs.bundle([*both, tmp_path / "both.zip"], tmp_path / "again.zip")
    for run in runs.find([tmp_path / "again.zip"]).runs:
        assert runs.read(tmp_path / f"again.zip#{run.card['digest']}").card == run.card


def test_a_run_s_folder_is_that_run_whatever_else_is_below_it(tmp_path: Path) -> None:
    made(tmp_path / "outer", WRONG)
    made(tmp_path / "outer" / "inner", WRONG, method="tent")
    assert runs.read(tmp_path / "outer").name == "outer" and len(runs.find([tmp_path / "outer"]).runs) == 2


def test_a_folder_with_a_hash_in_its_name_is_a_folder(tmp_path: Path) -> None:
    run = made(tmp_path / "try#2", WRONG)
    assert len(runs.read(tmp_path / "try#2").steps) == len(run.steps) == 3


def test_a_file_that_is_no_bundle_is_not_written_over(tmp_path: Path) -> None:
    made(tmp_path / "a", WRONG)
    precious = tmp_path / "experiment.yaml"
    precious.write_text("method: tent")
    with pytest.raises(errors.DataError, match="no bundle, so it is not written over"):
        runs.bundle([tmp_path / "a"], precious)
    assert precious.read_text() == "method: tent"
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as file:
        file.writestr("cat/0.png", b"pixels")
    with pytest.raises(errors.DataError, match="no bundle, so it is not written over"):
        runs.bundle([tmp_path / "a"], tmp_path / "data.zip")
    for _ in range(2):
        runs.bundle([tmp_path / "a"], tmp_path / "a.zip")


def test_a_folder_in_place_of_the_rows_is_named(tmp_path: Path) -> None:
    made(tmp_path / "a", WRONG)
    (tmp_path / "a" / "steps.parquet").unlink()
    (tmp_path / "a" / "steps.parquet").mkdir()
    with pytest.raises(errors.DataError, match=r"has no steps\.parquet"):
        runs.find([tmp_path / "a"])


HARM: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer": (lambda one: one["card"].update(card_version=99), "update wise-atta"),
    "part": (lambda one: one["card"].update(results={}), "is not a run card: 'results.error'"),
    "no card": (lambda one: one.update(card=None), "is not a run card but None"),
    "gone": (lambda one: one.pop("card"), "is not a run card but None"),
    "another's rows": (lambda one: one["card"]["results"].update(error=50.0), "its steps are not those of its card"),
    "stream": (lambda one: one.update(stream=7), "its steps cannot be read"),
    "name": (lambda one: one.update(name=5, stream="x"), "runs.zip: 5: its steps cannot be read"),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_bad_card_in_a_bundle_hides_no_other_run(tmp_path: Path, harm: str) -> None:
    for name in "abc":
        made(tmp_path / name, WRONG, seed=ord(name))
    digest = runs.bundle([tmp_path / name for name in "abc"], tmp_path / "runs.zip").runs[0].card["digest"]
    change, message = HARM[harm]
    with_head(tmp_path / "runs.zip", lambda head: change(head["runs"][1]))
    collection = runs.find([tmp_path / "runs.zip"])
    assert [run.name for run in collection.runs] == ["a", "c"]
    (problem,) = collection.problems
    assert "runs.zip: " in problem and message in problem
    assert runs.read(tmp_path / f"runs.zip#{digest}").name == "a", "what is named does not depend on the others"


def test_where_one_run_is_meant_a_bad_one_beside_it_is_named(tmp_path: Path) -> None:
    for name in "ab":
        made(tmp_path / name, WRONG, seed=ord(name))
    runs.bundle([tmp_path / "a", tmp_path / "b"], tmp_path / "runs.zip")
    with_head(tmp_path / "runs.zip", lambda head: head["runs"][1].update(card={}))
    with pytest.raises(errors.DataError, match=r"holds 1 runs where one is needed.*runs.zip: b is not a run card"):
        runs.read(tmp_path / "runs.zip")


def test_a_bundle_of_bad_cards_alone_names_them_all(tmp_path: Path) -> None:
    made(tmp_path / "a", WRONG)
    runs.bundle([tmp_path / "a"], tmp_path / "runs.zip")
    with_head(tmp_path / "runs.zip", lambda head: head["runs"][0].update(card={}))
    with pytest.raises(errors.DataError, match=r"runs.zip holds no run; .*: a is not a run card"):
        runs.find([tmp_path / "runs.zip"])


def test_what_is_no_fault_of_a_bundle_is_not_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "a", WRONG)
    runs.bundle([tmp_path / "a"], tmp_path / "runs.zip")

    def full(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(zipfile.ZipFile, "read", full)
    with pytest.raises(MemoryError):
        runs.find([tmp_path / "runs.zip"])
