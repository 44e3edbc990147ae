"""What teaches more than entropy? Likelihood ratios of certain, diverse samples, and agreement with a view of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wise_atta import errors, rng, signals
from wise_atta.how.average import Average
from wise_atta.how.consistency import symmetric_cross_entropy
from wise_atta.how.labels import Labels
from wise_atta.how.objective import Objective
from wise_atta.how.views import Augment, Augmentation
from wise_atta.model import Forward, Weights
from wise_atta.stream import Inputs, tree_map


class LikelihoodRatio(Objective):
    """(1/n) Σ_S w·(soft likelihood ratio + consistency with one view) over the diverse, unlabelled samples S.

    Parameters
    ----------
    clip, eps
        p is clipped at `clip`; `eps` keeps the logarithm finite.
    temperature
        τ of the weight exp(d·c/τ).
    mean_momentum
        Of p̄, the mean prediction that diversity d is measured against.
    consistency
        Whether the view's symmetric cross-entropy is added. Without it there is one forward less.
    augment
        What makes the view: a function (inputs, generator) → inputs. Pictures are turned, shifted, mirrored and
        recoloured if it is not given.
    seed
        Of the view. The one of batch t depends on the seed and t alone.
    """

    def __init__(
        self,
        *,
        clip: float = 0.99,
        eps: float = 1e-5,
        temperature: float = 1 / 3,
        mean_momentum: float = 0.9,
        consistency: bool = True,
        augment: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        if not 0 < clip < 1 or eps <= 0 or temperature <= 0:
            raise errors.BadConfig(
                f"clip must be in (0, 1), eps and temperature above 0, not {clip}, {eps} and {temperature}"
            )
        self.clip = clip
        self.eps = eps
        self.temperature = temperature
        self.mean = Average(mean_momentum)
        self.consistency = consistency
        self.needs_statistics = consistency
        self.augment = Augment(padding="reflect", blur=None, noise=0.0) if augment is None else augment
        self.seed = seed
        self._batches = 0

    def __call__(self, model: Weights, forward: Forward, labels: Labels) -> Tensor | None:
        logits, (n, classes) = forward.logits, forward.logits.shape
        probs = logits.softmax(dim=1)
        seen = probs.detach()
        mean = seen.new_full((classes,), 1 / classes) if self.mean.value is None else self.mean.value.to(seen)
        diverse = _scaled(1 - signals.cosine_to(mean, seen))  # d = 1 − cos(p̄, p), scaled to [0, 1]
        certain = _scaled(-signals.entropy(logits.detach()))  # c = −H, scaled to [0, 1]
        weight = (diverse * certain / self.temperature).exp()  # w = exp(d·c/τ)
        keep = (diverse >= diverse.mean()) & ~labels.mask(forward)  # S: d at least its batch mean
        loss = None
        if keep.any():
            p = probs[keep].clamp(max=self.clip)
            each = -(p * (p / (1 - p) + self.eps).log()).sum(dim=1)  # −Σ p·log(p/(1−p) + 1e-5)
            if self.consistency:
                each = each + symmetric_cross_entropy(logits[keep], self._view(model, forward, keep))
            loss = (weight[keep] * each).sum() / n
        self.mean.value = mean
        self.mean.follow(seen.mean(dim=0))  # p̄ ← 0.9·p̄ + 0.1·(mean of p), from uniform on
        self._batches += 1
        return loss

    def _view(self, model: Weights, forward: Forward, keep: Tensor) -> Tensor:
        generator = rng.torch_cpu(self.seed, "view", self._batches)
        kept: Inputs = tree_map(lambda leaf: leaf[keep], forward.inputs)
        # A single sample has no batch statistics of its own: it takes those of the batch it comes from.
        alone = model.statistics == "batch" and int(keep.sum()) == 1
        return model.forward(
            self.augment(kept, generator),
            version=forward.version,
            statistics=forward.statistics if alone else None,
            grad=True,
        ).logits

    def reset(self) -> None:
        self.mean.reset()
        self._batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.state_dict(), "batches": self._batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean.load_state_dict(state["mean"])
        self._batches = state["batches"]

    def __repr__(self) -> str:
        return (
            f"LikelihoodRatio(clip={self.clip}, temperature={self.temperature:.4g}, mean={self.mean!r}, "
            f"consistency={self.consistency}, seed={self.seed})"
        )


def _scaled(x: Tensor) -> Tensor:
    """To [0, 1] over the batch; zero where all are alike."""
    span = x.max() - x.min()
    return torch.where(span > 0, (x - x.min()) / span, torch.zeros_like(x))
