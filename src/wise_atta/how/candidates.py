"""Candidate learning rates: several are tried from the same state, and labels choose among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wise_atta import errors
from wise_atta.anchor import Anchor
from wise_atta.average import Average
from wise_atta.how.labels import Labels
from wise_atta.how.objective import Entropy, Objective
from wise_atta.how.optimizer import Optimizer, check_rate
from wise_atta.how.update import GradientUpdate, skipped
from wise_atta.model import Forward, Spec, Version, Weights
from wise_atta.part import running
from wise_atta.stream import tree_map

RATES = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3)


@dataclass(kw_only=True, eq=False, repr=False)
class Candidates(GradientUpdate):
    """A step on unlabelled samples at the best of several learning rates, then a supervised step (HILTTA).

    All candidates start from the same state, so they share one gradient; momenta do not depend on the rate, and the
    candidates lie on one line. Each is scored by its distance to the source model on unlabelled samples and its loss on
    labelled ones. A batch without a label takes the rate that is best so far, the first before there was any label.

    Parameters
    ----------
    objective
        What to minimise on unlabelled samples; the mean entropy (tent) if not given.
    rates
        The candidates.
    score_momentum
        Of the moving average of the scores.
    supervised_lr
        Of the supervised step, which is Adam's.
    norm
        Which tensors the unsupervised step moves. The supervised one moves all.
    momentum, nesterov, optimizer
        Of the unsupervised step, see `Optimizer`.
    """

    objective: Objective | None = field(default=None, kw_only=False)
    rates: Sequence[float] = RATES
    score_momentum: float = 0.5
    supervised_lr: float = 1e-5
    norm: Spec = "norm"
    # No option: what a step adds at this rate is the direction that every candidate goes.
    lr: float = field(default=1.0, init=False, repr=False)
    supervised: Optimizer = running(key="supervised")
    scores: Average = running(key="scores")

    def prepare(self) -> None:
        if not self.rates:
            raise errors.BadConfig("there is no learning rate to choose from: give rates at least one")
        for rate in (*self.rates, self.supervised_lr):
            check_rate(rate)
        self.objective = Entropy() if self.objective is None else self.objective
        self.rates = tuple(self.rates)
        self.scores = Average(self.score_momentum)
        self.adapts = {"norm": self.norm, "rest": "all"}

    def start(self, model: Weights, anchor: Anchor | None = None) -> None:
        super().start(model, anchor)
        self.supervised = Optimizer(model, kind="adam", lr=self.supervised_lr, share=self.optimizer)

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        model, losses, where = self.model, dict[str, Tensor](), self.model.layout.slices["norm"]
        unlabelled = self._unlabelled(forward, labels)
        loss = None if unlabelled is None else self.sums(unlabelled, Labels()).unlabelled()
        if loss is None and not labels:
            return skipped()
        if loss is not None and unlabelled is not None:
            begin = self.optimizer.flat[where].detach().clone()
            self.optimizer.step(model.gradients(loss.graph, unlabelled.version, ["norm"]), publish=False)
            line = _Line(self.optimizer.flat.detach(), where, begin)
            if labels:
                self.scores.follow(self._score(forward, labels, line))
            best = 0 if self.scores.value is None else int(self.scores.value.argmin())
            # Where the supervised step follows, both are published together.
            self.optimizer.move(line.at(self.rates[best]), publish=not labels)
            losses |= {"loss": loss.value, "rate": torch.tensor(self.rates[best])}
        if labels:
            again = model.forward(forward.inputs, version=self.optimizer.unseen, grad=True)
            supervised = labels.loss(labels.outputs(model, again)[0])
            self.supervised.step(model.gradients(supervised, again.version, ["norm", "rest"]))
            losses["sup"] = supervised.detach()
        return losses

    def _unlabelled(self, forward: Forward, labels: Labels) -> Forward | None:
        """The forward of the unlabelled samples by themselves; None where too few are left to normalise."""
        if not labels.rows:
            return forward
        rest = ~labels.mask(forward)
        if int(rest.sum()) < (2 if self.model.has_batch_norm else 1):
            return None
        return self.model.forward(tree_map(lambda leaf: leaf[rest], forward.inputs), grad=True)

    def _score(self, forward: Forward, labels: Labels, line: _Line) -> Tensor:
        """For each candidate: mean (p − p_source)² on the unlabelled + CE on the labelled, each scaled to [0, 1]."""
        model, rest = self.model, ~labels.mask(forward)
        source = model.forward(forward.inputs, version=model.source()).logits.softmax(dim=1)
        apart, wrong = [], []
        for rate in self.rates:
            version = Version(line.at(rate).to(model.live.flat.dtype), model.layout, grad=False)
            tried = model.forward(forward.inputs, version=version)
            apart.append((tried.logits.softmax(dim=1) - source)[rest].square().mean())
            wrong.append(labels.loss(labels.outputs(model, tried, grad=False)[0]))
        return _scaled(torch.stack(apart)) + _scaled(torch.stack(wrong))


@dataclass(eq=False)
class _Line:
    """Where the candidates lie: all values, and begin + rate·direction of those that the unsupervised step moves."""

    flat: Tensor
    where: slice
    begin: Tensor

    def at(self, rate: float) -> Tensor:
        """A copy of all values with those of one candidate."""
        candidate = self.flat.clone()
        candidate[self.where] = self.begin + rate * (self.flat[self.where] - self.begin)
        return candidate


def _scaled(values: Tensor) -> Tensor:
    """To [0, 1] over the candidates; zeros where they are all the same, and 1, the worst, where one is no number."""
    finite = values.isfinite()
    low, high = torch.where(finite, values, torch.inf).min(), torch.where(finite, values, -torch.inf).max()
    return torch.where(finite, (values - low) / torch.where(high > low, high - low, 1.0), 1.0)
