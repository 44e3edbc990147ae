"""What does adaptation cost a live service? Throughput, latency and memory with it, against the same service without.

    python benchmarks/serve_load.py                                   both models, about five minutes
    python benchmarks/serve_load.py --models digits --memory 100000   instead: memory over so many requests
    python benchmarks/serve_load.py --models digits --streams 1 40    instead: memory of so many streams

Both services run side by side, each a process of its own, and are loaded in turns, so that whatever else the machine
does falls on both alike. Requests of one picture come from this process, over kept connections: first as many as the
service answers, then half of that at a steady pace.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wise_atta import rng

START = "from wise_atta.serve.cli import serve; import typer; typer.run(serve)"
# Side and channels of the pictures that each model is sent.
SHAPES = {"digits": (32, 1), "efficientnet_lite0": (224, 3)}
METHODS = ("source", "wise")


@dataclass
class Load:
    """What some stretches of load came to."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    batches: float = 0.0
    learned: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def milliseconds(self, share: float) -> float:
        return 1e3 * float(np.quantile(self.latencies, share))

    def add(self, other: Load) -> None:
        self.seconds += other.seconds
        self.latencies += other.latencies
        self.refused += other.refused
        self.batches += other.batches
        self.learned += other.learned


@dataclass(frozen=True)
class Running:
    """A service: where it listens, and its process."""

    port: int
    pid: int


