"""How can a model teach itself? A student follows its own slow average, the teacher, and forgets a little of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wise_atta import errors, rng
from wise_atta.anchor import Anchor
from wise_atta.how.consistency import cross_entropy, symmetric_cross_entropy
from wise_atta.how.labels import Labels
from wise_atta.how.optimizer import Kind, Optimizer
from wise_atta.how.restore import Restore
from wise_atta.how.update import Update
from wise_atta.how.views import Augment, Augmentation
from wise_atta.model import Forward, Spec, Version, Weights
from wise_atta.stream import Inputs


class TeacherStudent(Update):
    """The student learns the teacher's prediction, which is also the one that is scored.

    The teacher is the adapter's `Anchor`, the source is read from the user's own module: neither is a copied network.

    Parameters
    ----------
    adapt, lr, momentum, nesterov, optimizer
        What the student adapts, and how. See `Optimizer`.
    threshold, views
        Where the source model's mean confidence is below `threshold`, the target is the teacher's mean logits over so
        many views of the batch.
    symmetric
        Half of the cross-entropy each way, instead of the student's against the target alone.
    restore
        What returns to the source after each step.
    augment
        What makes a view: a function (inputs, generator) → inputs.
    seed
        Of the views. Those of batch t depend on the seed and t alone.
    """

    moves_anchor = True

    def __init__(
        self,
        *,
        adapt: Spec = "all",
        lr: float = 0.01,
        momentum: float = 0.9,
        nesterov: bool = True,
        optimizer: Kind = "sgd",
        threshold: float = 0.1,
        views: int = 32,
        symmetric: bool = True,
        restore: Restore | None = None,
        augment: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        if views < 1:
            raise errors.BadConfig(f"at least one view is needed, not {views}: threshold=0 uses none")
        self.adapts = {"adapted": adapt}
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.kind: Kind = optimizer
        self.threshold = threshold
        self.views = views
        self.symmetric = symmetric
        self.returning = Restore(seed=seed) if restore is None else restore
        self.augment = Augment() if augment is None else augment
        self.seed = seed
        self._batches = 0

    def start(self, model: Weights, anchor: Anchor | None = None) -> None:
        if anchor is None:
            raise errors.BadConfig("a student needs its teacher: give the adapter anchor=Anchor(0.999)")
        super().start(model, anchor)
        self.teacher = anchor

    def make_optimizer(self, model: Weights) -> Optimizer:
        return Optimizer(model, kind=self.kind, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)

    def output(self, forward: Forward) -> Tensor:
        if forward.scored is None:
            with torch.no_grad():
                forward.scored = self._target(forward.inputs)
        return forward.scored

    def _target(self, inputs: Inputs) -> Tensor:
        model, teacher = self.model, self.teacher.version
        source = model.forward(inputs, version=model.source()).logits
        if source.softmax(dim=1).amax(dim=1).mean() >= self.threshold:  # the source model is confident
            return model.forward(inputs, version=teacher).logits
        total = torch.zeros_like(source)
        for view in range(self.views):  # (1/32) Σ teacher's logits of a view
            generator = rng.torch_cpu(self.seed, "views", self._batches * self.views + view)
            total += model.forward(self.augment(inputs, generator), version=teacher).logits
        return total / self.views

    def predicts(self) -> Version:
        return self.teacher.version

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        model, target = self.model, self.output(forward)
        returns = self.returning.draw(model.layout, self._batches).to(model.device)
        apart = symmetric_cross_entropy if self.symmetric else cross_entropy
        loss = apart(target, forward.logits).mean()
        self.optimizer.step(model.gradients(loss, forward.version, ["adapted"]), publish=False)
        student = self.optimizer.flat.detach()
        self.teacher.follow(Version(student, model.layout, grad=False))  # θ' ← 0.999·θ' + 0.001·θ
        self.optimizer.move(torch.where(returns, model.source_flat(), student))  # some θᵢ ← θ₀ᵢ
        self._batches += 1
        return {"loss": loss.detach()}

    def reset(self) -> None:
        super().reset()
        self._batches = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"batches": self._batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches = state["batches"]
        super().load_state_dict(state)

    def __repr__(self) -> str:
        return (
            f"TeacherStudent(adapt={self.adapts['adapted']!r}, lr={self.lr}, optimizer={self.kind!r}, "
            f"threshold={self.threshold}, views={self.views}, symmetric={self.symmetric}, restore={self.returning!r})"
        )
