"""WISE-ATTA's update: norm parameters by λ_sup·L_sup + λ_ent·L_ent, then the head by L_sup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from wise_atta import errors
from wise_atta.anchor import Anchor
from wise_atta.how.labels import Labels
from wise_atta.how.objective import Entropy, Objective
from wise_atta.how.optimizer import check_rate
from wise_atta.how.update import GradientUpdate, lean_to_batch, record, skipped
from wise_atta.model import Forward, Spec, Version, Weights
from wise_atta.part import at_least, share

Head: TypeAlias = Literal["full", "bias", "none"]
_HEADS: dict[Head, Spec | None] = {"full": "head", "bias": "head.bias", "none": None}


@dataclass(kw_only=True, eq=False, repr=False)
class _Steps(GradientUpdate):
    """What the paper's rule and that of its code have in common."""

    objective: Objective | None = None
    norm: Spec = "norm"
    supervise_norm: bool = True
    train_head: Head = "full"
    only_selected: bool = False

    def prepare(self) -> None:
        if self.train_head not in _HEADS:
            raise errors.unknown("train_head", self.train_head, _HEADS)
        self.objective = Entropy(below=0.4) if self.objective is None else self.objective


@dataclass(kw_only=True, eq=False, repr=False)
class TwoStep(_Steps):
    """The paper's update (eq. 1 and the appendix on parameters), from one forward.

    An unlabelled batch moves the norm tensors by λ_ent·L_ent. A labelled batch moves them by
    λ_sup·L_sup + λ_ent·L_ent, then the head by L_sup computed from the features of the same forward; or, in place of
    the head, all tensors of a block by L_sup of a fresh forward.

    Parameters
    ----------
    lr, head_lr
        Learning rates of the two steps; one for both if `head_lr` is not given.
    lambda_sup, lambda_ent
        The weights of eq. 1.
    lambda_head
        The weight of L_sup in the second step.
    objective
        L_ent, or any other unlabelled objective: the entropy of confident samples if not given.
    norm
        Which tensors the first step moves.
    supervise_norm
        False keeps supervision off the norm tensors: they follow L_ent alone.
    train_head
        What the second step moves: the ``"full"`` head, its ``"bias"``, or ``"none"``.
    block
        A part of the network that takes the second step instead of the head (appendix on layers), norm tensors in it
        included. It has momenta of its own, and costs one more forward and backward.
    only_selected
        Leave batches without a label alone (appendix on skipped updates).
    pull
        How far all adapted tensors go back to the source after an update: θ ← (1 − pull)·θ + pull·θ₀.
    correct_prior
        Whether the scored logits lean towards the classes that the batch holds, see `lean_to_batch`.
    """

    head_lr: float | None = None
    lambda_sup: float = 0.9
    lambda_ent: float = 0.1
    lambda_head: float = 1.0
    block: Spec | None = None
    pull: float = 0.0
    correct_prior: bool = False

    def prepare(self) -> None:
        super().prepare()
        share(pull=self.pull)
        at_least(0, lambda_sup=self.lambda_sup, lambda_ent=self.lambda_ent, lambda_head=self.lambda_head)
        self.head_lr = self.lr if self.head_lr is None else self.head_lr
        check_rate(self.head_lr)
        self.runs_again = self.block is not None
        second = _HEADS[self.train_head] if self.block is None else self.block
        self.adapts = {"norm": self.norm} | ({} if second is None else {"second": second})
        # What takes the second step, if anything.
        self._second = None if second is None else "head" if self.block is None else "block"

    def start(self, model: Weights, anchor: Anchor | None = None) -> None:
        super().start(model, anchor)
        if self.block is not None:
            self._inside = frozenset(model.select(self.block))
            self.second = self.make_optimizer(model, share=self.optimizer)

    def output(self, forward: Forward) -> Tensor:
        logits = forward.logits.detach()
        return lean_to_batch(logits) if self.correct_prior else logits

    @property
    def unlabelled_step(self) -> tuple[str, float]:
        return "norm", self.lambda_ent

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        sums = self.sums(forward, labels)
        ent, sup = sums.unlabelled(), sums.supervised()
        if ent is None and sup is None:
            return skipped()
        # Both gradients before either step: the head's features are those of the forward, and what fails, fails whole.
        # The large one first: a device computes it while the host prepares the other.
        by_norm = sums.gradients(  # eq. 1: λ_sup·L_sup + λ_ent·L_ent
            "norm", (self.lambda_sup, sup if self.supervise_norm else None), (self.lambda_ent, ent)
        )
        second = None if sup is None else self._second
        by_head = sums.of_head("second", self.lambda_head) if second == "head" else {}
        # All is published together: nobody sees half of an update.
        if by_norm:
            self.optimizer.step(by_norm, publish=False)
        if by_head:
            self.optimizer.step(by_head, lr=self.head_lr, publish=False)
        if second == "block":
            self._step_of_block(forward, labels)
        if by_norm or second is not None:
            self.optimizer.publish(self.pull)
        return record(ent=ent, sup=sup)

    def _step_of_block(self, forward: Forward, labels: Labels) -> None:
        model = self.model
        again = model.forward(forward.inputs, version=self.optimizer.unseen, grad=True, beside=forward)
        loss = self.lambda_head * labels.loss(labels.outputs(model, again)[0])
        gradients = model.gradients(loss, again.version, ["norm", "second"])
        # Norm tensors outside the block share a group with those inside: a gradient of zero leaves them where they are.
        for group, own in gradients.items():
            names = model.layout.groups[group]
            gradients[group] = [g if n in self._inside else g.zero_() for n, g in zip(names, own, strict=True)]
        self.second.step(gradients, lr=self.head_lr, publish=False)

    def state_dict(self) -> dict[str, Any]:
        second = {} if self.block is None else {"second": self.second.state_dict()}
        return super().state_dict() | second

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.block is not None:
            self.second.load_state_dict(state["second"])
        super().load_state_dict(state)


