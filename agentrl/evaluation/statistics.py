"""Bootstrap intervals of means over tasks.

Tasks are what is resampled, never single episodes: episodes of one task are alike, and treating them as independent
would make intervals too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

RESAMPLES = 5000
LEVEL = 0.95
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
