"""Which samples can a stronger model help with? Those neither too unsure nor too sure, and unlike what it saw."""

from __future__ import annotations

from typing import Any

from wise_atta import errors, signals
from wise_atta.how import Redundancy
from wise_atta.view import View
from wise_atta.what.selector import Selector, check_count


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

    def __init__(
        self,
        *,
        above: float | None = None,
        below: float = 0.4,
        epsilon: float = 0.05,
        mean_momentum: float = 0.9,
        lower: bool = False,
        seed: int = 0,
    ) -> None:
        if not 0 <= (above or 0) < below:
            raise errors.BadConfig(f"above and below are shares of ln C, 0 ≤ above < below, not {above} and {below}")
        super().__init__(seed=seed)
        self.above = above
        self.below = below
        self.lower = lower
        self.redundancy = Redundancy(epsilon, mean_momentum)
        # Samples seen, the sum of their entropies, and the mean entropy of the first batch.
        self._seen, self._total = 0, 0.0
        self._first: float | None = None

    def pick(self, view: View, k: int = 1) -> list[int]:
        check_count(k)
        entropy, probs = view.entropy, view.probs
        seen, total, first = self._seen + len(view), self._total + float(entropy.sum()), self._first
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
        self._seen, self._total, self._first = seen, total, first
        return rows

    def reset(self) -> None:
        super().reset()
        self.redundancy.reset()
        self._seen, self._total, self._first = 0, 0.0, None

    def state_dict(self) -> dict[str, Any]:
        own = {"mean": self.redundancy.state_dict(), "entropy": [self._seen, self._total, self._first]}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.redundancy.load_state_dict(state["mean"])
        self._seen, self._total, self._first = state["entropy"]

    def __repr__(self) -> str:
        return (
            f"Band(above={self.above}, below={self.below}, epsilon={self.redundancy.epsilon}, "
            f"mean_momentum={self.redundancy.mean.momentum}, lower={self.lower})"
        )
