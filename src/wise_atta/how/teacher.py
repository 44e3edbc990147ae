"""A student that follows its own slow average, the teacher, and forgets a little of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from wise_atta import errors, rng
from wise_atta.anchor import Anchor
from wise_atta.how.consistency import cross_entropy, symmetric_cross_entropy
from wise_atta.how.labels import Labels
from wise_atta.how.restore import Restore
from wise_atta.how.update import OneGroup
from wise_atta.how.views import Augment, Augmentation
from wise_atta.model import Forward, Spec, Version, Weights
from wise_atta.part import running
from wise_atta.stream import Inputs


@dataclass(kw_only=True, eq=False, repr=False)
class TeacherStudent(OneGroup):
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
    returning
        What returns to the source after each step.
    augment
        What makes a view: a function (inputs, generator) → inputs.
    seed
        Of the views. Those of batch t depend on the seed and t alone.
    """

    moves_anchor = True

    lr: float = 0.01
    adapt: Spec = "all"
    threshold: float = 0.1
    views: int = 32
    symmetric: bool = True
    returning: Restore = field(default_factory=Restore)
    augment: Augmentation = field(default=None, repr=False)  # type: ignore[assignment]  # None: `Augment`
    seed: int = 0
    _batches: int = running(0, key="batches")

    def prepare(self) -> None:
        if self.views < 1:
            raise errors.BadConfig(f"at least one view is needed, not {self.views}: threshold=0 uses none")
        if self.augment is None:
            self.augment = Augment()

    def start(self, model: Weights, anchor: Anchor | None = None) -> None:
        if anchor is None:
            raise errors.BadConfig("a student needs its teacher: give the adapter anchor=Anchor(0.999)")
        super().start(model, anchor)
        self.teacher = anchor

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
        self.descend(loss, forward.version, publish=False)
        student = self.optimizer.flat.detach()
        self.teacher.follow(Version(student, model.layout, grad=False))  # θ' ← 0.999·θ' + 0.001·θ
        self.optimizer.move(torch.where(returns, model.source_flat(), student))  # some θᵢ ← θ₀ᵢ
        self._batches += 1
        return {"loss": loss.detach()}
