"""What does adaptation cost a live service? Throughput, latency and memory with it, against the same service without.

    python benchmarks/serve_load.py --model digits --seconds 20
    python benchmarks/serve_load.py --model efficientnet_lite0 --side 224 --seconds 60

The service is a process of its own; requests of one picture come from this one, over kept connections. First both
services are loaded as far as they go, then each at half of what it managed.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from wise_atta import rng

START = "from wise_atta.serve.cli import serve; import typer; typer.run(serve)"


@dataclass
class Load:
    """What a stretch of load came to."""

    seconds: float
    latencies: list[float] = field(default_factory=list)
    refused: int = 0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.latencies, share)) if self.latencies else float("nan")


@contextmanager
def service(model: str, method: str, folder: str) -> Iterator[tuple[int, int]]:
    """A running service: its port and its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", START, "--model", model, "--method", method, "--port", str(port)]
    command += ["--database", f"sqlite:///{folder}/{method}.db"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 120
        while not ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the service did not start")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ready(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False


def load(port: int, bodies: list[bytes], seconds: float, workers: int, rate: float | None = None) -> Load:
    """Send requests from some workers; at a steady rate if one is given, else as fast as replies come."""
    found = Load(seconds)
    end = time.perf_counter() + seconds
    lock = threading.Lock()

    def work(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        pause = 0.0 if rate is None else workers / rate
        due = time.perf_counter() + pause * number / workers
        turn = number
        while True:
            if rate is not None:
                time.sleep(max(due - time.perf_counter(), 0))
            # Latency counts from when the request was due, so that a stall is not hidden by sending less.
            began = due if rate is not None else time.perf_counter()
            if began >= end:
                return
            connection.request(
                "POST", "/predict?top=1", bodies[turn % len(bodies)], {"Content-Type": "application/x-npy"}
            )
            reply = connection.getresponse()
            reply.read()
            with lock:
                if reply.status == 200:
                    found.latencies.append(time.perf_counter() - began)
                else:
                    found.refused += 1
            turn += workers
            due += pause

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def counters(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return {
        name: float(value)
        for name, value in re.findall(r'^wise_atta_(\w+)_total\{stream="default"\} (\S+)$', text, re.M)
    }


def resident(pid: int) -> float:
    """Memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="digits")
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--channels", type=int, default=None, help="1 for the digits, else 3")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--requests", type=int, default=0, help="then so many more, to see whether memory grows")
    given = parser.parse_args()
    channels = given.channels or (1 if "digits" in given.model else 3)
    bodies = []
    for number in range(64):
        buffer = io.BytesIO()
        shape = (1, given.side, given.side, channels)
        np.save(buffer, rng.numpy(0, "load", number).integers(0, 256, shape, dtype=np.uint8))
        bodies.append(buffer.getvalue())
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in ("source", "wise"):
            with service(given.model, method, folder) as (port, pid):
                load(port, bodies, min(given.seconds, 3), given.workers)
                full = load(port, bodies, given.seconds, given.workers)
                before = counters(port)
                half = load(port, bodies, given.seconds, given.workers, full.rate / 2)
                after = counters(port)
                batches = after["batches"] - before["batches"]
                row = {
                    "requests_per_s": full.rate,
                    "half_load_p50_ms": 1e3 * statistics.median(half.latencies),
                    "half_load_p99_ms": 1e3 * half.quantile(0.99),
                    "half_load_learned": (after["learned"] - before["learned"]) / batches if batches else float("nan"),
                    "refused": full.refused + half.refused,
                    "memory_mib": resident(pid),
                }
                if given.requests:
                    sent = 0
                    while sent < given.requests:
                        sent += len(load(port, bodies, 10, given.workers).latencies)
                    row["memory_later_mib"] = resident(pid)
                result[method] = {name: round(value, 3) for name, value in row.items()}
    result["ratio"] = {"throughput": round(result["wise"]["requests_per_s"] / result["source"]["requests_per_s"], 3)}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
