"""The data file of the golden test: hashes by machine, and one digest in numbers for all others.

    PYTHONPATH=src:tests python -m golden.values --write [--threads 1 2] [--again]

plays every configuration with the present code and adds the hashes of this machine. What is recorded for it already is
overwritten with --again alone: a change that moves bits says so, and says why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from golden.configurations import GROUPS, SHARED, Case
from golden.play import data, play
from torch import nn

PLACE = Path(__file__).with_name("values.json")


@cache
def stored() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(PLACE.read_text()) if PLACE.exists() else {"digests": {}, "hashes": {}}
    return loaded


def machine() -> str:
    """What decides about bits: torch, its instruction set, the thread count, and how plain torch itself rounds here."""
    instructions, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"torch {torch.__version__}, {instructions}, threads {threads}, rounding {_rounding(threads)}"


@cache
@torch.enable_grad()
def _rounding(threads: int) -> str:
    """A hash of what torch's kernels give: libraries under it choose theirs by the processor, not by torch's name."""
    digest = hashlib.sha256()
    values = torch.arange(4 * 3 * 12 * 12).reshape(4, 3, 12, 12)
    x = ((values * 37) % 101 / 101).requires_grad_(True)
    weight = ((torch.arange(16 * 3 * 9) * 29) % 97 / 97 - 0.5).reshape(16, 3, 3, 3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        hidden = nn.functional.conv2d(x.to(dtype), weight.to(dtype), padding=1).flatten(1)
        mixed = nn.functional.layer_norm(hidden @ hidden.T, (4,)).log_softmax(dim=1)
        (gradient,) = torch.autograd.grad(mixed.float().square().sum(), x)
        digest.update(
            data(mixed) + data(gradient) + data(torch.nn.functional.batch_norm(hidden, None, None, training=True))
        )
    return digest.hexdigest()[:8]


def chosen(threads: int) -> dict[str, dict[str, Case]]:
    """All configurations with one thread; with more those whose batches are large enough to be shared."""
    return GROUPS if threads == 1 else {SHARED: GROUPS[SHARED]}


def record(again: bool) -> None:
    every, here = stored(), machine()
    if here in every["hashes"] and not again:
        raise SystemExit(f"{here} is recorded already: --again overwrites it, and the commit says why bits have moved")
    threads, hashes = torch.get_num_threads(), {}
    fresh = again and threads == 1
    for group, cases in chosen(threads).items():
        played = {name: play(case) for name, case in cases.items()}
        hashes[group] = {name: bits for name, (bits, _) in played.items()}
        known = every["digests"].setdefault(group, {})
        for name, (_, digest) in played.items():
            if fresh or name not in known:
                known[name] = digest
    every["hashes"][here] = hashes
    PLACE.write_text(_lines(every))
    print(here)


def _lines(every: dict[str, Any]) -> str:
    """Compact, with one configuration a line, so that a diff names what has moved."""
    compact = {"separators": (",", ":"), "ensure_ascii": False}

    def lines(cases: dict[str, Any]) -> str:
        return (
            "{\n" + ",\n".join(f"{json.dumps(k, **compact)}:{json.dumps(v, **compact)}" for k, v in cases.items()) + "}"
        )

    def groups(of: dict[str, Any]) -> str:
        return "{" + ",\n".join(f"{json.dumps(group)}:{lines(cases)}" for group, cases in of.items()) + "}"

    machines = ",\n".join(f"{json.dumps(key)}:{groups(of)}" for key, of in every["hashes"].items())
    return f'{{"digests":{groups(every["digests"])},\n"hashes":{{{machines}}}}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--again", action="store_true", help="overwrite what is recorded for this machine")
    given = parser.parse_args()
    if len(given.threads) > 1:
        # A process for each: threads that a library has started stay.
        again = ["--again"] if given.again else []
        for threads in given.threads:
            command = [sys.executable, "-m", "golden.values", "--write", "--threads", str(threads), *again]
            subprocess.run(command, check=True)
        return
    torch.set_num_threads(given.threads[0])
    record(given.again)


if __name__ == "__main__":
    main()
