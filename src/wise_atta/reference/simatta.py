"""SimATTA: clusters decide what to ask; all weights train on pseudo and queried anchors (Gui et al., ICLR 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from wise_atta.reference.common import Answer, Optimizers, chance, descend, entropy, look
from wise_atta.reference.toy import toy

SGD = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)


@dataclass(frozen=True)
class Constants:
    low: float = 0.1  # e_l: under this entropy of the source model a sample is a pseudo anchor
    high: float = 0.1  # e_h: from this entropy of the current model on it is a candidate
    most: int = 100  # pseudo anchors a batch
    training_steps: int = 10  # a batch
    size: int = 32  # samples of either kind a step
    buffer: int | None = 300  # anchors of either kind that are kept, the newest; None keeps all


PAPER = Constants()


@dataclass
class Anchor:
    """A remembered sample: its picture, its class, and how many samples it stands for."""

    x: Tensor
    label: int
    weight: float = 1.0


def any_points(t: int, points: Tensor, weights: Tensor, k: int) -> list[int]:
    """Which points k-means starts from in batch t."""
    return torch.randperm(len(points), generator=chance("centres", t))[:k].tolist()


def drawn(t: int, step: int, kind: str, n: int) -> Tensor:
    """n numbers in [0, 1) that decide which anchors a step of batch t trains on."""
    return torch.rand(n, generator=chance("anchors", t, step, kind))


def least(distances: Tensor) -> Tensor:
    """Where the least of each row stands, the first of those equal up to rounding.

    Two candidates are always equally far from their mean: what rounding makes of that must not decide.
    """
    bound = distances.min(dim=-1, keepdim=True).values * (1 + 1e-9)
    return (distances <= bound).int().argmax(dim=-1)


def k_means(points: Tensor, weights: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted Lloyd steps until no assignment changes: centres, and the cluster of each point."""
    clusters = least((points[:, None] - centres).norm(dim=2))
    for _ in range(300):
        members = functional.one_hot(clusters, len(centres)).to(points) * weights[:, None]
        mass = members.sum(dim=0)[:, None]
        centres = torch.where(mass > 0, members.T @ points / mass, centres)  # an empty one stays
        before, clusters = clusters, least((points[:, None] - centres).norm(dim=2))
        if torch.equal(before, clusters):
            break
    return centres, clusters


def ask(
    features: Tensor, queried: list[Anchor], old: Tensor, k: int, centres: Callable[[Tensor, Tensor, int], list[int]]
) -> list[tuple[int, float]]:
    """Which k of the candidates are asked for, and the weight that each begins with; old anchors gain theirs.

    `features` are the candidates', `old` those of the queried anchors. Points are the anchors, with their weights, then
    the candidates with weight 1, in m + k clusters. Of those without an anchor the largest come first, and each asks
    for the candidate closest to its centre.
    """
    m = len(queried)
    points = torch.cat([old, features])
    weights = points.new_tensor([a.weight for a in queried] + [1.0] * len(features))
    middle, clusters = k_means(points, weights, points[centres(points, weights, m + k)])
    size = clusters.bincount(minlength=m + k)
    holds = clusters[:m].bincount(minlength=m + k)
    for anchor, c in zip(queried, clusters[:m], strict=True):
        anchor.weight += float(size[c] / holds[c])  # the anchors included, as in the published code
    free = (holds == 0).nonzero().flatten()
    asked: list[tuple[int, float]] = []
    for c in free[size[free].sort(descending=True, stable=True).indices][:k]:
        distance = (features - middle[c]).norm(dim=1)
        distance[[i for i, _ in asked]] = torch.inf
        asked.append((int(least(distance)), max(float(size[c]), 1.0)))
    return asked


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    answer: Answer,
    *,
    head: str = "fc",
    grants: Callable[[int], int] = lambda t: 3,
    optimizer: Optimizers = SGD,
    constants: Constants = PAPER,
    centres: Callable[[int, Tensor, Tensor, int], list[int]] = any_points,
    uniforms: Callable[[int, int, str, int], Tensor] = drawn,
) -> Iterator[Tensor]:
    """Yields the logits of each batch, asks for up to `grants(t)` labels, then trains all weights on the anchors.

    Pseudo anchors: samples with H < e_l under the source model, the surest of a batch, with its class. Candidates:
    H ≥ e_h under the current model. Each batch takes some steps of a new SGD on (1 − α)·CE(pseudo) + α·CE(queried), α
    the share of queried anchors among all, on samples of each kind drawn with replacement. BatchNorm keeps the source's
    statistics throughout.
    """
    c = constants
    model.eval()
    source = deepcopy(model)
    pseudo: list[Anchor] = []
    queried: list[Anchor] = []

    def loss_on(anchors: list[Anchor], draw: Tensor) -> Tensor:
        batch = [anchors[int(u * len(anchors))] for u in draw.tolist()]
        logits = model(torch.stack([a.x for a in batch]))
        return functional.cross_entropy(logits, torch.tensor([a.label for a in batch]))

    for t, x in enumerate(stream, start=1):
        with torch.no_grad():
            features, logits = look(model, x, head)
            source_logits = source(x)
        yield logits

        h = entropy(source_logits)
        surest = h.sort(stable=True).indices[: c.most]
        pseudo += [Anchor(x[i], int(source_logits[i].argmax())) for i in surest.tolist() if h[i] < c.low]

        candidates = (entropy(logits) >= c.high).nonzero().flatten()
        k = min(grants(t), len(candidates))
        if k:
            with torch.no_grad():
                old = look(model, torch.stack([a.x for a in queried]), head)[0] if queried else features[:0]
            for j, weight in ask(features[candidates], queried, old, k, partial(centres, t)):
                i = int(candidates[j])
                queried.append(Anchor(x[i], answer(t, i), weight))

        if c.buffer is not None:
            pseudo, queried = pseudo[-c.buffer :], queried[-c.buffer :]
        if not pseudo and not queried:
            continue
        alpha = len(queried) / (len(pseudo) + len(queried))
        steps = optimizer(list(model.parameters()))
        for step in range(c.training_steps):
            loss = torch.zeros(())
            if pseudo:
                loss = loss + (1 - alpha) * loss_on(pseudo, uniforms(t, step, "pseudo", c.size))
            if queried:
                loss = loss + alpha * loss_on(queried, uniforms(t, step, "queried", c.size))
            descend(steps, loss)


def example() -> str:
    """On the toy stream.

    >>> example()
    '16 % wrong, 120 labels'
    """
    made = toy()
    return made.error(run(made.model, made.stream, made.answer, optimizer=partial(SGD, lr=0.01)))


if __name__ == "__main__":
    print(example())
