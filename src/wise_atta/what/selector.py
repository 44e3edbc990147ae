"""Selectors: which samples of a batch are worth a label. Scores, the highest first, ties at random."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wise_atta import errors, rng, signals
from wise_atta.average import Redundancy
from wise_atta.part import Part, above, at_least, running
from wise_atta.view import View


@dataclass(kw_only=True, eq=False)
class Selector(Part):
    """Ranks the samples of a batch by a score. A subclass says what the score is.

    Parameters
    ----------
    balance
        EATTA's rule: pass over classes (as predicted) asked for just before, unless the sample's score beats the score
        that class was last asked for with.
    seed
        For ties, and for selectors that draw.
    """

    needs_anchor: ClassVar[bool] = False

    balance: bool = False
    seed: int = 0
    _just_asked: list[int] = running([], key="just_asked")
    _last_score: dict[int, float] = running({}, key="last_score")

    def scores(self, view: View) -> Tensor:
        """One number a sample; the highest is asked for, NaN last of all."""
        raise NotImplementedError

    def pick(self, view: View, k: int = 1) -> list[int]:
        """The k samples to ask for, best first; all of them if the batch is smaller."""
        at_least(1, k=k)
        return self.best(view, k, self.scores(view).tolist())

    def best(self, view: View, k: int, scores: list[float]) -> list[int]:
        """The same, by scores on the host."""
        # NaN comes last, as in the order below; only in front is it what `max` gives.
        if k == 1 and not self.balance and scores.count(top := max(scores)) == 1 and not math.isnan(top):
            return [scores.index(top)]  # without a draw: nothing ties with it
        shuffled = self.shuffled(view)
        ranked = shuffled[np.argsort(-np.array(scores, dtype=np.float64)[shuffled], kind="stable")]
        if not self.balance:
            return [int(i) for i in ranked[:k]]
        predicted = view.logits.argmax(dim=1).cpu().numpy()
        fresh = [i for i in ranked if self._is_fresh(int(predicted[i]), float(scores[i]))]
        rest = [i for i in ranked if not self._is_fresh(int(predicted[i]), float(scores[i]))]
        picked = [int(i) for i in [*fresh, *rest][:k]]
        self._just_asked = sorted({int(predicted[i]) for i in picked})
        self._last_score = self._last_score | {int(predicted[i]): float(scores[i]) for i in picked}
        return picked

    def shuffled(self, view: View) -> NDArray[np.int64]:
        """The samples in random order. Of equal scores the first in it wins."""
        return rng.numpy(self.seed, "ties", view.number).permutation(len(view))

    def _is_fresh(self, predicted: int, score: float) -> bool:
        return predicted not in self._just_asked or score > self._last_score[predicted]


@dataclass(kw_only=True, eq=False)
class Perturbation(Selector):
    """The sample whose confidence moves most when its features are nudged: |Δp_ŷ| (EATTA).

    Parameters
    ----------
    sigma
        Deviation of the Gaussian noise on the features.
    """

    sigma: float = 0.01

    def __post_init__(self) -> None:
        above(0, sigma=self.sigma)

    def noise(self, view: View) -> Tensor:
        """Standard normal noise of the features' shape, drawn on the CPU."""
        generator = rng.torch_cpu(self.seed, "perturbation", view.number)
        features = view.features
        return torch.randn(features.shape, generator=generator, dtype=features.dtype, device="cpu").to(features.device)

    def scores(self, view: View) -> Tensor:
        nudged = view.head(view.features + self.sigma * self.noise(view)).softmax(dim=1)
        predicted = view.logits.argmax(dim=1, keepdim=True)
        return (nudged.gather(1, predicted) - view.probs.gather(1, predicted)).abs().squeeze(1)


@dataclass(kw_only=True, eq=False)
class Drift(Perturbation):
    """The sample whose prediction moved furthest from the anchor's: arg max ‖p − p̄‖₂ (section 3.2).

    In the first batch anchor and model are one, all drifts are 0, and the choice is random.

    Parameters
    ----------
    first
        Use the perturbation score in the first so many batches instead, as the published code does (4 there).
    sigma
        Of that score, see `Perturbation`.
    """

    needs_anchor: ClassVar[bool] = True

    first: int = 0

    def scores(self, view: View) -> Tensor:
        return super().scores(view) if (view.age or view.number) <= self.first else view.drift


