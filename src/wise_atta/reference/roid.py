"""ROID: a weighted likelihood-ratio loss, agreement with one view, a pull to the source, a corrected prior.

Marsden et al., WACV 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from wise_atta.reference.common import Optimizers, descend, entropy, norm_tensors, use_batch_statistics
from wise_atta.reference.cotta import disagreement
from wise_atta.reference.toy import changed, toy

# The public configuration for ImageNet-C. For CIFAR-10-C it is Adam at 1e-3.
SGD = partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9, nesterov=True)


def likelihood_ratio(logits: Tensor, clip: float, floor: float) -> Tensor:
    """SLR = −Σ_c p_c·log(p_c/(1 − p_c) + 1e-5) of each row, p clipped at 0.99; no gradient flows where it is."""
    p = logits.softmax(dim=1).clamp(max=clip)
    return -(p * torch.log(p / (1 - p) + floor)).sum(dim=1)


def scaled(values: Tensor) -> Tensor:
    """Moved and stretched to [0, 1]; equal values all become 0."""
    low, high = values.min(), values.max()
    return torch.zeros_like(values) if high == low else (values - low) / (high - low)


def weights(logits: Tensor, mean_p: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """S = {d ≥ mean of d} as a mask, and w = exp(d·c/τ): d = 1 − cos(p̄, p) and c = −H, each scaled over the batch."""
    p = logits.softmax(dim=1)
    d = scaled(1 - (p @ mean_p) / (p.norm(dim=1) * mean_p.norm()))
    c = scaled(-entropy(logits))
    return d >= d.mean(), torch.exp(d * c / temperature)


def prior_corrected(logits: Tensor) -> Tensor:
    """z·(q + γ)/(1 + γC), q the mean p of the batch, γ = max(1/n, 1/C)/max q."""
    n, classes = logits.shape
    q = logits.softmax(dim=1).mean(dim=0)
    gamma = max(1 / n, 1 / classes) / q.max()
    return logits * (q + gamma) / (1 + gamma * classes)


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    *,
    view: Callable[[int, Tensor], Tensor],
    optimizer: Optimizers = SGD,
    clip: float = 0.99,
    floor: float = 1e-5,
    temperature: float = 1 / 3,
    average: float = 0.9,
    pull: float = 0.01,
    back: float = 0.5,
) -> Iterator[Tensor]:
    """Yields the corrected logits of each batch, then minimises (1/n) Σ_S w·(SLR + SCE) over the normalisation tensors.

    SCE is the symmetric cross-entropy between a sample and its view, with gradients through both; `view(t, x)` is one
    changed view of the samples of S, whose forward sees them alone. p̄ starts uniform and follows the mean p of all
    samples. After the step θ ← (1 − pull)·θ + pull·θ₀.
    """
    use_batch_statistics(model)
    adapted = norm_tensors(model)
    source = [p.detach().clone() for p in adapted]
    steps = optimizer(adapted)
    mean_p: Tensor | None = None
    for t, x in enumerate(stream, start=1):
        logits = model(x)
        yield prior_corrected(logits.detach())
        n, classes = logits.shape
        if mean_p is None:
            mean_p = logits.new_full((classes,), 1 / classes)
        kept, w = weights(logits.detach(), mean_p, temperature)
        mean_p = average * mean_p + (1 - average) * logits.detach().softmax(dim=1).mean(dim=0)

        slr = likelihood_ratio(logits[kept], clip, floor)
        sce = disagreement(model(view(t, x[kept])), logits[kept], back)
        descend(steps, (w[kept] * (slr + sce)).sum() / n)
        with torch.no_grad():
            for p, p0 in zip(adapted, source, strict=True):
                p.copy_((1 - pull) * p + pull * p0)


def example() -> str:
    """On the toy stream.

    >>> example()
    '12 % wrong, 0 labels'
    """
    made = toy()
    optimizer = partial(SGD, lr=0.01)
    return made.error(run(made.model, made.stream, view=lambda t, x: changed(t, 0, x), optimizer=optimizer))


if __name__ == "__main__":
    print(example())
