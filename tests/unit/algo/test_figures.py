"""What losses and corrections report, their defaults, and the choice of single tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentrl.algo.advantages import AdvantageInputs
from agentrl.algo.compute import compute_advantages, compute_correction, compute_policy_loss, select_tokens
from agentrl.algo.corrections import correction_facts, find_correction, needs_whole_batch
from agentrl.algo.corrections.ratios import RatioOptions, second_moment_threshold
from agentrl.algo.losses import find_loss, loss_facts
from agentrl.algo.selection import high_entropy
from agentrl.algo.statistics import record_percentile
from agentrl.algo.token_losses import LossInputs, clip_options
from agentrl.core.errors import ConfigError
from agentrl.core.metrics import HISTOGRAM_WIDTH, MetricSums
from tests.unit.algo.chosen import correction_inputs, correction_options, estimator_options, loss_options


def moved(log_ratio: list[float], advantages: list[float]) -> LossInputs:
    """Tokens of one row whose log-probability has moved from -3 by so much."""
    old = torch.full((len(log_ratio),), -3.0)
    return LossInputs(
        new=old + torch.tensor(log_ratio),
        old=old,
        advantages=torch.tensor(advantages),
        sequence=torch.zeros(len(log_ratio), dtype=torch.long),
    )


@pytest.mark.parametrize(
    ("name", "ratio", "clipped"),
    [
        ("ppo", (math.exp(0.5) + math.exp(-0.1) + math.exp(-0.4)) / 3, 1 / 3),
        ("gspo", 1.0, 0.0),
        ("cispo", (math.exp(0.5) + math.exp(-0.1) + math.exp(-0.4)) / 3, 2 / 3),
        ("gmpo", math.exp(-0.1 / 3), 1 / 3),  # the first is clipped to 0.4
    ],
)
def test_ratio_and_clipping_are_those_of_the_loss(name: str, ratio: float, clipped: float) -> None:
    stats = compute_policy_loss(name, moved([0.5, -0.1, -0.4], [1.0, 1.0, 1.0]), loss_options(name)).stats.result()
    assert stats["policy/ratio_mean"] == pytest.approx(ratio, abs=1e-6)
    assert stats["policy/clip_fraction"] == pytest.approx(clipped)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ppo", {"eps_clip_low": 0.2, "eps_clip_high": 0.2, "dual_clip": None}),
        ("dppo_tv", {"eps_clip_low": 0.15, "eps_clip_high": 0.15}),
        ("dppo_kl", {"eps_clip_low": 0.05, "eps_clip_high": 0.05}),
        ("ipo", {"eps_clip_low": 0.3, "eps_clip_high": 0.3, "ipo_kl_coef": 0.0}),
        ("sapo", {"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05}),
        ("gmpo", {"eps_clip_low": 0.4, "eps_clip_high": 0.4}),
        ("clip_cov", {"cov_share": 2e-4, "clip_cov_range": (1.0, 5.0), "eps_clip_low": 0.2, "eps_clip_high": 0.2}),
        ("kl_cov", {"cov_share": 2e-4, "kl_cov_coef": 1.0}),
    ],
)
def test_the_defaults_of_the_papers(name: str, expected: dict[str, Any]) -> None:
    assert vars(loss_facts(name).options()) == expected


def test_a_share_of_less_than_a_token_is_one_token() -> None:
    inputs = moved([0.0, 1.0, 2.0], [0.0, 1.0, 3.0])
    chosen = select_tokens(find_loss("kl_cov"), inputs, loss_options("kl_cov"))
    assert chosen is not None
    assert chosen.tolist() == [False, False, True]


def test_a_range_of_covariances_holds_some() -> None:
    with pytest.raises(ConfigError, match="holds no covariance"):
        loss_options("clip_cov", clip_cov_range=(2.0, 2.0))


def test_tokens_of_high_entropy_at_the_edges() -> None:
    """A share whose quantile falls on a token by calculation, and by rounding a little above it, takes that token too."""
    entropies = torch.arange(11.0)
    assert int(high_entropy(entropies, 0.7).sum()) == 8  # (1 - 0.7) * 10 is 3.0000000000000004
    assert high_entropy(torch.zeros(0), 0.5).shape == (0,)


def test_a_percentile_is_rounded_to_the_nearest_bin() -> None:
    stats = MetricSums()
    record_percentile(stats, "p99", torch.full((50,), 9.6 * HISTOGRAM_WIDTH, dtype=torch.float64))
    assert stats.result()["p99"] == pytest.approx(math.exp(10 * HISTOGRAM_WIDTH), rel=HISTOGRAM_WIDTH / 4)


def correction_of(log_rho: list[float], options: RatioOptions, *, advantages: list[float], same: list[bool]) -> Any:
    old, row = torch.tensor(log_rho), torch.zeros(len(log_rho), dtype=torch.long)
    inputs = correction_inputs(old, torch.zeros_like(old), row, torch.tensor(same), torch.tensor(advantages))
    return compute_correction("tis", inputs, options)


def test_the_largest_mismatch_is_of_the_same_version() -> None:
    found = correction_of([0.1, -2.0], RatioOptions(), advantages=[1.0, 1.0], same=[True, False])
    assert found.stats.result()["mismatch/max"] == pytest.approx(0.1)


def test_a_token_that_is_dropped_is_not_bounded_too() -> None:
    """Both tokens are above the bound of 2; a drifted failure is dropped as well."""
    found = correction_of([1.0, 1.5, -4.0], RatioOptions(opsm_delta=0.4), advantages=[1.0, -1.0, -1.0], same=[True] * 3)
    assert found.keep.tolist() == [True, False, False]
    stats = found.stats.result()
    assert (stats["off_policy/masked"], stats["off_policy/bounded"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))


def test_masks_add_up() -> None:
    """One token is outside of the range, another one is a drifted failure."""
    options = RatioOptions(off_policy_mode="mask", off_policy_range=(0.5, 2.0), opsm_delta=0.1)
    found = correction_of([1.5, 0.0, -0.6, -3.0], options, advantages=[1.0, 1.0, -1.0, 1.0], same=[True] * 4)
    assert found.keep.tolist() == [False, True, False, False]


def test_tokens_of_a_sequence_that_stays_are_bounded_at_their_own_cap() -> None:
    """The geometric mean may leave 1 by a hundredth, a token may weigh 2."""
    found = correction_of([0.6, -0.6], correction_options("seq-mask-tis"), advantages=[1.0, 1.0], same=[True] * 2)
    assert found.stats.result()["off_policy/bounded"] == 0.0
    torch.testing.assert_close(found.weights, torch.tensor([0.6, -0.6]).exp())


def test_a_range_of_ratios_begins_at_zero() -> None:
    with pytest.raises(ConfigError, match="0 <= low < high"):
        RatioOptions(off_policy_range=(-0.5, 2.0))


def test_a_ratio_beyond_all_bounds_is_the_first_to_be_masked() -> None:
    assert float(second_moment_threshold(torch.tensor([0.0, 0.0, 30.0]), 0.04)) < 20.0


def test_only_corrections_that_compare_rows_need_the_whole_batch() -> None:
    needing = [name for name in ("tis", "seq-tis", "icepop", "opsm", "m2po") if needs_whole_batch(find_correction(name), _default(name))]
    assert needing == ["m2po"]


def _default(name: str) -> Any:
    return correction_facts(name).options()


def test_turn_norm_without_division_is_the_difference_to_the_mean_of_the_turn() -> None:
    rewards, turn = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.arange(4)
    inputs = AdvantageInputs(
        token_rewards=rewards,
        episode=torch.tensor([0, 0, 1, 1]),
        group=torch.tensor([0, 0]),
        rewards=torch.tensor([3.0, 9.0]),
        turn=turn,
    )
    found = compute_advantages("turn_norm", inputs, estimator_options("turn_norm", advantage_std_norm=False, gamma=0.5)).advantages
    assert found.tolist() == [-2.0, -2.0, 2.0, 2.0]  # 2 against 6 from the first turn on, 2 against 6 in the second


def test_clipped_tokens_are_counted_by_the_sign_of_their_advantage() -> None:
    result = compute_policy_loss("ppo", moved([0.5, 0.0, 0.5, -0.5], [1.0, 1.0, 0.0, -1.0]), loss_options("ppo"))
    stats = result.stats.result()
    assert (stats["policy/clip_fraction"], stats["policy/clip_fraction_positive"], stats["policy/clip_fraction_negative"]) == (
        0.5,
        0.5,
        1.0,
    )


def test_the_ratio_of_a_result_is_that_of_the_loss() -> None:
    found = compute_policy_loss("gspo", moved([0.5, -0.1, -0.4], [1.0, 1.0, 1.0]), loss_options("gspo")).ratio
    assert found is not None
    torch.testing.assert_close(found, torch.ones(3))


def test_bounds_that_a_decorator_states_are_in_order() -> None:
    chosen = clip_options((0.1, 0.4))()
    assert (chosen.eps_clip_low, chosen.eps_clip_high) == (0.1, 0.4)
