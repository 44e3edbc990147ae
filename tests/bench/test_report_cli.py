"""Do the commands that look at runs print and write what they say, and name what they could not read?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench.made import made, with_head

from wise_atta import cli, rng
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.sweep import Places, sweep

BATCHES, BATCH = 20, 8


def mistakes(share: float, who: str) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return rng.numpy(0, who).random((BATCHES, BATCH)) < share


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A method without labels, and one that asks at two ratios."""
    made(tmp_path / "runs" / "tent", mistakes(0.3, "tent"), method="tent")
    for ratio, share in ((0.25, 0.35), (0.5, 0.15)):
        picked = {number: [number % BATCH] for number in range(0, BATCHES, round(1 / ratio))}
        made(tmp_path / "runs" / f"wise-{ratio}", mistakes(share, f"{ratio}"), picked=picked, ratio=ratio)
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs as `wise-atta sweep` leaves them."""
    folder = tmp_path_factory.mktemp("real")
    shared = {"data": "digits+c", "model": "wise_atta/digits_cnn@random", "batch": 8, "threads": 1, "device": "cpu"}
    shared["stream"] = {"limit": 32, "domains": ["fog", "snow"]}
    grid = [{"method": "tent"}, {"policy": "never"}, {"policy": "uniform", "ratio": 0.5}]
    sweep([Experiment.parse({**shared, **fields}) for fields in grid], Places(folder))
    return folder


def call(*arguments: object) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


def test_value_prints_a_table_and_the_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("value", folder, "--replicates", 50) == 0
    output = capsys.readouterr().out
    assert "Best without labels: tent" in output and "wise: better than tent from 0." in output


def test_value_writes_figure_table_and_numbers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("value", folder, "--replicates", 50, "--out", tmp_path / "out", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "value.json").read_text())
    assert printed["baseline"] == "tent" and len(printed["points"]) == 3
    assert (tmp_path / "out" / "value.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "value.html").read_text()
    assert "http" not in page and "What labels buy on digits+c" in page
    assert "| wise | 0.5 | 10 |" in (tmp_path / "out" / "table.md").read_text()
    assert "<svg" in (tmp_path / "out" / "value.svg").read_text()


def test_a_broken_run_is_left_out_aloud(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = folder / "wise-0.25" / "steps.parquet"
    broken.write_bytes(b"PAR1")
    assert call("value", folder, "--replicates", 50, "--json") == 3
    caught = capsys.readouterr()
    assert len(json.loads(caught.out)["points"]) == 2 and str(broken) in json.loads(caught.out)["left_out"][0]
    assert str(broken) in caught.err.replace("\n", "")
    assert call("bundle", folder, "--out", tmp_path / "runs.zip") == 3
    assert call("value", tmp_path / "runs.zip", "--replicates", 50, "--json") == 0
    assert len(json.loads(capsys.readouterr().out.partition("MiB\n")[2])["points"]) == 2


def test_what_cannot_be_compared_for_a_broken_run_names_that_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = folder / "tent" / "steps.parquet"
    broken.write_bytes(b"PAR1")
    assert call("value", folder, "--replicates", 50) == 3
    output = capsys.readouterr().err
    assert "every one of these runs asked for labels" in output and str(broken) in output


def test_a_copy_is_no_second_run_in_a_report(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("bundle", folder, "--out", tmp_path / "runs.zip") == 0
    assert call("report", folder, tmp_path / "runs.zip", "--replicates", 20, "--out", tmp_path / "page.html") == 0
    assert "page.html: 3 runs" in capsys.readouterr().out
    assert "<h1>3 runs</h1>" in (tmp_path / "page.html").read_text()


def test_names_from_the_data_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = {"domains": ["[/b]"] * BATCHES, "picked": {0: [1]}, "ratio": 0.5}
    run = made(tmp_path / "wise", mistakes(0.3, "a"), options={"norm": "[/n]"}, **named)
    made(tmp_path / "other", mistakes(0.2, "b"), options={"norm": "layer1"}, **named)
    made(tmp_path / "tent", mistakes(0.2, "c"), method="tent", domains=named["domains"])
    assert call("run", run.where, "--out", run.where) == 0
    assert call("compare", run.where, tmp_path / "other") == 0
    assert call("value", tmp_path, "--replicates", 20) == 0
    output = capsys.readouterr().out
    assert output.count("[/b]") >= 2 and "[/n]" in output


def test_mixed_streams_are_an_error_that_names_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(folder / "other", mistakes(0.3, "tent"), method="bn", severity=3)
    assert call("value", folder) == 3
    output = capsys.readouterr().err
    assert "severity" in output and str(folder / "other") in output


def test_runs_of_the_sweep_are_read_by_every_command(
    real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "runs.zip"
    assert call("bundle", real, "--out", bundle) == 0
    capsys.readouterr()
    for place in (real, bundle):
        assert call("value", place, "--replicates", 20, "--json") == 0
        points = {point["method"]: point for point in json.loads(capsys.readouterr().out)["points"]}
        assert points["wise, uniform"]["labels"] == 4 and points["wise, uniform"]["alone"]["to"] == "wise, no labels"
        assert call("report", place, "--out", tmp_path / "report.html", "--replicates", 20) == 0
        assert "<h1>3 runs</h1>" in (tmp_path / "report.html").read_text()
        capsys.readouterr()
    never, uniform = (next(real.glob(f"wise-{name}-*")) for name in ("never", "uniform"))
    assert call("compare", never, uniform, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    asked = next(parting for parting in printed["partings"] if parting["stage"] == "learning")
    assert asked["batch"] == 2 and not printed["data"] and not printed["identical"]
    assert call("compare", never, f"{bundle}#{never.name.rpartition('-')[2]}", "--json") == 0
    assert "but never by more than 1e-06" in json.loads(capsys.readouterr().out)["verdict"]


def test_the_numbers_of_value_are_whole_in_80_columns(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made(folder / "never", mistakes(0.4, "never"), policy="never")
    assert call("value", folder, "--replicates", 20) == 0
    output = capsys.readouterr().out
    assert "…" not in output and max(map(len, output.split("Best without labels")[0].splitlines())) <= 80
    assert output.count("───\n") == 2 and "− same without" in output, "a table against tent, and one against itself"


@pytest.mark.parametrize(
    "words", [("report", "--out", "file/a.html"), ("bundle", "--out", "file/a.zip"), ("value", "--out", "file")]
)
def test_a_place_that_cannot_be_written_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("kept")
    command, flag, place = words
    assert call(command, folder, flag, tmp_path / place) == 3
    assert "could not be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_a_folder_for_what_is_written_is_made(folder: Path, tmp_path: Path) -> None:
    assert call("bundle", folder, "--out", tmp_path / "new" / "runs.zip") == 0
    assert (tmp_path / "new" / "runs.zip").exists()


@pytest.mark.parametrize("command", ["value", "report", "bundle"])
def test_a_bad_card_in_a_bundle_is_named_and_the_others_are_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    made(folder / "bad", mistakes(0.3, "bad"), method="bn")
    assert call("bundle", folder, "--out", tmp_path / "runs.zip") == 0
    with_head(tmp_path / "runs.zip", lambda head: head["runs"][0]["card"].update(card_version=99))
    capsys.readouterr()
    options = {"value": ["--replicates", 50], "report": ["--replicates", 50, "--out", tmp_path / "report.html"]}
    assert call(command, tmp_path / "runs.zip", *options.get(command, ["--out", tmp_path / "again.zip"])) == 3
    told = capsys.readouterr()
    assert f"left out: {tmp_path / 'runs.zip'}: bad is of card version 99" in told.err
    assert "Best without labels: tent" in told.out if command == "value" else "3 runs" in told.out
