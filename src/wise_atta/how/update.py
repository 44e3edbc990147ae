"""Update rules: how a batch, with whatever labels have come, changes the adapted tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from wise_atta import errors
from wise_atta.anchor import Anchor
from wise_atta.how.labels import Labels
from wise_atta.how.objective import Entropy, Objective
from wise_atta.how.optimizer import Kind, Optimizer
from wise_atta.how.sums import Loss, Sums
from wise_atta.model import Forward, Spec, Version, Weights
from wise_atta.part import Part, share
from wise_atta.stream import Inputs


class Question(Protocol):
    """What a rule's own teacher has to know of a question: its id, its sample, and where that came from."""

    @property
    def id(self) -> str: ...
    @property
    def input(self) -> Inputs: ...
    @property
    def batch(self) -> int: ...
    @property
    def index(self) -> int: ...


class Update(Part):
    """A rule of learning. A subclass says which tensors it adapts and what one batch does to them.

    What `learn` changes it replaces, and does not write to: tensors, lists and dicts of its own and of its parts. So a
    batch that could not be learned, because memory ran out, say, leaves everything as it was. See `remember`.

    Attributes
    ----------
    adapts
        Groups of tensors, in the words of `Weights(adapt=…)`. Empty: nothing adapts.
    objective
        What the unlabelled samples teach, where that is a part of its own: started, reset and saved with the rule.
    second
        An optimizer of a second step, where that has momenta of its own; saved with the rule.
    needs_graph
        Whether `learn` wants the forward with its graph.
    only_selected
        Whether batches without a granted label are left alone.
    runs_again
        Whether `learn` may run the network on the same inputs once more.
    moves_anchor
        Whether the rule lets the anchor follow by itself; otherwise it follows once a batch.
    teacher_cost
        What a label of the rule's own teacher costs, in labels. None: it has no teacher, and people answer.
    """

    adapts: Mapping[str, Spec] = {}
    objective: Objective | None = None
    second: Optimizer | None = None
    needs_graph: bool = True
    only_selected: bool = False
    runs_again: bool = False
    moves_anchor: bool = False
    teacher_cost: int | None = None

    @property
    def needs_statistics(self) -> bool:
        """Whether `learn` wants the forward with the statistics that it normalised with."""
        return self.objective is not None and self.objective.needs_statistics

    def start(self, model: Weights, anchor: Anchor | None = None) -> None:
        """Take charge of a classifier whose tensors are at the source."""
        if hasattr(self, "model"):
            raise errors.BadConfig(f"this {type(self).__name__} serves another adapter already: make one for each")
        if self.objective is not None:
            self.objective.start(model)
        self.model = model
        self.anchor = anchor
        self.optimizer = self.make_optimizer(model)

    def make_optimizer(self, model: Weights) -> Optimizer:
        """The optimizer of this rule."""
        return Optimizer(model)

    def output(self, forward: Forward) -> Tensor:
        """The logits that count as the prediction; the forward's own unless a method corrects them."""
        return forward.logits.detach()

    def predicts(self) -> Version:
        """The values that predict, for an exported model: the live ones, unless a method scores another's word."""
        return self.model.live

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        """Learn from one batch and its labels. Gives the losses, for the record; `skipped()` if there was no step."""
        raise NotImplementedError

    @property
    def unlabelled_step(self) -> tuple[str, float] | None:
        """The group that `learn` moves by the objective alone where there is no label, and its weight; None: no such.

        What is known beforehand can be computed while the host still waits for the batch's score.
        """
        return None

    def sums(self, forward: Forward, labels: Labels) -> Sums:
        """The losses of a batch: those of the engine that ran its forward, or by autograd."""
        assert self.objective is not None
        return (forward.notes or Sums)(self.model, self.objective, forward, labels)

    def consult(self, forward: Forward, questions: Sequence[Question], sent: int) -> dict[str, int]:
        """Let the rule's own teacher answer open questions when it is time, and learn from it: id → class.

        `sent` says how many of them are of this batch.
        """
        return {}

    def snapshot(self) -> dict[str, Tensor]:
        """The adapted tensors as they are, to come back to."""
        return {"flat": self.model.live.flat}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Return to a snapshot, without momenta."""
        self.optimizer.forget()
        self.optimizer.move(snapshot["flat"])

    def reset(self) -> None:
        """Return tensors, optimizer and running quantities to the source."""
        for part in self._parts().values():
            part.reset()
        super().reset()

    def state_dict(self) -> dict[str, Any]:
        return {key: part.state_dict() for key, part in self._parts().items()} | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for key, part in self._parts().items():
            part.load_state_dict(state[key])

    def _parts(self) -> dict[str, Any]:
        """What is reset and saved beside the fields."""
        parts = {"optimizer": self.optimizer, "objective": self.objective, "second": self.second}
        return {key: part for key, part in parts.items() if part is not None}

    def __repr__(self) -> str:
        options = (f"{f.metadata.get('option', f.name)}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
        return f"{type(self).__name__}({', '.join(options)})"


@dataclass(kw_only=True, eq=False, repr=False)
class GradientUpdate(Update):
    """A rule whose steps an optimizer takes.

    Parameters
    ----------
    lr, momentum, nesterov, optimizer
        See `Optimizer`.
    """

    lr: float = 1e-3
    momentum: float = 0.9
    nesterov: bool = True
    # The attribute of that name is the optimizer itself.
    optimizer: InitVar[Kind] = "sgd"
    kind: Kind = field(init=False, metadata={"option": "optimizer"})

    def __post_init__(self, optimizer: Kind) -> None:
        self.kind = optimizer
        self.prepare()

    def prepare(self) -> None:
        """Check the options, and make what they describe: `adapts`, the objective, parts. A subclass says how."""

    def make_optimizer(self, model: Weights, share: Optimizer | None = None) -> Optimizer:
        return Optimizer(model, kind=self.kind, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, share=share)


@dataclass(kw_only=True, eq=False, repr=False)
class OneGroup(GradientUpdate):
    """A rule that adapts one group of tensors, by one loss after the other.

    Parameters
    ----------
    adapt
        Which tensors.
    """

    adapt: Spec = "norm"

    def __post_init__(self, optimizer: Kind) -> None:
        self.adapts = {"adapted": self.adapt}
        super().__post_init__(optimizer)

    def descend(self, loss: Tensor, version: Version, *, publish: bool = True) -> None:
        """One step on a loss by its gradient at a version of the tensors."""
        self.optimizer.step(self.model.gradients(loss, version, ["adapted"]), publish=publish)


def lean_to_batch(logits: Tensor) -> Tensor:
    """Logits that lean towards the classes that the batch seems to hold (ROID's correction of the prior).

    z·(q+γ)/(1+γC) with q the batch mean of p and γ = max(1/n, 1/C)/max q.
    """
    n, classes = logits.shape
    q = logits.softmax(dim=1).mean(dim=0)
    gamma = max(1 / n, 1 / classes) / q.max()
    return logits * (q + gamma) / (1 + gamma * classes)


def skipped() -> dict[str, Tensor]:
    """The record of a batch in which nothing passed the filters, so that no step was taken.

    Summed over a run it counts such batches.
    """
    return {"skipped": torch.ones(())}


def record(**losses: Loss | None) -> dict[str, Tensor]:
    """The record of a batch: its losses by name; `skipped()` if there is none."""
    return {name: loss.value for name, loss in losses.items() if loss is not None} or skipped()


class NoUpdate(Update):
    """Learn nothing: the source model, or batch statistics alone."""

    needs_graph = False

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        return {}


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
