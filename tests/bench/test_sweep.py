"""Does a grid give the same table by whatever engine, and does no failure of one run harm another?"""

from __future__ import annotations

import copy
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from wise_atta import cli, errors
from wise_atta.bench import engines
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.record import claimed, read_parquet
from wise_atta.bench.sweep import Places, cards, expand, sweep, table

GRID: dict[str, Any] = {
    "data": "digits+c",
    "model": "wise_atta/digits_cnn@random",
    "method": ["bn", "wise"],
    "seed": [0, 41],
    "batch": 8,
    "stream": {"limit": 16, "domains": ["fog", "snow"]},
    "threads": 1,
}
# Long enough to be killed in the middle: 80 batches a run.
LONG: dict[str, Any] = {
    **GRID,
    "method": "wise",
    "policy": "paced",
    "ratio": 0.5,
    "delay": 3,
    "batch": 4,
    "stream": {"limit": 160, "domains": ["fog", "snow"]},
}


def results(some_cards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results without how long they took."""
    kept = [copy.deepcopy(card["results"]) for card in some_cards]
    for each in kept:
        for name in ("seconds", "resumed", "peak_memory"):
            del each[name]
    return kept


def test_a_grid_is_every_combination() -> None:
    experiments = expand({**GRID, "options.lr": [0.1, 0.2], "method": "tent"})
    assert [(one.seed, one.options["lr"]) for one in experiments] == [(0, 0.1), (0, 0.2), (41, 0.1), (41, 0.2)]
    assert {one.batch for one in experiments} == {8}


def test_a_field_that_a_part_of_a_grid_has_no_use_for_is_left_out_there() -> None:
    experiments = expand({**GRID, "ratio": [0.1, 0.5], "delay": [0, 2], "method": ["tent", "wise"], "seed": 0})
    made = [(one.method, one.ratio, one.delay) for one in experiments]
    assert made == [("tent", None, 0), *(("wise", ratio, delay) for ratio in (0.1, 0.5) for delay in (0, 2))]
    experiments = expand({**GRID, "policy": ["never", "uniform"], "noise": 0.1, "method": "wise", "seed": 0})
    assert [(one.policy, one.noise) for one in experiments] == [("never", 0), ("uniform", 0.1)]
    experiments = expand({**GRID, "statistics": ["batch", "mixed"], "prior": [64, 256], "method": "wise", "seed": 0})
    assert [(one.statistics, one.prior) for one in experiments] == [("batch", None), ("mixed", 64), ("mixed", 256)]


def test_a_field_that_no_run_of_a_grid_has_a_use_for_is_named(tmp_path: Path) -> None:
    experiments = expand({**GRID, "delay": [0, 2], "method": "bn", "seed": 0})
    failed: dict[str, errors.WiseAttaError] = {}
    (card,) = sweep(experiments, Places(tmp_path), failed=failed)
    assert card["experiment"]["delay"] == 0
    assert "'delay': method 'bn' does not ask for labels" in str(failed[experiments[1].digest])


@pytest.mark.parametrize(("grid", "words"), [({"seed": []}, "no value for 'seed'"), ({"sede": [1]}, "'seed'")])
def test_a_grid_that_cannot_be_run_is_refused(grid: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.BadConfig, match=words):
        expand({**GRID, **grid})


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(errors.BadConfig, match="no run"):
        sweep([], Places(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "rey"}, "Did you mean 'ray'"),
        ({"jobs": 0}, "at least one"),
        ({"address": "auto"}, "engine='ray'"),
        ({"devices": ["nosuch:3"]}, "nosuch"),
    ],
)
def test_a_sweep_that_cannot_be_done_says_why(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    todo, places = expand({**GRID, "method": "bn", "seed": 0}), Places(tmp_path)
    cards = sweep(todo, places)
    with pytest.raises(errors.BadConfig, match=words):
        sweep(todo, places, again=True, **options)
    assert sweep(todo, places) == cards, "what was there is not forgotten before it is known that it can be repeated"


def test_the_table_has_a_column_for_every_axis_and_one_row_over_seeds(tmp_path: Path) -> None:
    experiments = sweep(expand(GRID), Places(tmp_path))
    head, _, *lines = table(experiments).splitlines()
    assert head == "| method | error % | never asked % | labels | runs |"
    assert [line.split("|")[1].strip() for line in lines] == ["bn", "wise"]
    assert all(line.endswith("| 2 |") and "±" in line for line in lines)


def test_a_run_asked_for_twice_is_run_once_and_a_finished_one_not_again(tmp_path: Path) -> None:
    seen: list[str] = []
    runs = expand({**GRID, "method": "bn", "seed": 0}) * 2
    twice = sweep(runs, Places(tmp_path), report=lambda one, result: seen.append(one.digest))
    assert len(seen) == 1 and len(twice) == 2 and twice[0] == twice[1]
    assert table(twice).endswith("| 1 |") and "±" not in table(twice), "it is no second seed"
    assert sweep(runs, Places(tmp_path)) == twice, "also the seconds: it was not run again"
    again = sweep(runs, Places(tmp_path), again=True)
    assert results(again) == results(twice) and again != twice


def test_a_run_that_is_being_written_keeps_no_other_from_being_repeated(tmp_path: Path) -> None:
    runs = expand({**GRID, "method": "bn"})
    before = sweep(runs, Places(tmp_path))
    failed: dict[str, errors.WiseAttaError] = {}
    with claimed(Places(tmp_path).of(runs[1])):
        (again,) = sweep(runs, Places(tmp_path), again=True, failed=failed)
    assert again["digest"] == before[0]["digest"] and again != before[0]
    assert "being written by another process" in str(failed[runs[1].digest])
    assert sweep(runs, Places(tmp_path)) == [again, before[1]], "what could not be repeated is still there"


def test_a_failing_run_harms_no_other(tmp_path: Path) -> None:
    good = expand(GRID)
    bad = Experiment.parse({**good[0].model_dump(), "model": "file:nowhere.safetensors"})
    seen: dict[str, Any] = {}
    with pytest.raises(errors.DataError, match="nowhere"):
        sweep([bad, *good], Places(tmp_path), report=lambda one, result: seen.update({one.digest: result}))
    assert isinstance(seen[bad.digest], errors.DataError)
    assert all(isinstance(seen[one.digest], dict) for one in good)


def test_an_unexpected_failure_is_told_with_its_place_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engines.run

    def broken(experiment: Experiment, *arguments: Any, **options: Any) -> dict[str, Any]:
        if experiment.seed == 0:
            raise ZeroDivisionError("in a method of one's own")
        return real(experiment, *arguments, **options)

    monkeypatch.setattr(engines, "run", broken)
    seen: list[Any] = []
    with pytest.raises(errors.WiseAttaError, match="ZeroDivisionError: in a method") as raised:
        sweep(expand({**GRID, "method": "bn"}), Places(tmp_path), report=lambda one, result: seen.append(result))
    assert "Traceback" in raised.value.__notes__[0]
    assert isinstance(seen[1], dict)


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_processes_take_devices_in_turn() -> None:
    assert engines.assign(5, ["cuda:0", "cuda:1"]) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.parametrize(
    ("named", "on_device"), [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cpu", None), ("cuda:3", None)]
)
def test_an_experiment_that_names_its_device_keeps_it(named: str, on_device: str | None) -> None:
    job = engines.Job(Experiment(device=named), Path("x"))
    assert job.on("cuda:1").device == on_device


def test_the_folder_does_not_depend_on_which_device_of_several_was_free(tmp_path: Path) -> None:
    one = expand({**GRID, "method": "bn", "seed": 0})
    swept = sweep(one, Places(tmp_path), devices=["cpu"])
    assert swept == sweep(one, Places(tmp_path))


# ---- engines ---------------------------------------------------------------------------------------------------------


def kill_one(folder: Path) -> Callable[[], list[int]]:
    """Kill, with signal 9, the first process below a folder that has written a checkpoint and goes on."""
    killed: list[int] = []

    def watch() -> None:
        end = time.monotonic() + 60
        while not killed and time.monotonic() < end:
            for checkpoint in folder.glob("*/checkpoint.pt"):
                pid = int((checkpoint.parent / ".lock").read_text().split()[0])
                if pid != os.getpid() and not (checkpoint.parent / "card.json").exists():
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    return
            time.sleep(0.005)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def ended() -> list[int]:
        thread.join(timeout=60)
        return killed

    return ended


def check_nothing_twice(folder: Path, expected: list[dict[str, Any]]) -> None:
    """Every batch and every question has one row, and the numbers are those of the undisturbed sweep."""
    swept = cards([folder])
    assert {json.dumps(one) for one in results(swept)} == {json.dumps(one) for one in results(expected)}
    assert sum(card["results"]["resumed"] for card in swept) == 1
    for run in folder.iterdir():
        steps, queries = (read_parquet(run / f"{name}.parquet") for name in ("steps", "queries"))
        assert [row["batch"] for row in steps] == list(range(1, 81))
        assert len({row["id"] for row in queries}) == len(queries) == steps[-1]["spent"]


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_killed_process_is_replaced_and_its_run_taken_up_again(tmp_path: Path) -> None:
    runs = expand(LONG)
    expected = sweep(runs, Places(tmp_path / "inline"))
    ended = kill_one(tmp_path / "process")
    swept = sweep(runs, Places(tmp_path / "process"), engine="process", jobs=2, checkpoint=8)
    assert ended(), "every run was over before it could be killed"
    assert table(swept) == table(expected)
    check_nothing_twice(tmp_path / "process", expected)


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_process_that_dies_between_two_runs_is_replaced(tmp_path: Path) -> None:
    runs = expand({**GRID, "method": "bn"})

    def kill(one: Experiment, result: Any) -> None:
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        time.sleep(0.5)  # until its pool has noticed

    swept = sweep(runs, Places(tmp_path / "process"), engine="process", report=kill)
    assert results(swept) == results(sweep(runs, Places(tmp_path / "inline")))


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_run_whose_process_always_dies_is_given_up_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its stream is a function that ends the process that reads it.
    (tmp_path / "deadly.py").write_text("import os\n\ndef stream():\n    os._exit(9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(engines, "RETRIES", 1)
    good = expand({**GRID, "method": "bn", "seed": 0})
    deadly = Experiment.parse(
        {**good[0].model_dump(), "data": "python:deadly:stream", "stream": {"order": "sequential"}}
    )
    seen: dict[str, Any] = {}
    with pytest.raises(errors.WiseAttaError, match="died 2 times"):
        sweep(
            [deadly, *good],
            Places(tmp_path / "runs"),
            engine="process",
            report=lambda one, result: seen.update({one.digest: result}),
        )
    assert isinstance(seen[good[0].digest], dict)


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'wise-atta[ray]'"
)


@needs_ray
@pytest.mark.heavy
@pytest.mark.ray
@pytest.mark.timeout(180)
def test_on_a_ray_cluster_a_killed_worker_s_run_is_taken_up_again_and_tables_are_the_same(tmp_path: Path) -> None:
    runs = expand(LONG)
    expected = sweep(runs, Places(tmp_path / "inline"))
    ended = kill_one(tmp_path / "ray")
    addresses = []

    def look(experiment: Experiment, result: object) -> None:
        addresses.append(sys.modules["ray"].nodes()[0]["NodeManagerAddress"])

    swept = sweep(runs, Places(tmp_path / "ray"), engine="ray", jobs=2, checkpoint=8, report=look)
    assert ended(), "every run was over before it could be killed"
    assert addresses == ["127.0.0.1", "127.0.0.1"], "a cluster for one machine is not to be reached from another"
    assert table(swept) == table(expected)
    check_nothing_twice(tmp_path / "ray", expected)


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError, match=r"no Ray cluster at 127\.0\.0\.1:9"):
        sweep(expand({**GRID, "seed": 0}), Places(tmp_path), engine="ray", address="127.0.0.1:9")


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_table_of_what_came_out_and_fails_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.json").write_text(json.dumps({**GRID, "model": [GRID["model"], "file:nowhere.safetensors"]}))
    ran = CliRunner().invoke(cli.app, ["sweep", "grid.json", "--out", "runs", "--devices", "cpu"])
    assert isinstance(ran.exception, errors.DataError) and "nowhere" in str(ran.exception)
    assert "| wise |" in ran.stdout and len(cards([tmp_path / "runs"])) == 4
    Path("grid.toml").write_text(
        'method = ["bn", "wise"]\nseed = [0, 41]\nthreads = 1\nbatch = 8\n'
        'model = "wise_atta/digits_cnn@random"\ndata = "digits+c"\nstream = {limit = 16, domains = ["fog", "snow"]}\n'
    )
    again = CliRunner().invoke(cli.app, ["sweep", "grid.toml", "--out", "runs", "--json", "--engine", "inline"])
    assert again.exit_code == 0 and len(json.loads(again.stdout)) == 4


def test_threads_are_those_of_the_process_that_asked() -> None:
    assert engines.Job(Experiment(), Path("x")).threads == torch.get_num_threads()


@pytest.mark.parametrize(("count", "chosen", "there"), [(2, None, "passive"), (2, "active", "active"), (1, None, None)])
def test_threads_of_several_processes_do_not_spin(
    monkeypatch: pytest.MonkeyPatch, count: int, chosen: str | None, there: str | None
) -> None:
    policy = "OMP_WAIT_POLICY"
    monkeypatch.delenv(policy, raising=False)
    if chosen is not None:
        monkeypatch.setenv(policy, chosen)
    with engines.sharing(count), engines.pool(1) as pool:
        assert pool.submit(os.getenv, policy).result() == there
    assert os.environ.get(policy) == chosen, "what this process starts otherwise is left alone"


def test_a_quiet_sweep_still_names_every_run_that_failed(tmp_path: Path) -> None:
    grid = {**GRID, "method": ["bn", "tent"], "delay": [0, 2], "seed": 0}
    (tmp_path / "grid.json").write_text(json.dumps(grid))
    words = ["sweep", str(tmp_path / "grid.json"), "--out", str(tmp_path / "runs"), "--json"]
    for quiet in ([], ["--quiet"]):
        done = CliRunner().invoke(cli.app, [*words, *quiet])
        assert [card["experiment"]["method"] for card in json.loads(done.stdout)] == ["bn", "tent"]
        assert done.stderr.count("'delay': method") == 2 and "tent-s0 on digits+c" in done.stderr


def test_processes_of_a_sweep_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(engines, "perform", os.path.expandvars)
    monkeypatch.setattr(engines.Job, "on", lambda *_: "$OMP_WAIT_POLICY")
    jobs = [engines.Job(Experiment(), tmp_path / name) for name in "ab"]
    assert [policy for _, policy in engines.process(jobs, 2)] == ["passive", "passive"]
    assert [policy for _, policy in engines.process(jobs, 1)] == ["$OMP_WAIT_POLICY"] * 2


def test_finished_runs_are_found_without_a_process_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo, places = expand(GRID), Places(tmp_path)
    once = sweep(todo, places)
    monkeypatch.setattr(engines, "process", lambda *_: pytest.fail("a process was asked for"))
    seen: list[str] = []
    assert sweep(todo, places, jobs=2, report=lambda one, result: seen.append(one.digest)) == once
    assert seen == [one.digest for one in todo]


def test_an_axis_of_domains_is_a_list_of_lists() -> None:
    with pytest.raises(errors.BadConfig, match=r"domains is 'fog', a list is needed"):
        expand({"stream.domains": ["fog", "snow"]})
    assert [one.stream["domains"] for one in expand({"stream.domains": [["fog"], ["snow"]]})] == [["fog"], ["snow"]]


def test_no_jobs_at_all_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "grid.json").write_text(json.dumps(GRID))
    assert CliRunner().invoke(cli.app, ["sweep", str(tmp_path / "grid.json"), "--jobs", "0"]).exit_code == 2


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import os, time\n"
        "from wise_atta.bench import engines\n"
        'if __name__ == "__main__":\n'
        "    pool = engines.pool(1)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    pool.submit(time.sleep, 60).result()\n"
    )
    with subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    for _ in range(300):
        try:
            state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":  # over, though nobody has waited for it yet
            return
        time.sleep(0.1)
    pytest.fail("the worker goes on")
