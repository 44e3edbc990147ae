"""How much does `import wise_atta` add to `import torch`? Milliseconds, each import in a process of its own.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --repeat 15

Both kinds of process take turns, so that a machine that slows down slows both. `import torch` brings numpy along; what
the package adds is measured inside the second kind, after both are loaded. The median counts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

TORCH = "import time; start = time.perf_counter(); import numpy, torch; print(time.perf_counter() - start)"
ADDED = "import time, numpy, torch; start = time.perf_counter(); import wise_atta; print(time.perf_counter() - start)"
LIMIT = 200


def milliseconds(code: str) -> float:
    """What the code printed, in milliseconds, from a new process."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return 1000 * float(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="processes of each kind")
    options = parser.parse_args()

    milliseconds(ADDED)  # compiles the package and warms the disk
    torch, added = [], []
    for _ in range(options.repeat):
        torch.append(milliseconds(TORCH))
        added.append(milliseconds(ADDED))
    for name, taken in (("import torch", torch), ("import wise_atta adds", added)):
        print(f"{name:<22} {statistics.median(taken):>7.0f} ms  ({min(taken):.0f} to {max(taken):.0f})")
    if statistics.median(added) > LIMIT:
        sys.exit(f"more than the {LIMIT} ms that an import may add")


if __name__ == "__main__":
    main()
