"""One step a batch on one unlabelled objective (tent and its kin)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from wise_atta.how.labels import Labels
from wise_atta.how.objective import Entropy, Objective
from wise_atta.how.update import OneGroup, record, skipped
from wise_atta.model import Forward
from wise_atta.part import share


@dataclass(kw_only=True, eq=False, repr=False)
class Descend(OneGroup):
    """One optimizer step a batch on an unlabelled objective; labels are not used.

    Parameters
    ----------
    objective
        What to minimise; the mean entropy if not given.
    adapt
        Which tensors.
    lr, momentum, nesterov, optimizer
        See `Optimizer`.
    pull
        How far the tensors go back to the source after each step: θ ← (1 − pull)·θ + pull·θ₀.
    """

    objective: Objective | None = field(default=None, kw_only=False)
    pull: float = 0.0

    def prepare(self) -> None:
        share(pull=self.pull)
        self.objective = Entropy() if self.objective is None else self.objective

    @property
    def unlabelled_step(self) -> tuple[str, float]:
        return "adapted", 1.0

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        sums = self.sums(forward, labels)
        loss = sums.unlabelled()
        if loss is None:
            return skipped()
        self.optimizer.step(sums.gradients("adapted", (1.0, loss)), publish=False)
        self.optimizer.publish(self.pull)
        return record(loss=loss)
