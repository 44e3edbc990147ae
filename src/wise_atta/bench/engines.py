"""Engines that run many experiments: inline, a process pool, a Ray cluster.

Whatever the engine, a run writes to its own folder, and one whose process dies is taken up again from its checkpoint:
its rows were cut back to that moment, so nothing is counted twice, and the numbers are those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from wise_atta import errors
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.run import run
from wise_atta.bench.stream_cache import StreamCache

Engine = Literal["inline", "process", "ray"]
Result = dict[str, Any] | errors.WiseAttaError

# How often a run is taken up again whose process died.
RETRIES = 3
# Read by OpenMP, when it is loaded.
_WAIT = "OMP_WAIT_POLICY"


@dataclass(frozen=True)
class Job:
    """One run of many, with all that another process needs to know.

    Parameters
    ----------
    experiment, folder, data, weights, checkpoint
        As `run` takes them.
    keep
        How many streams its process holds in memory.
    threads
        Of this process: the same elsewhere gives the same sums.
    device
        Where to run it instead of where the experiment says.
    """

    experiment: Experiment
    folder: Path
    data: Path | None = None
    weights: Path | None = None
    checkpoint: int | None = None
    keep: int = 2
    threads: int = field(default_factory=torch.get_num_threads)
    device: str | None = None

    def on(self, device: str | None) -> Job:
        """The same on a device, unless the experiment itself names one."""
        return replace(self, device=device) if self.experiment.device in ("auto", "cuda") else self


_cache: StreamCache | None = None


def perform(job: Job) -> Result:
    """Run a job and give its card, or what went wrong: no failure of one run is a failure of the others."""
    global _cache
    _cache = _cache or StreamCache(job.keep)
    torch.set_num_threads(job.threads)
    try:
        return run(
            job.experiment,
            job.folder,
            data=job.data,
            weights=job.weights,
            cache=_cache,
            device=job.device,
            checkpoint=job.checkpoint,
        )
    except errors.WiseAttaError as error:
        return error
    except Exception as error:
        return failure(f"{job.experiment.name} failed", error)


def failure(what: str, error: Exception) -> errors.WiseAttaError:
    """An unforeseen error of one run as an error of the library: the other runs go on."""
    advice = ". Try fewer jobs at once" if isinstance(error, torch.OutOfMemoryError) else ""
    told = errors.WiseAttaError(f"{what}: {type(error).__name__}: {error}{advice}")
    told.add_note("".join(traceback.format_exception(error)))
    return told


def inline(jobs: Sequence[Job]) -> Iterator[tuple[Job, Result]]:
    """One after the other in this process, with streams held in memory."""
    for job in jobs:
        yield job, perform(job)


def gpus() -> list[str]:
    """The GPUs of this machine."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def assign(count: int, devices: Sequence[str]) -> list[str | None]:
    """Devices for so many processes, in turn.

    >>> assign(3, ["cuda:0", "cuda:1"])
    ['cuda:0', 'cuda:1', 'cuda:0']
    >>> assign(2, [])
    [None, None]
    """
    return [devices[number % len(devices)] if devices else None for number in range(count)]


class _Slot:
    """One process at a time, on one device."""

    def __init__(self, device: str | None, fresh: bool) -> None:
        self.device, self._fresh = device, fresh
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, job: Job) -> Future[Result]:
        try:
            return self._started().submit(perform, job.on(self.device))
        except BrokenProcessPool:
            # It died between two runs, which harms neither.
            self.close()
            return self._started().submit(perform, job.on(self.device))

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = pool(1, self._fresh)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


@contextlib.contextmanager
def sharing(count: int) -> Iterator[None]:
    """Let threads of several processes that start meanwhile sleep as they wait.

    By default they spin, and each process has as many threads as there are cores: two at once would take longer than
    one after the other. Numbers do not depend on it.
    """
    if count == 1 or _WAIT in os.environ:
        yield
        return
    os.environ[_WAIT] = "passive"
    try:
        yield
    finally:
        os.environ.pop(_WAIT, None)


def pool(count: int, fresh: bool = False) -> ProcessPoolExecutor:
    """So many processes, which end with this one; `fresh`: each after one task."""
    return ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_end_with_parent,
        max_tasks_per_child=1 if fresh else None,
    )


