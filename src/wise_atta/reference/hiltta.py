"""HILTTA: labels choose among candidate learning rates, then train all weights a little (Li et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from wise_atta.reference.common import Answer, Optimizers, descend, entropy, look, norm_tensors, use_batch_statistics
from wise_atta.reference.toy import toy

CANDIDATES = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3)
ADAM = partial(torch.optim.Adam, lr=1e-5)


def k_margin(features: Tensor, logits: Tensor, k: int) -> list[int]:
    """Greedy k-centre from the origin over features scaled by 1 − (p₁ − p₂): always the farthest from all chosen."""
    best, second = logits.softmax(dim=1).topk(2, dim=1).values.T
    points = (1 - (best - second))[:, None] * features
    gaps = points.norm(dim=1)
    asked: list[int] = []
    while len(asked) < min(k, len(points)):
        gaps[asked] = -1.0
        asked.append(int(gaps.argmax()))  # the lower index at a tie
        gaps = torch.minimum(gaps, (points - points[asked[-1]]).norm(dim=1))
    return asked


def scaled(values: Tensor) -> Tensor:
    """Moved and stretched to [0, 1]; equal values all become 0."""
    low, high = values.min(), values.max()
    return torch.zeros_like(values) if high == low else (values - low) / (high - low)


@torch.no_grad()
def move(tensors: list[nn.Parameter], start: list[Tensor], direction: list[Tensor], rate: float) -> None:
    """θ = start − rate·direction."""
    for p, p0, d in zip(tensors, start, direction, strict=True):
        p.copy_(p0 - rate * d)


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    answer: Answer,
    *,
    head: str = "fc",
    grants: Callable[[int], int] = lambda t: 3,
    candidates: tuple[float, ...] = CANDIDATES,
    momentum: float = 0.9,
    nesterov: bool = True,
    average: float = 0.5,
    supervised: Optimizers = ADAM,
) -> Iterator[Tensor]:
    """Yields the logits of each batch, asks for `grants(t)` labels, takes one step of tent and one of supervision.

    Tent's loss is the mean entropy of the unlabelled samples, in a forward of their own. Its step has the direction d,
    whatever the rate, so candidate j is θ − rate_j·d. Rates are scored by how far the candidate's p is from that of
    the source weights on the unlabelled samples, and by its cross-entropy on the labelled ones, each scaled to [0, 1]
    over the candidates; scores follow with `average`. The least wins: without a label the least so far, before any
    label the first. The supervised step is `supervised`'s, on every parameter.
    """
    use_batch_statistics(model)
    source = deepcopy(model)
    norm = norm_tensors(model)
    buffers = [torch.zeros_like(p) for p in norm]
    supervision = supervised(list(model.parameters()))
    scores: Tensor | None = None
    for t, x in enumerate(stream, start=1):
        features, logits = look(model, x, head)
        yield logits.detach()
        asked = k_margin(features.detach(), logits.detach(), grants(t))
        rest = [i for i in range(len(x)) if i not in asked]
        labels = torch.tensor([answer(t, i) for i in asked], dtype=torch.long)

        if rest:
            alone = model(x[rest]) if asked else logits
            gradients = torch.autograd.grad(entropy(alone).mean(), norm)
            buffers = [momentum * b + g for b, g in zip(buffers, gradients, strict=True)]
            direction = [g + momentum * b if nesterov else b for b, g in zip(buffers, gradients, strict=True)]
            start = [p.detach().clone() for p in norm]
            if asked:
                mse, ce = [], []
                with torch.no_grad():
                    then = source(x).softmax(dim=1)
                    for rate in candidates:
                        move(norm, start, direction, rate)
                        now = model(x)
                        mse.append((now.softmax(dim=1) - then)[rest].pow(2).mean())
                        ce.append(functional.cross_entropy(now[asked], labels))
                new = scaled(torch.stack(mse)) + scaled(torch.stack(ce))
                scores = new if scores is None else average * scores + (1 - average) * new
            rate = candidates[0 if scores is None else int(scores.argmin())]  # the first at a tie
            move(norm, start, direction, rate)
        if asked:
            descend(supervision, functional.cross_entropy(model(x)[asked], labels))


def example() -> str:
    """On the toy stream.

    >>> example()
    '14 % wrong, 120 labels'
    """
    made = toy()
    return made.error(run(made.model, made.stream, made.answer))


if __name__ == "__main__":
    print(example())
