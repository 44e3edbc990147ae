"""Does every command say what it did, in words and in JSON, and leave with a code that means something?"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from wise_atta import cli, errors
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.run import run

FAST = (
    "--model",
    "wise_atta/digits_cnn@random",
    "--batch",
    "8",
    "--limit",
    "16",
    "--domains",
    "fog,snow",
    "--threads",
    "1",
)
ASK = ("--method", "wise", "--policy", "uniform", "--ratio", "0.5")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write below the current folder unless told otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def call(*arguments: str) -> str:
    """What a command that succeeds prints on standard output."""
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def code(arguments: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    return int(left.value.code or 0)


@pytest.mark.parametrize("command", ["demo", "run", "doctor", "methods", *cli.ROOMS])
def test_every_command_has_help(command: str) -> None:
    assert command in call("--help")
    shown = CliRunner().invoke(cli.app, [command, "--help"])
    assert shown.exit_code == 0 and "Usage" in shown.stdout


def test_version_is_the_one_that_is_installed() -> None:
    assert call("--version") == f"wise-atta {metadata.version('wise-atta')}\n"


def test_help_teaches_by_example() -> None:
    assert "wise-atta demo --seeds 3" in call("demo", "--help")
    assert "wise-atta run experiment.yaml" in call("run", "--help")


def test_help_loads_neither_plots_nor_data_sets() -> None:
    script = """
import sys
from wise_atta import cli
try:
    cli.main(["run", "--help"])
except SystemExit:
    pass
heavy = {"matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "timm", "torchvision"}
loaded = {name.partition(".")[0] for name in sys.modules}
print("loaded", *sorted(heavy & loaded))
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1].split() == ["loaded"]


# ---- run -------------------------------------------------------------------------------------------------------------


def test_run_writes_a_card_and_says_what_came_out(tmp_path: Path) -> None:
    output = call("run", *FAST, *ASK, "--out", "here")
    card = json.loads((tmp_path / "here" / "card.json").read_text())
    assert f"error {card['results']['error']:.2f} %" in output and "labels 2 of 2" in output
    assert "fog" in output and "snow" in output


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    Path("one.yaml").write_text(
        "method: tent\nseed: 3\noptions: {lr: 0.5, momentum: 0.0}\nstream: {limit: 8, seed: 2}\n"
    )
    card = json.loads(call("run", "one.yaml", *FAST, "--seed", "4", "-o", "lr=0.1", "--json", "--out", "here"))
    assert card["experiment"]["seed"] == 4
    assert card["experiment"]["options"] == {"lr": 0.1, "momentum": 0.0}
    assert card["experiment"]["stream"] == {"limit": 16, "seed": 2, "domains": ["fog", "snow"]}
    again = json.loads(call("run", "here", "--json", "--out", "there"))
    assert again["results"]["by_domain"] == card["results"]["by_domain"]


def test_a_flag_for_a_whole_field_wins_over_parts_of_it_in_the_file() -> None:
    Path("one.yaml").write_text("method: tent\noptions.lr: 0.5\n")
    card = json.loads(call("run", "one.yaml", *FAST, "--set", 'options={"momentum": 0.0}', "--json", "--out", "here"))
    assert card["experiment"]["options"] == {"momentum": 0.0}


def test_an_option_can_be_set_to_nothing() -> None:
    Path("one.yaml").write_text("method: wise\noptions: {head_lr: 0.5}\n")
    card = json.loads(call("run", "one.yaml", *FAST, "-o", "head_lr=null", "--json", "--out", "here"))
    assert card["experiment"]["options"] == {"head_lr": None}


def test_a_folder_is_named_as_it_is_called() -> None:
    assert "here/[/b]/card.json" in call("run", *FAST, "--method", "bn", "--out", "here/[/b]")


def test_any_field_can_be_set() -> None:
    card = json.loads(call("run", *FAST, *ASK, "--set", "exhaust=true", "--set", "context=source", "--json"))
    assert card["experiment"]["exhaust"] is True and card["experiment"]["context"] == "source"
    assert list(Path("runs").iterdir()), "without --out a run goes below runs/"


def test_json_is_all_that_is_printed_and_quiet_is_one_line() -> None:
    result = CliRunner().invoke(cli.app, ["run", *FAST, "--method", "bn", "--json"])
    assert json.loads(result.stdout)["experiment"]["method"] == "bn"
    assert result.stderr == ""
    result = CliRunner().invoke(cli.app, ["run", *FAST, "--method", "bn", "--quiet"])
    assert len(result.stdout.splitlines()) == 1 and result.stderr == ""


def test_progress_goes_to_standard_error() -> None:
    result = CliRunner().invoke(cli.app, ["run", *FAST, "--method", "bn"])
    assert "batch 4 of 4" in result.stderr and "batch 4" not in result.stdout


def test_a_run_that_goes_on_says_from_where() -> None:
    stream = {"limit": 16, "domains": ["fog", "snow"]}
    fields = {"model": "wise_atta/digits_cnn@random", "batch": 8, "stream": stream, "threads": 1, "method": "bn"}

    def stopped(number: int, *_: object) -> None:
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Experiment.parse(fields), Path("here"), progress=stopped, checkpoint=2)
    result = CliRunner().invoke(cli.app, ["run", *FAST, "--method", "bn", "--out", "here"])
    assert "goes on from its checkpoint, after batch 2" in result.stderr and "batch 4 of 4" in result.stderr
    assert "goes on" not in CliRunner().invoke(cli.app, ["run", *FAST, "--method", "bn"]).stderr


