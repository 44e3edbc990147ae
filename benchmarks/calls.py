"""How many functions of the package does one batch pass? What a reader has to follow to know what happens.

    python benchmarks/calls.py
    python benchmarks/calls.py --list         and names them in the order in which they are reached

Counts calls inside the package with `sys.setprofile`, over `predict` and `learn` of one batch of `wise`: of the first
batch after two others that is learned with its label, and of the first without one, on the plain path and with
``precision="fp32"``. *Functions* are those with a name, told apart by where they are defined; *frames* also count
lambdas, generator expressions and, before Python 3.12, comprehensions. A change of file is a call of a function that
lies in another file than the one called before.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import wise_atta as wa

PACKAGE = str(Path(wa.__file__).parent)
# Batches that warm up; the first one after them of the wanted kind is counted.
WARM = 2
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "labelled, plain": (True, {}),
    "unlabelled, plain": (False, {}),
    "labelled, fp32": (True, {"precision": "fp32"}),
    "unlabelled, fp32": (False, {"precision": "fp32"}),
}


@dataclass
class Passed:
    """The functions that one batch calls, in their order: file, line and name of each."""

    calls: list[tuple[str, int, str]] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls.append((code.co_filename[len(PACKAGE) + 1 :], code.co_firstlineno, code.co_qualname))

    @property
    def files(self) -> list[str]:
        return [file for file, *_ in self.calls]

    @property
    def named(self) -> set[tuple[str, int, str]]:
        return {call for call in self.calls if not call[2].endswith(">")}

    @property
    def changes(self) -> int:
        return sum(before != after for before, after in itertools.pairwise(self.files))


def network() -> nn.Module:
    """Convolutions with BatchNorm whose predictions are sure, so that there is an entropy to learn from."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    with torch.no_grad():
        net[-1].weight.mul_(30)
    return net.eval()


def batch(number: int) -> Tensor:
    return torch.rand(64, 3, 16, 16, generator=torch.Generator().manual_seed(number))


def passed(labelled: bool, options: dict[str, Any]) -> Passed:
    """The calls of one batch after two others."""
    adapter = wa.adapt(network(), "wise", ratio=0.5, lr=1e-3, statistics="batch", **options)
    for number in range(1, 30):
        inputs, seen = batch(number), Passed()
        sys.setprofile(seen)
        try:
            step = learned(adapter, inputs)
        finally:
            sys.setprofile(None)
        if number > WARM and bool(step.learned) == labelled and step.work.backwards:
            return seen
    raise SystemExit(f"of {number} batches none was learned {'with' if labelled else 'without'} a label")


def learned(adapter: wa.Adapter, inputs: Tensor) -> wa.Step:
    out = adapter.predict(inputs)
    return adapter.learn(out, {query.id: 3 for query in out.queries})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the functions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'one batch of wise':<20}{'functions':>10}{'frames':>8}{'files':>7}{'calls':>7}{'changes of file':>17}")
    for name, (labelled, fast) in CASES.items():
        seen = passed(labelled, fast)
        functions = dict.fromkeys(seen.calls)
        figures = f"{len(functions):>8}{len(set(seen.files)):>7}{len(seen.calls):>7}{seen.changes:>17}"
        print(f"{name:<20}{len(seen.named):>10}{figures}")
        if options.list:
            print("\n".join(f"    {file}:{line}  {function}" for file, line, function in functions))


if __name__ == "__main__":
    main()
