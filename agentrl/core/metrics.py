"""Means that stay right when they are summed over micro-batches, ranks and steps.

A mean of means is wrong as soon as the parts differ in size; here the sum and the weight travel apart until the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

HISTOGRAM_WIDTH = 0.005
"""Bin ``b`` of a histogram holds values within half a per cent's step of ``exp(b * HISTOGRAM_WIDTH)``."""


@dataclass(slots=True)
class MetricSums:
    """Accumulates named means, totals and extremes."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)  # (weighted sum, weight); reported as their ratio
    highs: dict[str, float] = field(default_factory=dict)
    lows: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    # (sum of w, sum of w squared, number); reported as the effective sample size, as a share
    weights: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    # {bin: number}, bins spaced logarithmically; reported as the 99th percentile
    histograms: dict[str, dict[int, int]] = field(default_factory=dict)

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

    def effective(self, name: str, total: float, squares: float, count: float) -> None:
        """Add importance weights, by their sum, the sum of their squares and their number, to the share called `name`."""
        old = self.weights.get(name, (0.0, 0.0, 0.0))
        self.weights[name] = (old[0] + total, old[1] + squares, old[2] + count)

    def histogram(self, name: str, counts: Mapping[int, int]) -> None:
        """Add the number of values per bin to the percentile called `name`."""
        bins = self.histograms.setdefault(name, {})
        for position, count in counts.items():
            bins[position] = bins.get(position, 0) + count

    def merge(self, other: MetricSums) -> None:
        """Fold another accumulator (of a micro-batch, of a rank) into this one."""
        for add, values in ((self.high, other.highs), (self.low, other.lows), (self.total, other.totals)):
            for name, value in values.items():
                add(name, value)
        for name, mean in other.sums.items():
            self.mean(name, *mean)
        for name, weights in other.weights.items():
            self.effective(name, *weights)
        for name, counts in other.histograms.items():
            self.histogram(name, counts)

    def result(self) -> dict[str, float]:
        """All values as plain floats; a mean over no weight is left out, so is a share or a percentile of nothing."""
        means = {name: total / weight for name, (total, weight) in self.sums.items() if weight}
        shares = {name: total**2 / (count * (squares or 1.0)) for name, (total, squares, count) in self.weights.items() if count}
        percentiles = {name: _percentile(bins, 0.99) for name, bins in self.histograms.items() if bins}
        return {**means, **self.highs, **self.lows, **self.totals, **shares, **percentiles}


def average(dicts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean per key over the mappings that have the key."""
    totals: dict[str, float] = {}
    counts: dict[str, int] = {}
    for values in dicts:
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + float(value)
            counts[name] = counts.get(name, 0) + 1
    return {name: total / counts[name] for name, total in totals.items()}


def _percentile(bins: Mapping[int, int], share: float) -> float:
    """Centre of the first bin up to which at least `share` of the values lie."""
    wanted, seen = share * sum(bins.values()), 0
    for position in sorted(bins):
        seen += bins[position]
        if seen >= wanted:
            break
    return math.exp(position * HISTOGRAM_WIDTH)
