"""Intervals of shares, of differences and of rank correlations: known values, and how often they cover."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.evaluation.statistics import bootstrap_mean, difference_of_means, rank_correlation, share


@pytest.mark.parametrize(
    ("count", "of", "low", "high"), [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (5, 10, 0.23659, 0.76341), (81, 263, 0.25528, 0.36620)]
)
def test_wilson_has_its_published_values(count: int, of: int, low: float, high: float) -> None:
    found = share(count, of)
    assert (found.low, found.high) == (pytest.approx(low, abs=2e-5), pytest.approx(high, abs=2e-5))
    assert found.value == count / of


def test_a_share_of_nothing_says_nothing() -> None:
    found = share(0, 0)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 1.0)


def test_a_difference_and_its_interval() -> None:
    found = difference_of_means([0.0, 1.0, 0.0, 1.0], [2.0, 3.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.low == pytest.approx(2 - 1.959964 * np.sqrt(2 * (1 / 3) / 4), abs=1e-6)
    with pytest.raises(ValueError, match="two values on each side"):
        difference_of_means([1.0], [1.0, 2.0])


def test_differences_of_equal_distributions_cover_zero() -> None:
    draw = np.random.default_rng(0)
    found = [difference_of_means(draw.random(12).tolist(), draw.random(12).tolist()) for _ in range(500)]
    covered = sum(one.low is not None and one.high is not None and one.low <= 0 <= one.high for one in found)
    assert 0.9 <= covered / len(found) <= 0.98


def test_rank_correlations() -> None:
    rising = rank_correlation([1, 2, 3, 4, 5], [1, 8, 27, 64, 125])
    assert rising.value == pytest.approx(1.0)
    assert rank_correlation([1, 2, 2, 3], [4, 3, 3, 1]).value == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 6, 5]).value == pytest.approx(1 - 6 * 6 / (6 * 35))
    constant = rank_correlation([1, 1, 1, 1], [1, 2, 3, 4])
    assert (constant.value, constant.low, constant.high) == (0.0, -1.0, 1.0)
    with pytest.raises(ValueError, match="four values"):
        rank_correlation([1, 2, 3], [1, 2, 3])


def test_a_value_that_is_not_finite_has_no_interval() -> None:
    with pytest.raises(ValueError, match="finite"):
        bootstrap_mean([1.0, float("inf")], seed=0)


def test_every_task_is_resampled() -> None:
    estimate = bootstrap_mean([0.0, 0.0, 0.0, 1.0], seed=0)
    assert (estimate.low, estimate.high) == (0.0, 0.75)


def test_a_difference_of_means_has_the_interval_of_unequal_samples() -> None:
    found = difference_of_means([0.0, 2.0], [1.0, 1.0, 4.0, 4.0, 5.0])
    reach = 1.959964 * (2.0 / 2 + 3.5 / 5) ** 0.5
    assert (found.value, found.low, found.high, found.tasks) == pytest.approx((2.0, 2.0 - reach, 2.0 + reach, 7))


def test_a_rank_correlation_has_fishers_interval() -> None:
    found = rank_correlation([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [2.0, 1.0, 4.0, 3.0, 7.0, 5.0, 6.0])
    value = 1 - 6 * (1 + 1 + 1 + 1 + 4 + 1 + 1) / (7 * 48)
    low, high = (np.tanh(np.arctanh(value) + sign * 1.959964 / 2.0) for sign in (-1, 1))
    assert (found.value, found.low, found.high) == pytest.approx((value, low, high))
