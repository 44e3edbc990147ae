"""Do `wise-atta data list | check | fetch | make` say what a user needs?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wise_atta import errors
from wise_atta.data import catalog
from wise_atta.data.cli import app


@pytest.fixture
def root(tmp_path: Path, pack: Callable[..., Path], jpeg: Callable[..., bytes]) -> Path:
    pack(tmp_path / "mine", {f"{kind}/{n}.jpg": jpeg(n, (32, 32)) for kind in ("cat", "dog") for n in range(2)})
    return tmp_path


def run(*words: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def test_list_shows_every_set_and_which_are_here(imagenet_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row["name"]: row for row in json.loads(run("list", "--data", imagenet_folder, "--json"))}
    assert set(rows) == set(catalog.ENTRIES)
    assert {name for name, row in rows.items() if row["here"]} == {
        "imagenet-c", "imagenet-r", "imagenet-k", "imagenet-a", "digits", "digits-train",
    }  # fmt: skip
    assert rows["imagenet-k"]["pictures"] == 50_889 and rows["imagenet-c"]["pictures"] == 750_000
    assert all(row["licence"] and row["home"] for row in rows.values())
    monkeypatch.delenv("WISE_ATTA_DATA", raising=False)
    assert "WISE_ATTA_DATA" in run("list")


def test_check_ends_well_or_with_one(root: Path) -> None:
    assert run("check", "tree:mine", "--data", root, "--quiet").endswith("whole\n")
    (root / "mine" / "cat" / "0.jpg").write_bytes(b"")
    text = run("check", "tree:mine", "--data", root, code=1)
    assert "PROBLEM" in text and "cat/0.jpg" in text and "1 problems" in text
    printed = json.loads(run("check", "tree:mine", "--data", root, "--json", code=1))
    assert printed["pictures"] == 4 and len(printed["problems"]) == 1


def test_make_writes_a_set_that_can_be_checked(root: Path) -> None:
    text = run("make", "tree:mine", root / "out", "--data", root, "--corruption", "fog", "--quiet")
    assert "20 pictures" in text and "npy:PATH" in text
    assert run("check", "npy:out", "--data", root, "--quiet").endswith("whole\n")


def test_fetch_of_what_is_here_only_checks_it(root: Path) -> None:
    (root / "imagenet-a.tar").write_bytes(b"something else")
    result = CliRunner().invoke(app, ["fetch", "imagenet-a", "--data", str(root)])
    assert isinstance(result.exception, errors.DataError)
    assert "imagenet-a.tar has sha256" in str(result.exception)
    assert "licence: MIT" in result.stderr