@contextmanager
def service(model: str, method: str, folder: str, streams: int = 1) -> Iterator[Running]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", START, "--model", model, "--method", method, "--port", str(port)]
    command += ["--database", f"sqlite:///{folder}/{method}.db", "--stream", "default"]
    command += [part for number in range(1, streams) for part in ("--stream", f"s{number}")]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 120
        while not ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the service did not start")
            time.sleep(0.1)
        yield Running(port, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def call(port: int, path: str, body: object = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def ready(port: int) -> bool:
    try:
        return call(port, "/readyz")[0] == 200
    except OSError:
        return False


def counters(port: int) -> dict[str, float]:
    text = call(port, "/metrics")[1]
    found = re.findall(r'^wise_atta_(\w+?)(?:_total)?\{stream="default"\} (\S+)$', text, re.M)
    return {name: float(value) for name, value in found}


def ask(connection: http.client.HTTPConnection, body: bytes, stream: str = "default") -> str | None:
    """Have pictures predicted. If they were not, says why: status and text of the reply, or what ended the call."""
    try:
        connection.request("POST", f"/predict?top=1&stream={stream}", body, {"Content-Type": "application/x-npy"})
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return type(error).__name__
    return None if reply.status == 200 else f"{reply.status}: {text[:200]}"


def load(port: int, bodies: list[bytes], seconds: float, workers: int, rate: float | None = None) -> Load:
    """Send requests from some workers; at a steady rate if one is given, else as fast as replies come."""
    before = counters(port)
    found = Load()
    began = time.perf_counter()
    end = began + seconds
    lock = threading.Lock()

    def work(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        pause = 0.0 if rate is None else workers / rate
        due = began + pause * number / workers
        turn = number
        while True:
            if rate is not None:
                time.sleep(max(due - time.perf_counter(), 0))
            # Latency counts from when the request was due, so that a stall is not hidden by sending less.
            sent = due if rate is not None else time.perf_counter()
            if sent >= end:
                return
            said = ask(connection, bodies[turn % len(bodies)])
            with lock:
                if said is None:
                    found.latencies.append(time.perf_counter() - sent)
                else:
                    found.refused[said] += 1
            turn += workers
            due += pause

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.seconds = time.perf_counter() - began
    while counters(port)["waiting_batches"]:
        time.sleep(0.05)
    after = counters(port)
    found.batches = after["batches"] - before["batches"]
    found.learned = after["learned"] - before["learned"]
    return found


def resident(pid: int, which: str = "VmRSS") -> float:
    """Memory of a process in MiB, now or (`VmHWM`) at its highest."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def requests(model: str) -> list[bytes]:
    """Bodies of requests: random pictures, the same at every run."""
    side, channels = SHAPES[model]
    bodies = []
    for number in range(64):
        buffer = io.BytesIO()
        np.save(buffer, rng.numpy(0, "load", number).integers(0, 256, (1, side, side, channels), dtype=np.uint8))
        bodies.append(buffer.getvalue())
    return bodies


def compare(model: str, *, rounds: int, seconds: float, workers: int) -> dict[str, object]:
    """Load both services in turns."""
    bodies = requests(model)
    full, half = ({method: Load() for method in METHODS} for _ in range(2))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = {method: stack.enter_context(service(model, method, folder)) for method in METHODS}
        for method in METHODS:
            load(running[method].port, bodies, 3, workers)
        for _ in range(rounds):
            for method in METHODS:
                full[method].add(load(running[method].port, bodies, seconds, workers))
        for _ in range(rounds):
            for method in METHODS:
                rate = full[method].rate / 2
                half[method].add(load(running[method].port, bodies, seconds, workers, rate))
    row = {f"{method}_requests_per_s": full[method].rate for method in METHODS}
    row["throughput_share"] = full["wise"].rate / full["source"].rate
    row["learned_at_full_load"] = full["wise"].learned / full["wise"].batches
    row["learned_at_half_load"] = half["wise"].learned / half["wise"].batches
    for method in METHODS:
        row[f"{method}_half_load_p50_ms"] = half[method].milliseconds(0.5)
        row[f"{method}_half_load_p99_ms"] = half[method].milliseconds(0.99)
    row["p99_over_median"] = row["wise_half_load_p99_ms"] / row["wise_half_load_p50_ms"]
    refused = sum((found.refused for loads in (full, half) for found in loads.values()), Counter[str]())
    return {**{name: round(value, 3) for name, value in row.items()}, "refused": dict(refused)}


def answer_all(port: int) -> None:
    """Answer every open question with the first guess: each one that is open takes memory, as it should."""
    while found := json.loads(call(port, "/queries?limit=50")[1])["queries"]:
        said = [{"query": query["query"], "label": query["guesses"][0]["label"]} for query in found]
        call(port, "/answers", {"answers": said})


def watch_memory(model: str, count: int, workers: int) -> dict[str, object]:
    """Memory of the adapting service in every tenth of many requests.

    The median of what it is every five seconds: what the allocator holds ready goes up and down with the size of the
    last batches, and up when many answers are learned at once.
    """
    bodies, sent, refused = requests(model), 0, Counter[str]()
    memory: list[float] = []
    samples: list[float] = []
    over = threading.Event()

    def watch(pid: int) -> None:
        while not over.wait(5):
            samples.append(resident(pid))

    with tempfile.TemporaryDirectory() as folder, service(model, "wise", folder) as running:
        watching = threading.Thread(target=watch, args=(running.pid,))
        watching.start()
        try:
            while sent < count:
                # Answers wait for the learner, which is behind after a full load: so they come seldom.
                found = load(running.port, bodies, 120, workers)
                sent, refused = sent + len(found.latencies), refused + found.refused
                answer_all(running.port)
                if sent >= count * (len(memory) + 1) / 10:
                    seen, samples[:] = samples[:], []
                    memory.append(round(statistics.median(seen), 1))
                    print(f"{sent} requests, {memory[-1]} MiB", file=sys.stderr, flush=True)
        finally:
            over.set()
            watching.join()
    # The first fifth fills caches; from there on nothing should be added.
    growth = round(memory[-1] / memory[min(1, len(memory) - 1)] - 1, 4)
    return {"requests": sent, "refused": dict(refused), "memory_mib": memory, "memory_growth": growth}


def watch_streams(model: str, counts: list[int], size: int, turns: int) -> dict[str, object]:
    """Memory of the adapting service at its start, and when all streams have learned some batches at the same time."""
    side, channels = SHAPES[model]
    buffer = io.BytesIO()
    np.save(buffer, rng.numpy(0, "load", 0).integers(0, 256, (size, side, side, channels), dtype=np.uint8))
    rows: dict[str, object] = {"pictures_a_batch": size, "batches_a_stream": turns}
    for count in counts:
        with tempfile.TemporaryDirectory() as folder, service(model, "wise", folder, count) as running:
            start = resident(running.pid)
            names = ["default", *(f"s{number}" for number in range(1, count))]

            refused: Counter[str] = Counter()

            def work(name: str, port: int = running.port, refused: Counter[str] = refused) -> None:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
                for _ in range(turns):
                    if (said := ask(connection, buffer.getvalue(), name)) is not None:
                        refused[said] += 1

            threads = [threading.Thread(target=work, args=(name,)) for name in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            while any(row["waiting"] for row in json.loads(call(running.port, "/streams")[1])):
                time.sleep(0.1)
            rows[f"{count} streams"] = {
                "refused": dict(refused),
                "start_mib": round(start, 1),
                "learned_mib": round(resident(running.pid), 1),
                "peak_mib": round(resident(running.pid, "VmHWM"), 1),
            }
    return rows


TARGETS = (
    ("throughput_share", "throughput against `--method source`", 0.70, True),
    ("learned_at_half_load", "batches learned at half load", 0.95, True),
    ("p99_over_median", "p99 over median at half load", 3.0, False),
    ("memory_growth", "memory growth after the first fifth", 0.02, False),
)


def table(found: dict[str, dict[str, Any]]) -> str:
    """What came out against what was wanted."""
    lines = ["| model | | wanted | found | |", "| --- | --- | --: | --: | --- |"]
    for model, row in found.items():
        for key, text, bound, at_least in TARGETS:
            if key in row:
                met = row[key] >= bound if at_least else row[key] <= bound
                sign = "≥" if at_least else "≤"
                lines.append(f"| {model} | {text} | {sign} {bound:g} | {row[key]:g} | {'yes' if met else 'no'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each service, at full and at half load")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a turn")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--memory", type=int, default=0, help="watch memory over so many requests, and nothing else")
    parser.add_argument("--streams", type=int, nargs="+", help="watch memory of so many streams, and nothing else")
    parser.add_argument("--size", type=int, default=8, help="with --streams: pictures of a batch")
    parser.add_argument("--turns", type=int, default=3, help="with --streams: batches of each stream")
    parser.add_argument("--out", type=Path, help="where the JSON goes, too")
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for model in given.models:
        if given.streams:
            found[model] = watch_streams(model, given.streams, given.size, given.turns)
        elif given.memory:
            found[model] = watch_memory(model, given.memory, given.workers)
        else:
            found[model] = compare(model, rounds=given.rounds, seconds=given.seconds, workers=given.workers)
    report = {"machine": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg(), "models": found}
    text = json.dumps(report, indent=2)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(f"{text}\n", encoding="utf-8")
    print(text)
    if not given.streams:
        print(table(found))


if __name__ == "__main__":
    main()
