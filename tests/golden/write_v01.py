"""Writes `v01/`: states, exports, ledgers, cards and a stopped run, as 0.1 leaves them.

    PYTHONPATH=src:tests python -m golden.write_v01 FOLDER

was run once, with 0.1.0 (commit 52057a2), and is kept to say where the files come from. Run with a later version it
would write what that version writes, so it refuses to.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from golden import nets, served, v01
from golden.values import machine
from serve import parts

import wise_atta as wa
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.run import run
from wise_atta.bench.runs import bundle
from wise_atta.bench.spread import add_spread
from wise_atta.bench.sweep import expand


class Stopped(Exception):
    """Ends a run in its middle."""


def states(folder: Path) -> None:
    """A state of every scenario after some batches, and what the same adapter did then."""
    folder.mkdir()
    expected = {}
    for name, case in v01.STATES.items():
        adapter = case.make()
        for number in range(1, v01.STOP + 1):
            case.turn(adapter, case.batch(number), number)
        torch.save(adapter.state_dict(), folder / f"{v01.file_name(name)}.pt")
        expected[name] = {"saved": v01.shown(adapter), **v01.go_on(adapter, case, v01.STOP + 1)}
    untouched = v01.STATES["wise, mixed, late"].make()
    torch.save(untouched.state_dict(), folder / "never-used.pt")
    torch.save(expected, folder / "expected.pt")


def exports(folder: Path) -> None:
    """Exported modules, pickled whole, and what they say."""
    folder.mkdir()
    expected = {}
    for mode in v01.EXPORTS:
        module = v01.exported(mode)
        torch.save(module, folder / f"{mode}.pt")
        with torch.no_grad():
            expected[mode] = module(nets.batch("batch-norm", 99))
    torch.save(expected, folder / "expected.pt")


def ledgers(folder: Path, work: Path) -> None:
    """Ledgers of services that were closed, and of one that was killed: its log has to be replayed."""
    folder.mkdir()
    torch.save(parts.small_model().module.state_dict(), v01.FOLDER / "served.pt")
    expected: dict[str, Any] = {}
    for name in served.SETTINGS:
        file = work / f"{name}.db"
        with served.opened(name, file) as (client, service):
            served.used(name, client, service)
            if name == "replayed":
                parts.crash(service)
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("update queries set lease_until = 0 where lease_until is not null")
            connection.commit()
            connection.execute("vacuum into ?", (str(folder / f"{name}.db"),))
        expected[name] = {"kept": served.said(folder / f"{name}.db")}
        shutil.copy(folder / f"{name}.db", work / f"{name}-again.db")
        with served.opened(name, work / f"{name}-again.db") as (client, service):
            expected[name] |= served.continued(client, service)
        expected[name]["after"] = served.said(work / f"{name}-again.db")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))


RUNS: dict[str, dict[str, Any]] = {
    "wise": {"method": "wise", "policy": "paced", "ratio": 0.5, "delay": 2, "noise": 0.2, "options": {"lr": 0.02}},
    "eatta": {"method": "eatta", "policy": "uniform", "ratio": 0.5},
    "tent": {"method": "tent", "options": {"lr": 0.05}, "statistics": "ema"},
}
SHARED: dict[str, Any] = {
    "data": "digits+c",
    "model": "wise_atta/digits_cnn@random",
    "batch": 8,
    "stream": {"limit": 24, "domains": ["fog", "snow"]},
    "threads": 1,
}
STOPPED = RUNS["wise"]
GRIDS: dict[str, dict[str, Any]] = {
    "sweep": {
        **SHARED,
        "method": ["tent", "wise"],
        "ratio": [0.1, 0.5],
        "policy": ["paced", "uniform"],
        "options.lr": [0.001, 0.01],
        "seed": [0, 1],
    },
    "wise": {
        **SHARED,
        "method": "wise",
        "statistics": "batch",
        "ratio": 0.5,
        "policy": ["paced", "random"],
        "options": {"objective": "roid", "lambda_ent": 1.0, "pull": 0.01, "correct_prior": True, "lr": 0.0025},
        "guard": [True, False],
    },
}


def runs(folder: Path, work: Path) -> None:
    """Finished runs with their cards, a bundle of them, and one that was stopped after a checkpoint."""
    folder.mkdir()
    places = []
    for name, fields in RUNS.items():
        place = folder / name
        add_spread(place, run(Experiment.parse({**SHARED, **fields}), place), runs=3)
        places.append(place)
    bundle(places, folder / "all.zip")

    def progress(number: int, *_: Any) -> None:
        if number == 4:
            raise Stopped

    with suppress(Stopped):
        run(Experiment.parse({**SHARED, **STOPPED}), folder / "stopped", checkpoint=3, progress=progress)


def configurations(folder: Path) -> None:
    """What experiments are called that lists of values stand for."""
    import yaml

    folder.mkdir()
    for name, grid in GRIDS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
        digests = sorted(f"{one.name} {one.digest}" for one in expand(grid))
        (folder / f"{name}.txt").write_text("\n".join(digests) + "\n")


def main() -> None:
    folder, work = Path(sys.argv[1]), Path(sys.argv[1]) / "work"
    if wa.__version__ != "0.1.0" or not hasattr(wa, "Classifier"):
        raise SystemExit("these are files of 0.1: a later version would write others")
    torch.set_num_threads(1)
    v01.FOLDER = folder
    work.mkdir(parents=True)
    states(folder / "states")
    exports(folder / "exports")
    ledgers(folder / "ledgers", work)
    runs(folder / "experiments", work)
    configurations(folder / "configurations")
    (folder / "machine.txt").write_text(machine() + "\n")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
