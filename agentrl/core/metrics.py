"""Means that stay right when they are summed over micro-batches, ranks and steps.

A mean of means is wrong as soon as the parts differ in size; here the sum and the weight travel apart until the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class MetricSums:
    """Accumulates named means, totals and extremes.

    Attributes:
        sums: name -> (weighted sum, weight); reported as their ratio.
        highs: name -> largest value seen.
        lows: name -> smallest value seen.
        totals: name -> plain sum.
    """

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    highs: dict[str, float] = field(default_factory=dict)
    lows: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, total: float, weight: float) -> None:
        """Add `total` (already multiplied by its weight) and `weight` to the mean called `name`."""
        old_total, old_weight = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + total, old_weight + weight)

    def high(self, name: str, value: float) -> None:
        """Keep the larger of what was seen and `value`."""
        self.highs[name] = max(self.highs.get(name, value), value)

    def low(self, name: str, value: float) -> None:
        """Keep the smaller of what was seen and `value`."""
        self.lows[name] = min(self.lows.get(name, value), value)

    def total(self, name: str, value: float) -> None:
        """Add `value` to the total called `name`."""
        self.totals[name] = self.totals.get(name, 0.0) + value

    def merge(self, other: MetricSums) -> None:
        """Fold another accumulator (of a micro-batch, of a rank) into this one."""
        for name, (total, weight) in other.sums.items():
            self.mean(name, total, weight)
        for name, value in other.highs.items():
            self.high(name, value)
        for name, value in other.lows.items():
            self.low(name, value)
        for name, value in other.totals.items():
            self.total(name, value)

    def result(self) -> dict[str, float]:
        """All values as plain floats; a mean over no weight is left out."""
        means = {name: total / weight for name, (total, weight) in self.sums.items() if weight}
        return {**means, **self.highs, **self.lows, **self.totals}


def average(dicts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean per key over the mappings that have the key."""
    sums = MetricSums()
    for values in dicts:
        for name, value in values.items():
            sums.mean(name, float(value), 1.0)
    return sums.result()
