"""EATTA: a label where noise moves the prediction most, and two gradients in balance (Wang et al., CVPR 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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
    inside,
    look,
    norm_tensors,
    use_batch_statistics,
)
from wise_atta.reference.toy import toy

SGD = partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9, nesterov=True)


def normal(t: int, shape: torch.Size) -> Tensor:
    """Standard normal numbers, one draw a batch."""
    return torch.randn(shape, generator=chance("noise", t))


def sensitivity(features: Tensor, logits: Tensor, head: nn.Module, noise: Tensor, sigma: float) -> Tensor:
    """|p_ŷ(f + σ·noise) − p_ŷ(f)| of each sample, ŷ = arg max p."""
    p = logits.softmax(dim=1)
    moved: Tensor = head(features + sigma * noise).softmax(dim=1)
    guess = p.argmax(dim=1, keepdim=True)
    return (moved - p).gather(1, guess).abs().flatten()


class ClassRule:
    """Passes over the predicted classes asked for just before, unless the score beats that class's last."""

    def __init__(self) -> None:
        self.recent: set[int] = set()  # predicted classes asked for in the last batch that asked
        self.last: dict[int, float] = {}  # the score with which a class was last asked for

    def pick(self, ranking: list[int], scores: list[float], guesses: list[int], k: int) -> list[int]:
        """The first k of the ranking; those passed over follow in order of score where fewer remain."""
        over = [i for i in ranking if guesses[i] in self.recent and scores[i] <= self.last[guesses[i]]]
        asked = ([i for i in ranking if i not in over] + over)[:k]
        if asked:
            self.recent = {guesses[i] for i in asked}
            self.last |= {guesses[i]: scores[i] for i in asked}
        return asked


def length(loss: Tensor, tensors: list[nn.Parameter]) -> float:
    """The Euclidean norm of the gradient over all tensors together."""
    gradients = torch.autograd.grad(loss, tensors, retain_graph=True)
    return float(torch.stack([g.norm() for g in gradients]).norm())


def published_tensors(model: nn.Module) -> list[nn.Parameter]:
    """What the published code adapts of a ResNet: norm tensors outside `layer4`, and all of `layer1`."""
    norm = {id(p) for p in norm_tensors(model, without=("layer4",))}
    return [p for name, p in model.named_parameters() if id(p) in norm or inside(name, ("layer1",))]


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    answer: Answer,
    *,
    head: str = "fc",
    grants: Callable[[int], int] = lambda t: 1,
    adapt: Callable[[nn.Module], list[nn.Parameter]] = norm_tensors,
    optimizer: Optimizers = SGD,
    fraction: float = 0.4,
    sigma: float = 0.01,
    average: float = 0.8,
    balance: float = 2.0,
    noise: Callable[[int, torch.Size], Tensor] = normal,
) -> Iterator[Tensor]:
    """Yields the logits of each batch, then asks for `grants(t)` labels and minimises w₁·L_ent + w₂·L_sup.

    L_ent is the mean H over {H < E₀, not labelled}, E₀ = fraction·ln C. w₁ and w₂ begin at 1. A batch that has both
    losses moves them, with `average` and from the first such batch on, to g₂ and g₁ scaled to the sum `balance`.
    """
    use_batch_statistics(model)
    adapted = adapt(model)
    steps = optimizer(adapted)
    rule = ClassRule()
    w: tuple[float, float] | None = None
    for t, x in enumerate(stream, start=1):
        features, logits = look(model, x, head)
        yield logits.detach()

        # What to ask: the largest score, at a tie the lower index.
        with torch.no_grad():
            scores = sensitivity(features, logits, model.get_submodule(head), noise(t, features.shape), sigma)
        ranking = scores.sort(descending=True, stable=True).indices.tolist()
        asked = rule.pick(ranking, scores.tolist(), logits.argmax(dim=1).tolist(), grants(t))

        # How to learn from it.
        h = entropy(logits)
        sure = h < fraction * math.log(logits.shape[1])
        sure[asked] = False
        l_ent = h[sure].mean() if sure.any() else None
        labels = torch.tensor([answer(t, i) for i in asked])
        l_sup = functional.cross_entropy(logits[asked], labels) if asked else None
        if l_ent is not None and l_sup is not None:
            g1, g2 = length(l_ent, adapted), length(l_sup, adapted)
            new = (balance * g2 / (g1 + g2), balance * g1 / (g1 + g2))
            old = w or new
            w = (average * old[0] + (1 - average) * new[0], average * old[1] + (1 - average) * new[1])
        weighted = [w_k * loss for w_k, loss in zip(w or (1.0, 1.0), (l_ent, l_sup), strict=True) if loss is not None]
        if weighted:
            descend(steps, torch.stack(weighted).sum())


def example() -> str:
    """On the toy stream.

    >>> example()
    '14 % wrong, 40 labels'
    """
    made = toy()
    return made.error(run(made.model, made.stream, made.answer, optimizer=partial(SGD, lr=0.01)))


if __name__ == "__main__":
    print(example())