class MaxEntropy(Selector):
    """The most uncertain sample by entropy."""

    def scores(self, view: View) -> Tensor:
        return view.entropy


class Margin(Selector):
    """The sample whose two best classes are closest."""

    def scores(self, view: View) -> Tensor:
        return -signals.margin(view.logits)


class RandomSample(Selector):
    """Any sample, each with the same chance."""

    def scores(self, view: View) -> Tensor:
        return torch.zeros(len(view))


@dataclass(kw_only=True, eq=False)
class KMargin(Selector):
    """Features scaled by 1 − (p₁ − p₂), greedy k-centre from the origin (HILTTA).

    A sample of which the model is sure lies at the origin, whatever its features. The first sample is the one furthest
    from there, each further one that which is furthest from the origin and all that were picked.

    Parameters
    ----------
    seed
        For ties.
    """

    balance: bool = field(default=False, init=False, repr=False)  # no option: it does not rank classes

    def pick(self, view: View, k: int = 1) -> list[int]:
        at_least(1, k=k)
        unsure = 1 - signals.margin(view.logits)
        points = (view.features.flatten(1) * unsure.unsqueeze(1)).double().cpu().numpy()
        order = self.shuffled(view)
        points = points[order]
        distance = np.linalg.norm(points, axis=1)
        picked: list[int] = []
        for _ in range(min(k, len(points))):
            best = int(np.argmax(distance))
            picked.append(int(order[best]))
            distance = np.minimum(distance, np.linalg.norm(points - points[best], axis=1))
            # Samples that coincide are as far apart as a picked one is from itself; none is picked twice.
            distance[best] = -1
        return picked


@dataclass(kw_only=True, eq=False)
class Band(Selector):
    """E_min < H < E_max and |cos(p̄, p)| < ε, with p̄ the moving average of what was picked (CEMA).

    All that pass, or the k of them with the highest entropy, in the order of the batch.

    Parameters
    ----------
    above, below
        E_min and E_max as shares of ln C. The public configuration has no E_min.
    epsilon, mean_momentum
        ε, and the momentum of p̄. See `Redundancy`.
    lower
        Lower E_max with the mean entropy of all samples so far: E_max·min(1, H̄_t/H̄_1), as the paper's text has it; the
        public configuration keeps it constant.
    """

    above: float | None = None
    below: float = 0.4
    epsilon: float = 0.05
    mean_momentum: float = 0.9
    lower: bool = False
    balance: bool = field(default=False, init=False, repr=False)  # no option: it does not rank classes
    redundancy: Redundancy = running(key="mean")
    # Samples seen, the sum of their entropies, and the mean entropy of the first batch.
    _entropy: list[Any] = running([0, 0.0, None], key="entropy")

    def __post_init__(self) -> None:
        if not 0 <= (self.above or 0) < self.below:
            raise errors.BadConfig(
                f"above and below are shares of ln C, 0 ≤ above < below, not {self.above} and {self.below}"
            )
        self.redundancy = Redundancy(momentum=self.mean_momentum, epsilon=self.epsilon)

    def pick(self, view: View, k: int = 1) -> list[int]:
        at_least(1, k=k)
        entropy, probs = view.entropy, view.probs
        seen, total, first = self._entropy
        seen, total = seen + len(view), total + float(entropy.sum())
        first = total / seen if first is None else first
        limit = signals.entropy_threshold(view.classes, self.below)
        if self.lower and first > 0:
            limit *= min(1.0, total / seen / first)
        keep = (entropy < limit) & self.redundancy.new(probs)
        if self.above is not None:
            keep &= entropy > signals.entropy_threshold(view.classes, self.above)
        rows: list[int] = keep.nonzero().flatten().tolist()
        if len(rows) > k:
            best = entropy[rows].topk(k).indices
            rows = sorted(rows[i] for i in best.tolist())
        self.redundancy.follow(probs[rows])
        self._entropy = [seen, total, first]
        return rows
