"""How can few labels train a whole network? Beside many confident predictions of the source model, from buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wise_atta import errors, signals
from wise_atta.how.labels import Labels
from wise_atta.how.optimizer import Optimizer
from wise_atta.how.replay import Draw, Kept, Replay, stack
from wise_atta.how.update import Update, skipped
from wise_atta.model import Forward, Spec, Version, Weights
from wise_atta.stream import Inputs, tree_map


class Anchors(Replay):
    """Labelled samples, with their features under the current model."""

    features: Tensor | None = None

    def measure(self, model: Weights, version: Version, chunk: int) -> None:
        """Take the features anew, `chunk` samples a forward."""
        inputs = [kept.inputs for kept in self.kept]
        found = [_features(model, version, inputs[i : i + chunk]) for i in range(0, len(inputs), chunk)]
        self.features = torch.cat([features.flatten(1).cpu() for features in found]) if found else None

    def reset(self) -> None:
        super().reset()
        self.features = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"features": None if self.features is None else self.features.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.features = None if state["features"] is None else state["features"].clone()


class Anchored(Update):
    """Some steps on (1 − α)·CE(pseudo) + α·CE(queried), α the share of queried anchors among all (SimATTA).

    Pseudo anchors are samples of low entropy under the source model, with its class; queried ones have a label.

    Parameters
    ----------
    queried
        The buffer of labelled samples, which a selector may look at.
    adapt
        Which tensors.
    lr, momentum
        Of SGD, begun anew with every batch.
    steps, batch
        Steps a batch of the stream, and how many samples of either buffer each takes, with replacement.
    e_l, most
        Samples with H < e_l (nats) under the source model become pseudo anchors, the surest `most` of a batch.
    size
        How many anchors of either kind are kept, the oldest leaving first; None keeps all.
    draw, seed
        Which samples a step takes, see `Replay`.
    """

    needs_graph = False

    def __init__(
        self,
        queried: Anchors | None = None,
        *,
        adapt: Spec = "all",
        lr: float = 1e-4,
        momentum: float = 0.9,
        steps: int = 10,
        batch: int = 32,
        e_l: float = 0.1,
        most: int = 100,
        size: int | None = 300,
        draw: Draw | None = None,
        seed: int = 0,
    ) -> None:
        if min(steps, batch, most) < 1:
            raise errors.BadConfig(f"steps, batch and most must be at least 1, not {steps}, {batch} and {most}")
        self.queried = Anchors(size, name="queried", repeat=True, draw=draw, seed=seed) if queried is None else queried
        self.pseudo = Replay(size, name="pseudo", repeat=True, draw=draw, seed=seed)
        self.adapts = {"adapted": adapt}
        self.lr = lr
        self.momentum = momentum
        self.steps = steps
        self.batch = batch
        self.e_l = e_l
        self.most = most
        self._batches = 0

    def make_optimizer(self, model: Weights) -> Optimizer:
        return Optimizer(model, lr=self.lr, momentum=self.momentum, nesterov=False)

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        model = self.model
        self._collect(forward, labels)
        if not self.pseudo and not self.queried:
            self._batches += 1
            return skipped()
        alpha = len(self.queried) / (len(self.queried) + len(self.pseudo))  # α
        self.optimizer.forget()
        for step in range(self.steps):
            counter = self._batches * self.steps + step
            pseudo, queried = (buffer.sample(self.batch, counter) for buffer in (self.pseudo, self.queried))
            # The optimizer's own values serve the forward: they change only once the graph has been used.
            version = self.optimizer.unseen
            inputs = stack([kept.inputs for kept in (*pseudo, *queried)], model.device)
            logits = model.forward(inputs, version=version, grad=True).logits
            loss = (1 - alpha) * _loss(logits[: len(pseudo)], pseudo) + alpha * _loss(logits[len(pseudo) :], queried)
            self.optimizer.step(model.gradients(loss, version, ["adapted"]), publish=False)
        self.queried.measure(model, self.optimizer.unseen, chunk=self.batch)
        self.optimizer.publish()
        self._batches += 1
        return {"loss": loss.detach(), "alpha": torch.tensor(alpha)}

    def _collect(self, forward: Forward, labels: Labels) -> None:
        source = self.model.forward(forward.inputs, version=self.model.source(), statistics="source").logits
        entropy = signals.entropy(source)
        surest = entropy.argsort(stable=True)[: self.most]
        rows = surest[entropy[surest] < self.e_l]  # H < e_l under the source model, at most 100
        sure = tree_map(lambda leaf: leaf[rows], forward.inputs)
        self.pseudo.add(sure, source[rows].argmax(dim=1).tolist(), [(self._batches, row) for row in rows.tolist()])
        prompt = len(labels.rows)
        if prompt:
            asked = tree_map(lambda leaf: leaf[labels.rows], forward.inputs)
            self.queried.add(asked, labels.labels[:prompt], labels.places[:prompt], labels.weights[:prompt])
        for i, late in enumerate(labels.late, start=prompt):
            self.queried.add(late.inputs, [late.label], [labels.places[i]], [late.weight])

    def reset(self) -> None:
        super().reset()
        self.pseudo.reset()
        self.queried.reset()
        self._batches = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "pseudo": self.pseudo.state_dict(),
            "queried": self.queried.state_dict(),
            "batches": self._batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pseudo.load_state_dict(state["pseudo"])
        self.queried.load_state_dict(state["queried"])
        self._batches = state["batches"]
        super().load_state_dict(state)

    def __repr__(self) -> str:
        return (
            f"Anchored({self.queried!r}, adapt={self.adapts['adapted']!r}, lr={self.lr}, steps={self.steps}, "
            f"batch={self.batch}, e_l={self.e_l}, most={self.most}, size={self.pseudo.size})"
        )


def _features(model: Weights, version: Version, samples: Sequence[Inputs]) -> Tensor:
    try:
        return model.forward(stack(samples, model.device), version=version).features
    except errors.BadInput:
        if len(samples) > 1:
            raise
        # One value a channel has no batch statistics. The sample comes twice, as it may in a step.
        return model.forward(stack([*samples, *samples], model.device), version=version).features[:1]


def _loss(logits: Tensor, samples: Sequence[Kept]) -> Tensor:
    """Mean cross-entropy, each sample weighted as its answer says; 0 of none."""
    if not samples:
        return logits.sum()
    targets = torch.tensor([kept.label for kept in samples], device=logits.device)
    weights = torch.tensor([kept.weight for kept in samples], device=logits.device, dtype=logits.dtype)
    return (functional.cross_entropy(logits, targets, reduction="none") * weights).mean()