@dataclass(kw_only=True, eq=False, repr=False)
class PublishedTwoStep(_Steps):
    """The sequence of the paper's published code, for comparison: two forwards and two steps of a labelled batch.

    Unlabelled batch: `unlabelled`·L_ent on norm tensors and head bias, with the second learning rate. Labelled batch:
    `ent`·L_ent + `sup`·L_sup on the norm tensors, then a fresh forward and `sup`·L_sup on norm tensors and head bias
    with the second learning rate. One momentum a tensor over all steps. The anchor follows after every step.

    Parameters
    ----------
    lr, second_lr
        The published code has one pair for each data set (5e-4 and 2e-4 for ImageNet-C with a ResNet-50).
    unlabelled, ent, sup
        Loss weights of the published code. With `sup` 0 the labels are withheld: a labelled batch takes the larger
        unlabelled step and no other, which tells the two apart.
    objective, norm, supervise_norm, train_head, only_selected
        As for `TwoStep`; the published code trains the head's bias.
    """

    runs_again = True
    moves_anchor = True
    lr: float = 5e-4
    second_lr: float = 2e-4
    unlabelled: float = 0.1
    ent: float = 1.7
    sup: float = 0.15
    train_head: Head = "bias"

    def prepare(self) -> None:
        super().prepare()
        check_rate(self.second_lr)
        head = _HEADS[self.train_head]
        self.adapts = {"norm": self.norm} | ({} if head is None else {"head": head})
        self._head = [] if head is None else ["head"]

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        model, sums = self.model, self.sums(forward, labels)
        ent, sup = sums.unlabelled(), sums.supervised()
        losses = record(ent=ent, sup=sup)
        reached = []
        if sup is None and ent is not None:
            reached.append(self._step(self.unlabelled * ent.graph, forward, ["norm", *self._head], self.second_lr))
        if sup is not None:
            first = [] if ent is None else [self.ent * ent.graph]
            second = self._head if self.sup else []  # labels withheld: the larger unlabelled step alone
            if self.sup and self.supervise_norm:
                first.append(self.sup * sup.graph)
                second = ["norm", *second]
            if first:
                reached.append(self._step(torch.stack(first).sum(), forward, ["norm"], self.lr))
            if second:
                again = model.forward(forward.inputs, version=self.optimizer.unseen, grad=True, beside=forward)
                loss_again = self.sup * labels.loss(labels.outputs(model, again)[0])
                reached.append(self._step(loss_again, again, second, self.second_lr))
        if reached:
            self.optimizer.publish()
        for version in reached:
            if self.anchor is not None:
                self.anchor.follow(version)
        return losses

    def _step(self, loss: Tensor, forward: Forward, groups: list[str], lr: float) -> Version:
        """A step that nobody sees yet, and where it led."""
        self.optimizer.step(self.model.gradients(loss, forward.version, groups), lr=lr, publish=False)
        return Version(self.optimizer.unseen.flat.clone(), self.model.layout)
