"""How long does one decision take? Microseconds per `BudgetPaced.decide`, beside the plain way through np.quantile.

    python benchmarks/decide.py
    python benchmarks/decide.py --decisions 20000 --windows 10000

Both are fed the same scores with a full window, first normal scores (no ties), then Binomial(64, 0.3) counts, where
ties="share" also draws. The plain way keeps the window in a numpy array and applies Algorithm 1 without an account.
Each is timed in five blocks, in turn; the median block counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from wise_atta.when import BudgetPaced

BLOCKS = 5


def plain(window: int, ratio: float, horizon: float = 50, slack: float = 1) -> Callable[[float], int]:
    """Algorithm 1 with np.quantile over a ring buffer."""
    buffer = np.zeros(window)
    seen = spent = 0

    def decide(score: float) -> int:
        nonlocal seen, spent
        seen += 1
        debt = ratio * seen - spent
        if debt > slack:
            granted = 1
        elif seen == 1:
            granted = 0
        else:
            rate = min(max(ratio + debt / horizon, 0.0), 1.0)
            granted = int(score >= np.quantile(buffer[: min(seen - 1, window)], 1 - rate))
        buffer[(seen - 1) % window] = score
        spent += granted
        return granted

    return decide


def microseconds(decide: Callable[[float], int], scores: list[float]) -> float:
    """Mean time of one decision over these scores."""
    start = time.perf_counter()
    for score in scores:
        decide(score)
    return (time.perf_counter() - start) / len(scores) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, nargs="+", default=[250, 1000, 10_000], help="window sizes W")
    parser.add_argument("--decisions", type=int, default=5000, help="decisions timed for each")
    parser.add_argument("--ratio", type=float, default=0.2)
    options = parser.parse_args()

    print(f"{'window':>8} {'scores':>9} {'decide, µs':>11} {'np.quantile, µs':>16} {'ratio':>7}")
    for window in options.windows:
        generator = np.random.default_rng(0)
        size = window + options.decisions
        kinds = {
            "normal": generator.normal(size=size),
            "binomial": generator.binomial(64, 0.3, size=size).astype(float),
        }
        for kind, values in kinds.items():
            scores = values.tolist()
            ways = BudgetPaced(options.ratio, window=window).decide, plain(window, options.ratio)
            for decide in ways:
                for score in scores[:window]:
                    decide(score)
            block = options.decisions // BLOCKS
            times: tuple[list[float], list[float]] = ([], [])
            for start in range(window, window + BLOCKS * block, block):
                for taken, decide in zip(times, ways, strict=True):
                    taken.append(microseconds(decide, scores[start : start + block]))
            ours, naive = (statistics.median(taken) for taken in times)
            print(f"{window:>8} {kind:>9} {ours:>11.1f} {naive:>16.1f} {naive / ours:>6.1f}×")


if __name__ == "__main__":
    main()
