"""Confidence intervals for a difference between two runs over one stream, by redrawing blocks of batches.

Samples of a batch share its statistics and the weights of that moment, and batches that follow each other share most
of them, so samples must not be drawn one by one: whole blocks of consecutive batches are. Every method of a comparison
gets the same blocks, so what is hard for all of them cancels. Blocks are drawn within a domain, since the domains of a
stream are chosen and not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wise_atta.bench.runs import visits

# A visit to a domain that is shorter joins its neighbour: from fewer batches nothing can be drawn.
FEWEST = 8

Array = NDArray[np.float64]


def strata(domains: Sequence[str]) -> list[tuple[int, int]]:
    """Where each visit to a domain begins and ends; a short one joins the visit before it, or if first the next.

    >>> strata(["fog"] * 10 + ["mixed"] + ["snow"] * 9)
    [(0, 11), (11, 20)]
    >>> strata(["a", "b", "a"])
    [(0, 3)]
    """
    spans: list[tuple[int, int]] = []
    for start, end, _ in visits(domains):
        if spans and min(end - start, spans[-1][1] - spans[-1][0]) < FEWEST:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


def block_length(batches: int) -> int:
    """The cube root of the number of batches: the order at which bias and variance of the deviation balance.

    >>> block_length(1), block_length(8), block_length(34), block_length(500)
    (1, 2, 3, 8)
    """
    return max(1, round(batches ** (1 / 3)))


def weights(domains: Sequence[str], replicates: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """How much each batch counts in each replicate, [replicates, batches].

    Blocks start anywhere in their domain and go around its end, so that every batch is as likely. Drawing blocks of L
    out of m batches has (1 − L/m) times the variance of the mean, and the distance of every weight from one is
    stretched to make up for it.
    """
    per_batch = np.empty((replicates, len(domains)), dtype=np.float32)
    for start, end in strata(domains):
        count = end - start
        length = block_length(count)
        starts = generator.integers(count, size=(replicates, -(-count // length)))
        drawn = ((starts[:, :, None] + np.arange(length)) % count).reshape(replicates, -1)[:, :count]
        flat = (drawn + count * np.arange(replicates)[:, None]).ravel()
        times = np.bincount(flat, minlength=replicates * count).reshape(replicates, count)
        per_batch[:, start:end] = 1 + (times - 1) * _stretch(count, length)
    return per_batch


def draws(count: int, replicates: int, generator: np.random.Generator) -> Array:
    """How much each of some runs counts in each replicate, [replicates, count]; each row sums to one.

    >>> draws(3, 5, np.random.default_rng(0)).sum(axis=1).round(12).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    times = generator.multinomial(count, np.full(count, 1 / count), size=replicates)
    return np.asarray((1 + (times - 1) * _stretch(count, 1)) / count, dtype=np.float64)


def student(count: int, replicates: int, generator: np.random.Generator) -> Array:
    """The same for streams, so that a mean over them comes out as far off as Student's t says.

    Redrawn, two or three streams have hardly any replicates to take percentiles of, and they do not know that their
    deviation is itself a guess. With normal weights, which a χ² of count − 1 degrees divides, replicates of a mean are
    its standard error times t.

    >>> student(3, 5, np.random.default_rng(0)).sum(axis=1).round(12).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    normal = generator.standard_normal((replicates, count))
    apart = normal - normal.mean(axis=1, keepdims=True)
    guess = np.sqrt(generator.chisquare(count - 1, (replicates, 1)) / (count - 1))
    return np.asarray(1 / count + apart / guess / np.sqrt(count * (count - 1)), dtype=np.float64)


def _stretch(count: int, length: int) -> float:
    return float(np.sqrt(count / (count - length))) if count > length else 0.0


def interval(values: Array, level: float = 0.95) -> tuple[float, float]:
    """The middle part of the replicates; infinite values take part.

    >>> interval(np.array([1.0, 2.0, np.inf]), 0.5)
    (1.0, inf)
    """
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def break_even(ratios: Sequence[float], differences: Array) -> Array:
    """The smallest ratio at which the difference is below zero, on straight lines between those that were run.

    Parameters
    ----------
    ratios
        Rising.
    differences
        Error minus the baseline's, [ratios, replicates].

    Returns
    -------
    One ratio a replicate: the first of all where it is below zero there, infinity where it never is.

    Examples
    --------
    >>> break_even([0.0, 0.5, 1.0], np.array([[2.0, -1.0, 1.0], [1.0, -2.0, 1.0], [-1.0, 1.0, 0.0]]))
    array([0.75, 0.  ,  inf])
    """
    smallest = np.full(differences.shape[1], np.inf)
    for place in reversed(range(len(ratios))):
        here, below = differences[place], differences[place] < 0
        at = np.full(len(here), float(ratios[place]))
        if place:
            before = differences[place - 1]
            apart = np.where(below & (before >= 0), before - here, 1.0)
            at -= (ratios[place] - ratios[place - 1]) * (1 - np.where(before >= 0, before, 0) / apart)
        smallest = np.where(below, at, smallest)
    return smallest
