"""The order in which samples arrive: index arithmetic over domains, which knows nothing of pictures or files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wise_atta import errors, rng

PROTOCOLS = ("ctta", "ftta", "mixed", "gradual")
ORDERS = ("shuffled", "sequential", "correlated")
# Severity rises and falls again before the next corruption begins, so that no step of the shift is larger than one.
GRADUAL = (1, 2, 3, 4, 5, 4, 3, 2, 1)


@dataclass(frozen=True)
class Arrangement:
    """Which sample arrives when: number `index[i]` of domain `domain[i]`; batch t begins at `starts[t]`."""

    domain: NDArray[np.int64]
    index: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Domains and sample numbers of one batch, counted from 0."""
        span = slice(int(self.starts[number]), int(self.starts[number + 1]))
        return self.domain[span], self.index[span]

    def enters(self, number: int) -> bool:
        """Whether a batch, counted from 0, is the first to begin in its domain.

        A batch that was filled up from the next domain still belongs to the one that it begins in.
        """
        return number > 0 and bool(self.domain[self.starts[number]] != self.domain[self.starts[number - 1]])


def shuffle(n: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """A permutation of n that is the same under every version of numpy: only raw bits are drawn.

    >>> shuffle(5, rng.numpy(0, "example")).tolist()
    [1, 2, 0, 3, 4]
    """
    return np.argsort(generator.bit_generator.random_raw(n), kind="stable").astype(np.int64)


def correlate(
    labels: NDArray[np.int64], slots: int, concentration: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    """An order in which classes come in clumps.

    Time is cut into slots. Each class spreads its samples over them by shares drawn from a Dirichlet distribution with
    `concentration` for every slot: near 0 a class comes all at once, far above 1 the order is as good as shuffled.

    >>> labels = np.repeat(np.arange(3), 4)
    >>> labels[correlate(labels, 3, 1e-3, rng.numpy(1, "example"))].tolist()
    [1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0]
    """
    mixed = shuffle(len(labels), generator)
    slot = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = mixed[labels[mixed] == label]
        shares = generator.dirichlet(np.full(slots, concentration))
        ends = np.round(np.cumsum(shares) * len(members))[:-1]
        slot[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    # Mixed anew: each class's share of a slot is a stretch of the first mixing, which would come in class by class.
    mixed = shuffle(len(labels), generator)
    return mixed[np.argsort(slot[mixed], kind="stable")]


def arrange(
    labels: Sequence[NDArray[np.int64]],
    visits: Sequence[int],
    *,
    names: Sequence[str],
    batch: int,
    order: str = "shuffled",
    mixed: bool = False,
    cut: bool = True,
    limit: int | None = None,
    concentration: float = 0.1,
    seed: int = 0,
) -> Arrangement:
    """Lay out a stream over domains.

    A domain's order is drawn from (seed, its name, how often that name was visited before), so it does not depend on
    the other domains of the stream.

    Parameters
    ----------
    labels
        The classes of each domain's samples. Only `order="correlated"` looks at more than their number.
    visits
        The domains in the order in which they come; one may come again.
    names
        A name for each domain.
    batch
        Samples a batch. The last batch of a visit, or of the stream where `cut` is False, may be smaller.
    order
        `shuffled`, `sequential` (as the domain lists them) or `correlated` (see `correlate`; a slot is a batch long).
    mixed
        All visits are shuffled into one, so that a batch holds several domains.
    cut
        Whether a new visit begins a new batch.
    limit
        At most so many samples of a domain, drawn with the seed; domains of equal length give the same numbers.

    Examples
    --------
    >>> arrangement = arrange([np.zeros(3), np.zeros(2)], [0, 1, 0], names=["a", "b"], batch=2, order="sequential")
    >>> [arrangement.batch(t)[1].tolist() for t in range(len(arrangement))]
    [[0, 1], [2], [0, 1], [0, 1], [2]]
    """
    if batch < 1:
        raise errors.BadConfig(f"batch={batch}: a batch holds at least one sample")
    if order not in ORDERS:
        raise errors.unknown("order", order, ORDERS)
    seen: dict[str, int] = {}
    domains: list[NDArray[np.int64]] = []
    indices: list[NDArray[np.int64]] = []
    for place in visits:
        name, kept = names[place], _subset(len(labels[place]), limit, seed)
        generator = rng.numpy(seed, f"order/{name}", seen.get(name, 0))
        seen[name] = seen.get(name, 0) + 1
        if not mixed:
            kept = kept[_order(labels[place][kept], order, batch, concentration, generator)]
        domains.append(np.full(len(kept), place, dtype=np.int64))
        indices.append(kept)
    lengths = [len(kept) for kept in indices]
    domain, index = _join(domains), _join(indices)
    if mixed:
        classes = _join([labels[place][kept] for place, kept in zip(visits, indices, strict=True)])
        chosen = _order(classes, order, batch, concentration, rng.numpy(seed, "order/mixed"))
        domain, index, lengths = domain[chosen], index[chosen], [len(index)]
    if not cut:
        lengths = [len(index)]
    begins = np.cumsum([0, *lengths])
    starts = [np.arange(begin, begin + length, batch) for begin, length in zip(begins[:-1], lengths, strict=True)]
    return Arrangement(domain, index, _join([*starts, np.array([len(index)])]))


def _subset(n: int, limit: int | None, seed: int) -> NDArray[np.int64]:
    if limit is None or limit >= n:
        return np.arange(n)
    return np.sort(shuffle(n, rng.numpy(seed, "subset"))[:limit])


def _order(
    labels: NDArray[np.int64], how: str, batch: int, concentration: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    if how == "sequential":
        return np.arange(len(labels))
    if how == "shuffled":
        return shuffle(len(labels), generator)
    return correlate(labels, -(-len(labels) // batch), concentration, generator)


def _join(arrays: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays]).astype(np.int64)
