"""How does a test kill a run in the middle? It starts one in a process of its own that ends itself with signal 9."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import torch

from wise_atta.bench.experiment import Experiment
from wise_atta.bench.run import run


def run_and_die(fields: str, folder: Path, batch: int, checkpoint: int) -> None:
    """Run an experiment and, after so many batches, leave no time to flush, rename or say goodbye."""
    torch.set_num_threads(1)

    def progress(number: int, length: int | None, error: float, spent: int) -> None:
        if number == batch:
            os.kill(os.getpid(), signal.SIGKILL)

    run(Experiment.model_validate_json(fields), folder, progress=progress, checkpoint=checkpoint)


def killed_at(experiment: Experiment, folder: Path, batch: int, checkpoint: int) -> int | None:
    """The exit code of a process that was killed after so many batches."""
    # A server that has imported everything forks the victims: each starts at once, from a clean state.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["wise_atta.bench.run", "pyarrow.parquet", "sklearn.datasets", "torch._inductor"])
    child = context.Process(target=run_and_die, args=(experiment.model_dump_json(), folder, batch, checkpoint))
    child.start()
    child.join()
    return child.exitcode
