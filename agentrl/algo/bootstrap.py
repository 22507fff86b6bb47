"""Bootstrap intervals of means over tasks.

Tasks are what is resampled, never single episodes: episodes of one task are alike, and treating them as independent
would make intervals too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
