"""Is one checkout slower than another on a CPU? Both in one run: instructions of the host's part, seconds of the rest.

    python benchmarks/side_by_side.py OLD NEW
    python benchmarks/side_by_side.py OLD NEW --only instructions --cells "wise, labelled" tent
    python benchmarks/side_by_side.py OLD NEW --only seconds --rounds 15

*Instructions* are those that `valgrind --tool=callgrind` counts for a network so small that Python and torch's
dispatcher are nearly all there is. They do not depend on what else the machine does: a difference of 0.1 % is one. Each
checkout is one process; around the batches that count it calls `getsid`, where callgrind writes down what it has
counted. Kernels are torch's plain ones there, since valgrind knows no newer instructions.

*Seconds* are processor time of networks for digits and for CIFAR-10, batches of 64, with one thread. Both checkouts
wait in a process each and take turns, a block of batches at a time, in an order that is turned round every round. What
counts is the median of the ratios within a round; the quartiles beside it say how far to trust it.

Needs torch and numpy, and valgrind for the first table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Rates so small that predictions stay what they are: every batch does the same work.
RATE = {"lr": 1e-7}
WISE = {**RATE, "statistics": "batch"}
CELLS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    # method, options, and how many batches late the answers come; None where nothing is asked
    "tent": ("tent", RATE, None),
    "roid": ("roid", RATE, None),
    "eatta": ("eatta", RATE, 0),
    "wise, unlabelled": ("wise", {**WISE, "ratio": 0}, 0),
    "wise, labelled": ("wise", {**WISE, "policy": "uniform", "ratio": 1}, 0),
    "wise, paced": ("wise", {**WISE, "ratio": 0.2}, 0),
    "wise, late": ("wise", {**WISE, "policy": "uniform", "ratio": 1}, 3),
    "wise, mixed": ("wise", {**RATE, "statistics": "mixed", "policy": "uniform", "ratio": 1}, 0),
}
FAST: dict[str, dict[str, Any]] = {"plain": {}, "fp32": {"precision": "fp32"}}
# Cells whose seconds are measured, on every network.
TIMED = ("tent", "wise, unlabelled", "wise, labelled", "wise, late")
# Side and channels of the pictures, and batches of a block.
NETS = {"tiny": (8, 3, 10), "digits": (32, 1, 8), "cifar": (32, 3, 1)}
WARM, DISTINCT = 5, 4


# -- what a checkout does ---------------------------------------------------------------------------------------------


def network(name: str, draw: Callable[[int], Tensor]) -> nn.Module:
    """A random network, its head centred and scaled so that about half of the predictions are sure."""
    torch.manual_seed(0)
    if name == "tiny":
        body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
        net: nn.Module = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6))
        head = net[-1]
    else:
        from wise_atta.data import nets

        net = nets.build("digits_cnn" if name == "digits" else "resnet18_w32")
        head = net.head
    with torch.no_grad():
        logits = net.train()(draw(0))
        spread = (logits - logits.mean(dim=0)).std()
        head.weight.mul_(4 / spread)
        head.bias.sub_(net(draw(0)).mean(dim=0))
    return net.eval()


def stream(name: str) -> Callable[[int], Tensor]:
    side, channels, _ = NETS[name]
    count = 16 if name == "tiny" else 64

    def draw(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.rand(count, channels, side, side, generator=generator)

    return draw


class Bench:
    """One cell on one network: an adapter that goes round its batches."""

    def __init__(self, net: str, cell: str, fast: str) -> None:
        import wise_atta as wa

        method, options, late = CELLS[cell]
        answered: dict[str, Any] = {}
        if late is not None:
            answered["annotator"] = wa.who.Delayed(wa.who.Oracle(lambda query: 3), late)
        draw = stream(net)
        self.adapter = wa.adapt(network(net, draw), method, **options, **FAST[fast], **answered)
        self.batches = [draw(1 + number) for number in range(DISTINCT)]
        self.number = 0
        self.run(WARM)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.adapter.step(self.batches[self.number % DISTINCT])
            self.number += 1


def count_instructions(cells: Sequence[str]) -> None:
    """Run all cells under callgrind; the part between two markers is that of a cell."""
    for cell in cells:
        for fast in FAST:
            bench = Bench("tiny", cell, fast)
            # Collections then look at what the batches make, and not at all of torch, whenever one is due.
            gc.collect()
            gc.freeze()
            os.getsid(0)
            bench.run(NETS["tiny"][2])
            os.getsid(0)
            gc.unfreeze()


def take_turns() -> None:
    """Run a block of batches for every line that names a cell, and print the processor time that it took."""
    import wise_atta as wa

    wa.keep_memory()
    benches: dict[str, Bench] = {}
    for line in sys.stdin:
        net, cell, fast = json.loads(line)
        if line not in benches:
            benches[line] = Bench(net, cell, fast)
        start = time.process_time()
        benches[line].run(NETS[net][2])
        print(time.process_time() - start, flush=True)


def check_checkout(checkout: Path) -> None:
    import wise_atta as wa

    place = Path(wa.__file__).resolve()
    if not place.is_relative_to(checkout.resolve()):
        raise SystemExit(f"{place} would be measured in place of {checkout}")


# -- both of them -----------------------------------------------------------------------------------------------------


def environment(checkout: Path) -> dict[str, str]:
    plain = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**os.environ, **plain, "PYTHONPATH": str(checkout / "src")}


def instructions(checkouts: Sequence[Path], cells: Sequence[str]) -> list[list[float]]:
    """Millions of instructions a batch, by checkout and cell; the checkouts run beside each other."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"callgrind.{number}" for number in range(len(checkouts))]
        processes = [
            subprocess.Popen(
                [
                    *("valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--dump-before=getsid"),
                    *("--dump-line=no", sys.executable, __file__, "--work", "count", str(checkout), str(checkout)),
                    *("--cells", *cells),
                ],
                env=environment(checkout) | {"ATEN_CPU_CAPABILITY": "default"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for checkout, out in zip(checkouts, outs, strict=True)
        ]
        output = [process.communicate()[0] for process in processes]
        for process, printed in zip(processes, output, strict=True):
            if process.returncode:
                raise SystemExit(printed)
        windows = 2 * len(cells) * len(FAST)
        return [[_total(Path(f"{out}.{part}")) / NETS["tiny"][2] for part in range(2, windows + 1, 2)] for out in outs]


def _total(dump: Path) -> float:
    found = re.search(r"^totals: (\d+)$", dump.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{dump.name} holds no total")
    return int(found[1]) / 1e6


@contextmanager
def worker(checkout: Path) -> Iterator[Callable[[str], float]]:
    """A process that runs the blocks that it is told to."""
    command = [sys.executable, __file__, "--work", "turns", str(checkout), str(checkout)]
    with subprocess.Popen(
        command, env=environment(checkout), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def block(cell: str) -> float:
            print(cell, file=process.stdin, flush=True)
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{checkout}: the process that measures it has ended")
            return float(line)

        yield block
        process.stdin.close()


def seconds(checkouts: Sequence[Path], rounds: int, cells: Sequence[str]) -> Iterator[tuple[str, list[list[float]]]]:
    """The processor time of every block, by checkout, cell after cell."""
    with worker(checkouts[0]) as old, worker(checkouts[1]) as new:
        for net in [name for name in NETS if name != "tiny"]:
            for cell in cells:
                for fast in FAST:
                    told = json.dumps([net, cell, fast])
                    old(told), new(told)
                    taken: list[list[float]] = [[], []]
                    for number in range(rounds):
                        order = (0, 1) if number % 2 else (1, 0)
                        for which in order:
                            taken[which].append((old, new)[which](told) / NETS[net][2])
                    yield f"{net}, {cell}, {fast}", taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", choices=("instructions", "seconds"))
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), metavar="CELL", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--rounds", type=int, default=11, help="blocks of each checkout")
    parser.add_argument("--work", choices=("count", "turns"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        torch.set_num_threads(1)
        check_checkout(options.new)
        count_instructions(options.cells) if options.work == "count" else take_turns()
        return

    checkouts = [options.old, options.new]
    if options.only != "seconds":
        cells = options.cells or list(CELLS)
        print("host, millions of instructions a batch")
        print(f"  {'':<28}{'old':>9}{'new':>9}{'new/old':>9}", flush=True)
        found = instructions(checkouts, cells)
        names = [f"{cell}, {fast}" for cell in cells for fast in FAST]
        for name, old, new in zip(names, *found, strict=True):
            print(f"  {name:<28}{old:>9.3f}{new:>9.3f}{new / old:>9.4f}")
        ratios = [new / old for old, new in zip(*found, strict=True)]
        print(f"  {'median':<28}{'':>18}{statistics.median(ratios):>9.4f}", flush=True)
    if options.only != "instructions":
        print("processor time, milliseconds a batch")
        print(f"  {'':<34}{'old':>9}{'new':>9}{'new/old':>9}   quartiles", flush=True)
        medians = []
        for name, (old, new) in seconds(checkouts, options.rounds, options.cells or TIMED):
            ratios = [b / a for a, b in zip(old, new, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            medians.append(middle)
            times = "".join(f"{1000 * statistics.median(taken):>9.2f}" for taken in (old, new))
            print(f"  {name:<34}{times}{middle:>9.4f}   {low:.3f} to {high:.3f}", flush=True)
        print(f"  {'median':<34}{'':>18}{statistics.median(medians):>9.4f}")


if __name__ == "__main__":
    main()
