"""Intervals: of means over tasks by the bootstrap, of shares, of the difference of two means, and of a correlation.

Tasks are what is resampled, never single episodes: episodes of one task are alike, and treating them as independent
would make intervals too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from typing import Any

import numpy as np

RESAMPLES = 5000
LEVEL = 0.95
NORMAL = 1.959964
"""Standard errors on either side of a mean within which `LEVEL` of a normal distribution lies."""
_DRAWS_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks and how sure it is.

    Attributes:
        value: The mean.
        low: Lower end of the interval; `None` with fewer than two tasks, of which nothing can be said.
        high: Upper end of the interval.
        tasks: Tasks it is a mean of.
    """

    value: float
    low: float | None
    high: float | None
    tasks: int


def bootstrap_mean(
    values: Sequence[float], *, seed: int, resamples: int = RESAMPLES, level: float = LEVEL, draws_at_once: int = _DRAWS_AT_ONCE
) -> Estimate:
    """The mean of one value per task, with its percentile interval.

    Args:
        values: One finite number per task, at least one. # [T]
        seed: The same values and seed give the same interval.
        resamples: How often T tasks are drawn with replacement.
        level: Share of the resampled means that lies inside.
        draws_at_once: Indices held in memory at most.

    Raises:
        ValueError: If there is no value, or one is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if not array.size or not np.isfinite(array).all():
        raise ValueError(f"a bootstrap needs finite numbers, at least one; got {array}")
    count = array.size
    value = float(array.mean())
    if count < 2:
        return Estimate(value=value, low=None, high=None, tasks=count)
    generator = np.random.default_rng(seed)
    block = max(1, draws_at_once // count)
    means = [
        array[generator.integers(0, count, (min(block, resamples - start), count))].mean(axis=1) for start in range(0, resamples, block)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value=value, low=float(low), high=float(high), tasks=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share of independent cases and its interval.

    Attributes:
        count: Cases of that kind.
        of: All cases.
        low: Lower end of the interval; 0 without a case.
        high: Upper end of the interval; 1 without a case.
    """

    count: int
    of: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The share itself; 0 without a case."""
        return self.count / self.of if self.of else 0.0


def share(count: int, of: int) -> Share:
    """Return a share with the interval of Wilson, 1927, which is wider than a point also if all cases or none are of that kind."""
    if not of:
        return Share(count=0, of=0, low=0.0, high=1.0)
    value, square = count / of, NORMAL**2 / of
    centre, reach = (value + square / 2) / (1 + square), NORMAL * sqrt(value * (1 - value) / of + square / (4 * of)) / (1 + square)
    return Share(count=count, of=of, low=max(0.0, centre - reach), high=min(1.0, centre + reach))


def difference_of_means(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return how much higher the mean of `after` is than that of `before`, with the normal interval for unequal variances (Welch, 1947).

    Raises:
        ValueError: If one of them has fewer than two values.
    """
    first, last = (np.asarray(values, dtype=np.float64) for values in (before, after))
    if min(first.size, last.size) < 2:
        raise ValueError(f"a difference of means needs two values on each side; got {first.size} and {last.size}")
    value = float(last.mean() - first.mean())
    reach = NORMAL * sqrt(float(first.var(ddof=1)) / first.size + float(last.var(ddof=1)) / last.size)
    return Estimate(value=value, low=value - reach, high=value + reach, tasks=first.size + last.size)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return Spearman's rank correlation of two rows of values, with the interval by Fisher's transformation; 0 if a row is constant.

    Raises:
        ValueError: If the rows are not equally long, or have fewer than four values.
    """
    if len(first) != len(second) or len(first) < 4:
        raise ValueError(f"a correlation needs two rows of four values each; got {len(first)} and {len(second)}")
    ranks = [_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    if any(float(row.std()) == 0.0 for row in ranks):
        return Estimate(value=0.0, low=-1.0, high=1.0, tasks=len(first))
    value = float(np.corrcoef(np.stack(ranks))[0, 1])
    # A perfect correlation is cut a little, because its arctanh is infinite.
    middle, reach = np.arctanh(np.clip(value, -1 + 1e-12, 1 - 1e-12)), NORMAL / sqrt(len(first) - 3)
    return Estimate(value=value, low=float(np.tanh(middle - reach)), high=float(np.tanh(middle + reach)), tasks=len(first))


def _ranks(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    means = np.cumsum(counts) - (counts + 1) / 2
    return np.asarray(means[inverse], dtype=np.float64)


def pass_at_k(tries: int, solved: int, k: int) -> float:
    """Chance that at least one of `k` tries, drawn without replacement from those made, solved the task.

    The estimator ``1 - C(n - c, k) / C(n, k)`` of Chen et al., 2021 (arXiv:2107.03374). Computed with whole numbers of any
    size and rounded once, at the end: it neither overflows for thousands of tries nor loses digits near 0 or 1.

    Args:
        tries: Tries made (n).
        solved: How many of them solved it (c).
        k: Tries allowed, from 1 to `tries`.

    Returns:
        A number in 0..1; its mean over repetitions is ``1 - (1 - p)^k`` if every try succeeds with chance p.

    Raises:
        ValueError: If `k` is not in 1..n, or `solved` not in 0..n.
    """
    if not 1 <= k <= tries or not 0 <= solved <= tries:
        raise ValueError(f"pass@{k} of {solved} in {tries}: k must be from 1 to the number of tries, and 0 <= solved <= tries")
    ways = comb(tries, k)
    return (ways - comb(tries - solved, k)) / ways


def useful_k(tries: int) -> list[int]:
    """The k worth showing for so many tries: powers of two, and all of them."""
    return sorted({1 << power for power in range(tries.bit_length()) if 1 << power <= tries} | {tries})
