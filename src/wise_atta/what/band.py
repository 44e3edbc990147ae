"""Samples that a stronger model can help with: neither too unsure nor too sure, and unlike what it saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wise_atta import errors, signals
from wise_atta.average import Redundancy
from wise_atta.part import running
from wise_atta.view import View
from wise_atta.what.selector import Selector, check_count


@dataclass(kw_only=True, eq=False)
class Band(Selector):
    """E_min < H < E_max and |cos(p̄, p)| < ε, with p̄ the moving average of what was picked (CEMA).

    All that pass, or the k of them with the highest entropy, in the order of the batch.

    Parameters
    ----------
    above, below
        E_min and E_max as shares of ln C. The public configuration has no E_min.
    epsilon, mean_momentum
        ε, and the momentum of p̄. See `Redundancy`.
    lower
        Lower E_max with the mean entropy of all samples so far: E_max·min(1, H̄_t/H̄_1), as the paper's text has it; the
        public configuration keeps it constant.
    """

    above: float | None = None
    below: float = 0.4
    epsilon: float = 0.05
    mean_momentum: float = 0.9
    lower: bool = False
    balance: bool = field(default=False, init=False, repr=False)  # no option: it does not rank classes
    redundancy: Redundancy = running(key="mean")
    # Samples seen, the sum of their entropies, and the mean entropy of the first batch.
    _entropy: list[Any] = running([0, 0.0, None], key="entropy")

    def __post_init__(self) -> None:
        if not 0 <= (self.above or 0) < self.below:
            raise errors.BadConfig(
                f"above and below are shares of ln C, 0 ≤ above < below, not {self.above} and {self.below}"
            )
        self.redundancy = Redundancy(momentum=self.mean_momentum, epsilon=self.epsilon)

    def pick(self, view: View, k: int = 1) -> list[int]:
        check_count(k)
        entropy, probs = view.entropy, view.probs
        seen, total, first = self._entropy
        seen, total = seen + len(view), total + float(entropy.sum())
        first = total / seen if first is None else first
        limit = signals.entropy_threshold(view.classes, self.below)
        if self.lower and first > 0:
            limit *= min(1.0, total / seen / first)
        keep = (entropy < limit) & self.redundancy.new(probs)
        if self.above is not None:
            keep &= entropy > signals.entropy_threshold(view.classes, self.above)
        rows: list[int] = keep.nonzero().flatten().tolist()
        if len(rows) > k:
            best = entropy[rows].topk(k).indices
            rows = sorted(rows[i] for i in best.tolist())
        self.redundancy.follow(probs[rows])
        self._entropy = [seen, total, first]
        return rows
