"""Means, extremes, totals, shares and percentiles of parts, folded together."""

from __future__ import annotations

import math

import pytest

from agentrl.core.metrics import HISTOGRAM_WIDTH, MetricSums, average


def part(total: float, weight: float, *, high: float, low: float, count: float) -> MetricSums:
    sums = MetricSums()
    sums.mean("mean", total, weight)
    sums.high("high", high)
    sums.low("low", low)
    sums.total("total", count)
    return sums


def merged(*parts: MetricSums) -> dict[str, float]:
    whole = MetricSums()
    for each in parts:
        whole.merge(each)
    return whole.result()


def test_parts_of_different_sizes_have_the_mean_of_the_whole() -> None:
    found = merged(part(2.0, 1.0, high=-4.0, low=5.0, count=1.0), part(10.0, 4.0, high=-3.0, low=7.0, count=2.0))
    assert found == {"mean": 2.4, "high": -3.0, "low": 5.0, "total": 3.0}


def test_an_extreme_is_that_of_any_part_and_not_of_the_last() -> None:
    sums = MetricSums()
    for value in (-2.0, -5.0, -3.0):
        sums.high("high", value)
        sums.low("low", -value)
    assert sums.result() == {"high": -2.0, "low": 2.0}


def test_a_mean_over_nothing_is_left_out() -> None:
    sums = MetricSums()
    sums.mean("nothing", 0.0, 0.0)
    sums.mean("something", 3.0, 2.0)
    sums.effective("no weights", 0.0, 0.0, 0.0)
    sums.histogram("no values", {})
    assert sums.result() == {"something": 1.5}


def test_an_effective_share_is_that_of_all_weights() -> None:
    first, second = MetricSums(), MetricSums()
    first.effective("share", 2.0, 4.0, 1.0)
    second.effective("share", 2.0, 2.0, 2.0)
    assert merged(first, second) == {"share": pytest.approx(4.0**2 / (3.0 * 6.0))}
    zero = MetricSums()
    zero.effective("share", 0.0, 0.0, 5.0)
    assert zero.result() == {"share": 0.0}


def test_a_percentile_counts_the_values_of_every_part_in_order() -> None:
    first, second = MetricSums(), MetricSums()
    first.histogram("p99", {100: 1, 0: 97})
    second.histogram("p99", {0: 1, 100: 1, -20: 100})
    assert merged(first, second) == {"p99": pytest.approx(math.exp(0 * HISTOGRAM_WIDTH))}
    third = MetricSums()
    third.histogram("p99", {7: 1, 3: 99})
    assert third.result() == {"p99": pytest.approx(math.exp(3 * HISTOGRAM_WIDTH))}
    third.histogram("p99", {7: 1})
    assert third.result() == {"p99": pytest.approx(math.exp(7 * HISTOGRAM_WIDTH))}


def test_an_average_is_over_the_mappings_that_have_the_key() -> None:
    assert average([{"a": 1.0, "b": 4.0}, {"a": 3.0}, {}]) == {"a": 2.0, "b": 4.0}