def test_a_finished_run_is_shown_again_without_running() -> None:
    first = json.loads(call("run", *FAST, "--method", "tent", "--json", "--out", "here"))
    assert json.loads(call("run", *FAST, "--method", "tent", "--json", "--out", "here")) == first


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected", "words"),
    [
        (("run", *FAST, "--method", "tnt"), 2, "Did you mean 'tent'"),
        (("run", *FAST, "--severity", "9"), 2, "severity"),
        (("run", *FAST, "--method", "tent", "-o", "lrr=1"), 2, "lrr"),
        (("run", *FAST, "-o", "lr"), 2, "NAME=VALUE"),
        (("run", *FAST, "--method", "tent", "--ratio", "0.5"), 2, "ratio"),
        (("run", *FAST, "--set", "nonsense=1"), 2, "nonsense"),
        (("run", *FAST, "--device", "nosuch"), 2, "nosuch"),
        (("run", "missing.yaml"), 3, "missing.yaml"),
        (
            ("run", "--dataset", "cifar10-c", "--data", "empty", "--model", "wise_atta/resnet18_w8@random"),
            3,
            "cifar10-c",
        ),
        (("evaluate", "file:nowhere.safetensors", "digits"), 3, "nowhere.safetensors"),
        (
            ("run", "--dataset", "cifar10-c", "--data", "nowhere", "--model", "wise_atta/resnet18_w8@random"),
            3,
            "nowhere",
        ),
        (("run", "--dataset", "cifar10-c", "--model", "wise_atta/resnet18_w8@random"), 3, "WISE_ATTA_DATA"),
    ],
)
def test_an_error_is_one_line_and_its_code_says_of_what_kind(
    arguments: tuple[str, ...],
    expected: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("empty").mkdir()
    monkeypatch.delenv("WISE_ATTA_DATA", raising=False)
    assert code(arguments) == expected
    output = capsys.readouterr().err
    assert words in output and "Traceback" not in output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [("nosuch",), ("run", "--nosuch"), ("run", "--batch", "many"), ("data", "nosuch")]
)
def test_bad_usage_is_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert code(arguments) == 2
    assert "Usage" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--debug", "run", "missing.yaml"), ("run", "missing.yaml", "--debug")])
def test_debug_shows_where_an_error_came_from(arguments: tuple[str, ...]) -> None:
    with pytest.raises(errors.DataError):
        cli.main(arguments)


def test_success_is_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert code(["methods"]) == 0


def test_every_kind_of_error_has_a_code() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WiseAttaError)
    ]
    assert len(kinds) > 10
    assert {cli.exit_code(kind("x")) for kind in kinds} == {1, 2, 3, 4}


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("wise_atta.bench")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(errors.MissingExtra, match=r"yaml: pip install 'wise-atta\[bench\]'"):
        CliRunner().invoke(cli.app, ["run", "one.yaml"], catch_exceptions=False)


def test_a_package_that_is_missed_late_is_named_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", lambda arguments: importlib.import_module("nosuchpackage"))
    assert code(["run"]) == 4
    assert "nosuchpackage is not installed" in capsys.readouterr().err


def test_without_typer_the_command_says_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None; import wise_atta.cli"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 4
    assert result.stderr.strip() == "wise-atta's commands need typer: pip install 'wise-atta[bench]'"


# ---- doctor, methods, demo -------------------------------------------------------------------------------------------


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from wise_atta.bench import doctor

    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "timm" else real(name))
    output = call("doctor")
    assert "lacks timm" in output and "pip install 'wise-atta[vision]'" in output
    printed: dict[str, Any] = json.loads(call("doctor", "--json"))
    assert printed["missing"]["vision"] == ["timm"]
    assert {"postgres", "ray", "hub"} <= set(printed["extras"])
    assert printed["core"]["torch"] and printed["device"]["auto"] in ("cpu", "cuda")


def test_doctor_finds_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WISE_ATTA_DATA", raising=False)
    assert json.loads(call("doctor", "--json"))["data"]["folder"] is None
    (tmp_path / "data" / "CIFAR-10-C").mkdir(parents=True)
    monkeypatch.setenv("WISE_ATTA_DATA", str(tmp_path / "data"))
    printed = json.loads(call("doctor", "--json"))["data"]
    assert printed["folder"] == str(tmp_path / "data") and "cifar10-c" in printed["here"]


def test_methods_lists_every_method() -> None:
    from wise_atta import methods

    output, rows = call("methods"), json.loads(call("methods", "--json"))
    assert [row["name"] for row in rows] == list(methods.METHODS)
    assert all(row["name"] in output for row in rows)
    assert "ratio" in next(row["options"] for row in rows if row["name"] == "wise")


def test_demo_prints_the_table_and_writes_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WISE_ATTA_CACHE", str(tmp_path / "cache"))
    output = call("demo", "--seeds", "2", "--limit", "16", "--jobs", "1")
    assert "wise, paced" in output and "difference to tent" in output and "7 of 7" in output
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "demo" / "demo.svg").exists()
    card = next((tmp_path / "demo" / "runs").glob("wise-paced*"))
    assert Experiment.read(card).policy == "paced"
    result = CliRunner().invoke(
        cli.app, ["demo", "--seeds", "1", "--limit", "16", "--jobs", "1", "--json", "--out", "x"]
    )
    facts = json.loads(result.stdout)
    assert result.stderr == "" and Path(facts["report"]).read_text().startswith("<!doctype html>")
    assert facts["rows"][0]["difference"] is None


# No system takes so long a name: looking whether it exists is an error, as where a folder may not be looked into.
LONG = "x" * 300


@pytest.mark.parametrize("words", [["report"], ["run"], ["compare", LONG], ["paper", "show", "delay"], ["verify"]])
def test_a_place_that_cannot_be_looked_at_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert code([*words, f"{LONG}/card.json"]) == 3
    told = capsys.readouterr().err
    assert LONG in told and ("error: " in told or "left out: " in told)
