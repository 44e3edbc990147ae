"""Few labels beside many confident predictions of the source model, from buffers, for a whole network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wise_atta import errors, signals
from wise_atta.how.labels import Labels
from wise_atta.how.replay import Draw, Kept, Replay, stack
from wise_atta.how.update import OneGroup, skipped
from wise_atta.model import Forward, Spec, Version, Weights
from wise_atta.part import SAVED_AS, at_least, running
from wise_atta.stream import Inputs, tree_map


@dataclass(eq=False)
class Anchors(Replay):
    """Labelled samples, with their features under the current model."""

    features: Tensor | None = running(key="features")

    def measure(self, model: Weights, version: Version, chunk: int) -> None:
        """Take the features anew, `chunk` samples a forward."""
        inputs = [kept.inputs for kept in self.kept]
        chunks = [_features(model, version, inputs[i : i + chunk]) for i in range(0, len(inputs), chunk)]
        self.features = torch.cat([features.flatten(1).cpu() for features in chunks]) if chunks else None


@dataclass(kw_only=True, eq=False, repr=False)
class Anchored(OneGroup):
    """Some steps on (1 − α)·CE(pseudo) + α·CE(queried), α the share of queried anchors among all (SimATTA).

    Pseudo anchors are samples of low entropy under the source model, with its class; queried ones have a label.

    Parameters
    ----------
    queried
        The buffer of labelled samples, which a selector may look at. None: one of its own.
    adapt
        Which tensors.
    lr, momentum, nesterov, optimizer
        See `Optimizer`, begun anew with every batch.
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

    queried: Anchors = field(default=None, kw_only=False, metadata={SAVED_AS: "queried"})  # type: ignore[assignment]
    lr: float = 1e-4
    nesterov: bool = False
    adapt: Spec = "all"
    steps: int = 10
    batch: int = 32
    e_l: float = 0.1
    most: int = 100
    size: int | None = 300
    draw: Draw | None = field(default=None, repr=False)
    seed: int = 0
    pseudo: Replay = running(key="pseudo")
    _batches: int = running(0, key="batches")

    def prepare(self) -> None:
        at_least(1, steps=self.steps, batch=self.batch, most=self.most)
        buffers: dict[str, Any] = {"repeat": True, "draw": self.draw, "seed": self.seed}
        if self.queried is None:
            self.queried = Anchors(self.size, name="queried", **buffers)
        self.pseudo = Replay(self.size, name="pseudo", **buffers)

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
            self.descend(loss, version, publish=False)
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
