"""WISE-ATTA as the paper prints it: when to ask (Algorithm 1), what to ask (drift), how to learn (eq. 1).

The functions stand in the order of the paper. Where it leaves room:

- At the first batch model and anchor are one and every drift is 0: ties are broken at random.
- L_ent is over all n samples in the equation; by default (`filtered`) it is over the confident ones that are not
  labelled, H < τ_ent: section 2.1 says that most methods do so, and the published code does.
- A labelled batch takes two steps: eq. 1 on the normalisation tensors, then L_sup on the classifier head (appendix,
  "Which parameters to adapt?"), from the features of the same forward. Each has a momentum of its own.
- A batch without a label and without a confident sample takes no step; the anchor follows all the same.
- The quantile interpolates linearly between two scores. A score that equals it is selected, as printed.
- Nothing in Algorithm 1 keeps Σ|Q_t| ≤ ⌊rT⌋: in its example below it takes 5 labels of 8 batches at r = 0.5. The
  package has an account behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from wise_atta.reference.common import (
    Answer,
    Optimizers,
    chance,
    descend,
    entropy,
    follow,
    look,
    norm_tensors,
    use_batch_statistics,
)
from wise_atta.reference.toy import toy

# The paper's rate on ImageNet-C. It has 1e-3 on ImageNet-R and -K, 5e-3 on ImageNet-A.
SGD = partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9, nesterov=True)


# Section 2: test-time adaptation


def l_ent(logits: Tensor, labelled: list[int], threshold: float | None) -> Tensor:
    """L_ent = (1/n) Σᵢ H(pᵢ); with a threshold over the samples below it that are not labelled. Of none it is 0."""
    h = entropy(logits)
    if threshold is not None:
        confident = h < threshold
        confident[labelled] = False
        h = h[confident]
    return h.mean() if len(h) else torch.zeros(())


def l_sup(logits: Tensor, labels: dict[int, int]) -> Tensor:
    """L_sup = (1/|Q|) Σ_Q −log p(x)_y, Q as {sample: class}. Of none it is 0."""
    if not labels:
        return torch.zeros(())
    return functional.cross_entropy(logits[list(labels)], torch.tensor(list(labels.values())))


# Section 3.1: batch selection


def utility(logits: Tensor, threshold: float) -> int:
    """Eq. 2: s_t = Σᵢ 1[H(pᵢ) < τ_ent], the confident mass of the batch."""
    return int((entropy(logits) < threshold).sum())


def uniform(t: int) -> float:
    """A number in [0, 1) for batch t."""
    return torch.rand((), generator=chance("batch", t)).item()


class BudgetPaced:
    """Algorithm 1, called with the utility of each batch in turn; the comments give its lines.

    `r` is the target ratio, W the window, M the warm-up, H_c the correction horizon, δ the slack.

    Examples
    --------
    >>> decide = BudgetPaced(r=0.5)
    >>> [decide(s) for s in (3, 1, 4, 1, 5, 9, 2, 6)]
    [1, 0, 1, 0, 1, 1, 0, 1]
    """

    def __init__(
        self,
        r: float,
        *,
        window: int = 250,
        warmup: int = 1,
        horizon: float = 50,
        slack: float = 1,
        draw: Callable[[int], float] = uniform,
    ) -> None:
        self.r, self.window, self.warmup, self.horizon, self.slack, self.draw = r, window, warmup, horizon, slack, draw
        self.t = self.used = 0  # line 1: u_0 = 0
        self.history: list[float] = []  # line 1: H = []

    def __call__(self, s: float) -> int:
        self.t += 1  # line 2
        a = self.select(s)
        self.used += a  # line 13: u_t = u_{t−1} + a_t; append s_t, drop the oldest beyond W
        self.history = [*self.history, s][-self.window :]
        return a

    def select(self, s: float) -> int:
        """a_t, whether this batch is labelled."""
        target = self.r * self.t  # line 4: u*_t = r·t
        if self.used + self.slack < target:  # line 5: u + δ < u*_t
            return 1  # line 6: rate floor, catch up
        if len(self.history) < self.warmup:  # line 7: |H| < M
            return int(self.draw(self.t) < self.r)  # line 8: Bernoulli(r)
        debt = target - self.used  # line 10: d_t = r·t − u
        rate = min(max(self.r + debt / self.horizon, 0.0), 1.0)  # line 10: r̃_t = clip(r + d_t/H_c, 0, 1)
        threshold = quantile(self.history, 1 - rate)  # line 11: τ_t = Quantile_{1 − r̃_t}(H)
        return int(s >= threshold)  # line 11


def quantile(scores: list[float], level: float) -> float:
    return torch.tensor(scores, dtype=torch.float64).quantile(level).item()


# Section 3.2: sample selection


def drift(logits: Tensor, anchor_logits: Tensor) -> Tensor:
    """dᵢ = ‖pᵢ − p̄ᵢ‖₂, p̄ of the anchor."""
    distance: Tensor = (logits.softmax(dim=1) - anchor_logits.softmax(dim=1)).norm(dim=1)
    return distance


def largest(scores: Tensor, ties: Tensor, k: int) -> list[int]:
    """i* = arg max, or the k largest; of equal scores the one with the larger tie."""
    pairs = list(zip(scores.tolist(), ties.tolist(), strict=True))
    return sorted(range(len(pairs)), key=pairs.__getitem__, reverse=True)[:k]


def any_of(t: int, n: int) -> Tensor:
    """Numbers that break the ties of batch t."""
    return torch.rand(n, generator=chance("ties", t))


# All of it


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    answer: Answer,
    decide: Callable[[float], int],
    *,
    head: str = "fc",
    optimizer: Optimizers = SGD,
    lambda_sup: float = 0.9,
    lambda_ent: float = 0.1,
    fraction: float = 0.4,
    filtered: bool = True,
    mu: float = 0.9,
    ties: Callable[[int, int], Tensor] = any_of,
) -> Iterator[Tensor]:
    """Yields the logits of each batch, then asks where `decide` says so, and learns by eq. 1.

    τ_ent = fraction·ln C. The anchor follows with momentum μ. The classifier h is the module named `head`.
    """
    use_batch_statistics(model)
    anchor = deepcopy(model)
    classifier = model.get_submodule(head)
    norm_steps = optimizer(norm_tensors(model))
    head_steps = optimizer(list(classifier.parameters()))
    for t, x in enumerate(stream, start=1):
        features, logits = look(model, x, head)  # z = h(f(x))
        yield logits.detach()
        tau_ent = fraction * math.log(logits.shape[1])

        # When, what, who.
        k = decide(utility(logits, tau_ent))  # a_t
        asked: list[int] = []
        if k:
            with torch.no_grad():
                d = drift(logits, anchor(x))
            asked = largest(d, ties(t, len(x)), k)  # i*_t
        labels = {i: answer(t, i) for i in asked}  # Q_t

        # How. Eq. 1: L_total = λ_sup·L_sup + λ_ent·L_ent, on the normalisation tensors.
        total = lambda_sup * l_sup(logits, labels) + lambda_ent * l_ent(logits, asked, tau_ent if filtered else None)
        if total.requires_grad:  # there is a label, or a confident sample
            descend(norm_steps, total)
        if labels:
            descend(head_steps, l_sup(classifier(features.detach()), labels))

        # Eqs. 3 and 4: θ̄ ← μ·θ̄ + (1 − μ)·θ.
        follow(anchor, model, mu)


def example() -> str:
    """On the toy stream.

    >>> example()
    '14 % wrong, 19 labels'
    """
    made = toy()
    optimizer = partial(SGD, lr=0.003)
    return made.error(run(made.model, made.stream, made.answer, BudgetPaced(r=0.5), optimizer=optimizer))


if __name__ == "__main__":
    print(example())