def _end_with_parent() -> None:
    """Let a worker end at once by Ctrl-C, and when its parent is killed: its run goes on another time."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def process(
    jobs: Sequence[Job], count: int, devices: Sequence[str] = (), fresh: bool = False
) -> Iterator[tuple[Job, Result]]:
    """In so many processes of this machine, each with a device of its own where several are given.

    Parameters
    ----------
    count
        How many processes.
    devices
        Given to the processes in turn.
    fresh
        Whether each run gets a process of its own that ends with it.
    """
    free = [_Slot(device, fresh) for device in assign(min(count, len(jobs)), devices)]
    slots, waiting, died = list(free), deque(jobs), dict[Path, int]()
    running: dict[Future[Result], tuple[_Slot, Job]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(sharing(len(slots)))
        for slot in slots:
            stack.callback(slot.close)
        while waiting or running:
            while waiting and free:
                slot, job = free.pop(0), waiting.popleft()
                running[slot.submit(job)] = slot, job
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                slot, job = running.pop(future)
                free.append(slot)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    slot.close()
                    died[job.folder] = died.get(job.folder, 0) + 1
                    if died[job.folder] <= RETRIES:
                        waiting.appendleft(job)
                        continue
                    result = _killed(job)
                yield job, result


def _killed(job: Job) -> errors.WiseAttaError:
    return errors.WiseAttaError(
        f"the process of {job.experiment.name} died {RETRIES + 1} times: is there enough memory? What it had done is "
        f"in {job.folder}, and goes on from there"
    )


def ray(jobs: Sequence[Job], count: int, address: str | None = None) -> Iterator[tuple[Job, Result]]:
    """On a Ray cluster: the one at `address`, the one that is connected, or one on this machine for the time being.

    Folders of results and data must be the same on all machines, and the package installed there.

    Parameters
    ----------
    count
        How many runs at once on a cluster that is started here. A cluster at an address decides by its own resources.
    address
        Such as `auto` or `10.0.0.1:6379`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None:
        _knock(address)
    else:
        # Ray reads this when it is imported, and then listens on the loopback address alone, on every system.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray as cluster
    except ModuleNotFoundError as error:
        raise errors.MissingExtra("sweeps over a cluster need ray: pip install 'wise-atta[ray]'") from error
    ours = not cluster.is_initialized()
    if ours:
        _connect(cluster, count, address)
    running: dict[Any, Job] = {}
    try:
        have = cluster.cluster_resources().get("GPU", 0)
        task = cluster.remote(max_retries=RETRIES)(_remote)
        for job in jobs:
            wants_gpu = have and job.experiment.device != "cpu"
            share = min(1.0, have / count) if wants_gpu and address is None else float(bool(wants_gpu))
            # A fraction of a core: Ray places runs by it, torch has its own count of threads.
            run_there = task.options(num_cpus=1, num_gpus=share)
            running[run_there.remote(_absolute(job), _environment())] = job
        while running:
            done, _ = cluster.wait(list(running), num_returns=1)
            for reference in done:
                job = running.pop(reference)
                try:
                    result: Result = cluster.get(reference)
                except cluster.exceptions.WorkerCrashedError:
                    result = _killed(job)
                except cluster.exceptions.RayError as error:
                    result = errors.WiseAttaError(f"{job.experiment.name} was lost by the cluster: {error}")
                yield job, result
    finally:
        for reference in running:
            cluster.cancel(reference)
        if ours:
            cluster.shutdown()


def _connect(cluster: Any, count: int, address: str | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is not None:
            cluster.init(address=address, **quiet)
        else:
            with sharing(count):
                cluster.init(num_cpus=count, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise errors.DataError(f"no Ray cluster at {address or 'this machine'}: {error}") from error


def _knock(address: str, seconds: float = 10) -> None:
    """Refuse an address where nobody listens: Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=seconds).close()
        except OSError as error:
            raise errors.DataError(f"no Ray cluster at {address}: {error}") from error


def _absolute(job: Job) -> Job:
    """Paths that mean the same in a process with another working folder."""
    return replace(
        job,
        folder=job.folder.resolve(),
        data=None if job.data is None else job.data.resolve(),
        weights=None if job.weights is None else job.weights.resolve(),
    )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("WISE_ATTA_")}


def _remote(job: Job, environment: Mapping[str, str]) -> Result:
    os.environ.update(environment)
    return perform(job)
