"""How does an unlabelled method learn? One step on one objective (tent and its kin)."""

from __future__ import annotations

from torch import Tensor

from wise_atta.how.labels import Labels
from wise_atta.how.objective import Entropy, Objective
from wise_atta.how.optimizer import Kind, Optimizer, check_pull
from wise_atta.how.update import Update, skipped
from wise_atta.model import Forward, Spec, Weights


class Descend(Update):
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

    objective: Objective

    def __init__(
        self,
        objective: Objective | None = None,
        *,
        adapt: Spec = "norm",
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = True,
        optimizer: Kind = "sgd",
        pull: float = 0.0,
    ) -> None:
        check_pull(pull)
        self.objective = objective or Entropy()
        self.adapts = {"adapted": adapt}
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.kind: Kind = optimizer
        self.pull = pull

    def make_optimizer(self, model: Weights) -> Optimizer:
        return Optimizer(model, kind=self.kind, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)

    @property
    def unlabelled_step(self) -> tuple[str, float]:
        return "adapted", 1.0

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        sums = self.sums(forward, labels)
        loss = sums.unlabelled()
        if loss is None:
            return skipped()
        self.optimizer.step(sums.gradients("adapted", (1.0, loss)), publish=False)
        self.optimizer.finish(self.pull)
        return {"loss": loss.value}

    def __repr__(self) -> str:
        parts = f"{self.objective!r}, adapt={self.adapts['adapted']!r}, lr={self.lr}, optimizer={self.kind!r}"
        return f"{type(self).__name__}({parts}, pull={self.pull})"
