import math

import pytest
import torch

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions, DiscountedOptions, whiten
from agentrl.algo.compute import compute_advantages
from agentrl.algo.estimators import ESTIMATORS
from agentrl.algo.estimators.gae import GaeOptions
from agentrl.core.errors import BatchError, ConfigError
from agentrl.resolve.commands import load_config
from tests.unit.algo.chosen import estimator_options
from tests.unit.algo.ragged import outcome_inputs, ragged

LENGTHS = torch.tensor([3, 4, 5, 6])
EPISODE = torch.repeat_interleave(torch.arange(4), LENGTHS)
LAST = LENGTHS.cumsum(0) - 1
PAIRS = torch.tensor([0, 0, 1, 1])
GROUP_BASELINES = ["rloo", "group_norm", "dr_grpo", "opo", "pass_at_k"]


def outcome(rewards: list[float], group: torch.Tensor = PAIRS, **extra: torch.Tensor) -> AdvantageInputs:
    token_rewards = torch.zeros(len(EPISODE))
    token_rewards[LAST] = torch.tensor(rewards)
    return AdvantageInputs(token_rewards=token_rewards, episode=EPISODE, group=group, rewards=torch.tensor(rewards), **extra)


def single(token_rewards: list[float], **extra: torch.Tensor) -> AdvantageInputs:
    rewards = torch.tensor(token_rewards)
    index = torch.zeros(len(rewards), dtype=torch.long)
    return AdvantageInputs(token_rewards=rewards, episode=index, group=index[:1], rewards=rewards.sum().reshape(1), **extra)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [1, -1, 0, 0]),
        ("group_norm", [0.7071, -0.7071, 0, 0]),
        ("grpo", [0.7071, -0.7071, 0, 0]),
        ("dr_grpo", [0.5, -0.5, 0, 0]),
        ("reinforce_baseline", [1.6994, -1.5205, 0.0894, 0.0894]),
        ("reinforce", [0.5345, -1.8708, 0.5345, 0.5345]),
        ("opo", [0.5714, -0.4286, 0, 0]),
        ("batch_std", [1, -1, 0, 0]),
        ("pass_at_k", [1.4142, 0, 0, 0]),
        ("turn_norm", [0.7071, -0.7071, 0, 0]),
        ("gigpo", [1.4142, -1.4142, 0, 0]),
    ],
)
def test_golden_values(name: str, expected: list[float]) -> None:
    result = compute_advantages(name, outcome([1.0, 0.0, 1.0, 1.0]), estimator_options(name))
    torch.testing.assert_close(result.advantages, torch.tensor(expected, dtype=torch.float32)[EPISODE], rtol=0, atol=1e-4)


def test_gae_by_hand_crosses_turns_but_not_episodes() -> None:
    values = torch.tensor([0.5, 0.4, 0.3, 9.0])
    inputs = AdvantageInputs(
        token_rewards=torch.tensor([0.0, 1.0, 2.0, 5.0]),
        episode=torch.tensor([0, 0, 0, 1]),
        group=torch.tensor([0, 1]),
        rewards=torch.tensor([3.0, 5.0]),
        values=values,
    )
    result = compute_advantages("gae", inputs, estimator_options("gae", gamma=0.9, gae_lambda=0.5))
    third = 2.0 - 0.3
    second = 1.0 + 0.9 * 0.3 - 0.4 + 0.45 * third
    first = 0.0 + 0.9 * 0.4 - 0.5 + 0.45 * second
    raw = torch.tensor([first, second, third, 5.0 - 9.0])
    assert result.returns is not None
    torch.testing.assert_close(result.returns, raw + values)
    torch.testing.assert_close(result.advantages, whiten(raw))


def test_gae_with_lambda_one_and_no_values_is_reinforce() -> None:
    inputs = outcome([1.0, -2.0, 0.5, 3.0], values=torch.zeros(len(EPISODE)))
    options = GaeOptions(gamma=0.95, gae_lambda=1.0)
    torch.testing.assert_close(
        compute_advantages("gae", inputs, options).advantages, compute_advantages("reinforce", inputs, options).advantages
    )


def test_turn_rewards_reach_only_the_tokens_before_them_in_reinforce() -> None:
    inputs = single([0.0, 1.0, 0.0, 2.0])
    result = compute_advantages("reinforce", inputs, estimator_options("reinforce", advantage_std_norm=False))
    torch.testing.assert_close(result.advantages, torch.tensor([3.0, 3.0, 2.0, 2.0]) - 2.5)


@pytest.mark.parametrize("name", [*GROUP_BASELINES, "reinforce_baseline"])
def test_group_estimators_see_only_the_total_of_the_turn_rewards(name: str) -> None:
    spread = outcome([1.0, 0.0, 1.0, 1.0])
    token_rewards = spread.token_rewards.clone()
    token_rewards[0], token_rewards[2] = 0.25, 0.75
    moved = AdvantageInputs(token_rewards=token_rewards, episode=EPISODE, group=PAIRS, rewards=spread.rewards)
    options = estimator_options(name)
    assert torch.equal(compute_advantages(name, spread, options).advantages, compute_advantages(name, moved, options).advantages)


def test_reinforce_baseline_discounts_the_excess_and_the_kl_from_the_end() -> None:
    kl = torch.full((len(EPISODE),), 0.1)
    options = DiscountedOptions(gamma=0.5, advantage_std_norm=False)
    result = compute_advantages("reinforce_baseline", outcome([1.0, 0.0, 1.0, 1.0], kl=kl), options).advantages
    first = [0.5 - 0.1]
    for _ in range(2):
        first.insert(0, 0.5 * first[0] - 0.1)
    torch.testing.assert_close(result[:3] - result[2], torch.tensor(first) - first[-1])


def test_an_episode_is_clipped_by_its_total_and_its_turns_are_scaled() -> None:
    inputs = single([0.0, 6.0, 0.0, 6.0])
    options = DiscountedOptions(advantage_std_norm=False, reward_clip_range=(-1.0, 3.0))
    result = compute_advantages("reinforce", inputs, options)
    torch.testing.assert_close(result.advantages, torch.tensor([3.0, 3.0, 1.5, 1.5]) - 2.25)


def test_rewards_are_clipped_before_the_baseline() -> None:
    result = compute_advantages("dr_grpo", outcome([100.0, 0.0, -100.0, 0.0]), estimator_options("dr_grpo", reward_clip_range=(-1.0, 10.0)))
    torch.testing.assert_close(result.advantages[LAST], torch.tensor([5.0, -5.0, -0.5, 0.5]))


def test_group_norm_does_not_enlarge_rounding() -> None:
    """Rewards that differ by the last bit of float32 would have advantages of +-1.5; small rewards that really differ have."""
    one = torch.tensor(1.0)
    above = float(torch.nextafter(one, one + 1))
    same = compute_advantages("group_norm", outcome([1.0, above, 1.0, 1.0]), estimator_options("group_norm"))
    assert same.advantages.tolist() == [0.0] * len(EPISODE)
    small = compute_advantages("group_norm", outcome([1e-4, 2e-4, 1e-4, 1e-4]), estimator_options("group_norm"))
    assert float(small.advantages.abs().max()) > 0.7


def test_an_episode_inside_the_range_is_not_clipped_though_one_of_its_turns_is_outside() -> None:
    options = DiscountedOptions(advantage_std_norm=False, reward_clip_range=(-10.0, 10.0))
    result = compute_advantages("reinforce", single([15.0, -10.0]), options)
    torch.testing.assert_close(result.advantages, torch.tensor([5.0, -10.0]) + 2.5)


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_kl_is_paid_from_each_token_on_after_the_baseline(name: str) -> None:
    kl = torch.linspace(0.0, 1.0, len(EPISODE))
    plain = compute_advantages(name, outcome([1.0, 0.0, 1.0, 3.0]), estimator_options(name)).advantages
    charged = compute_advantages(name, outcome([1.0, 0.0, 1.0, 3.0], kl=kl), estimator_options(name)).advantages
    expected = torch.cat([part.flip(0).cumsum(0).flip(0) for part in kl.split(LENGTHS.tolist())])
    torch.testing.assert_close(plain - charged, expected)


def test_kl_lowers_the_token_rewards_of_gae_and_is_not_clipped() -> None:
    kl = torch.tensor([50.0, 0.0])
    options = GaeOptions(advantage_std_norm=False, reward_clip_range=(-1.0, 1.0))
    result = compute_advantages("gae", single([0.0, 1.0], kl=kl, values=torch.zeros(2)), options)
    assert result.returns is not None
    torch.testing.assert_close(result.returns, torch.tensor([1.0 - 50.0, 1.0]))


@pytest.mark.parametrize("name", GROUP_BASELINES)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1e-3, 9.99])
def test_equal_rewards_and_lone_members_get_no_advantage(name: str, reward: float) -> None:
    """In float32 the mean of equal rewards is off by a rounding error, which a division by 1e-9 would blow up."""
    batch = ragged(0, groups=1, members=7)
    equal = compute_advantages(name, outcome_inputs(batch, torch.full((7,), reward)), estimator_options(name))
    assert float(equal.advantages.abs().max()) < 1e-6
    lone = compute_advantages(name, outcome([reward, 2.0, 3.0, 4.0], group=torch.tensor([0, 1, 2, 3])), estimator_options(name))
    assert float(lone.advantages.abs().max()) == 0.0


def test_std_norm_can_be_switched_off() -> None:
    options = DiscountedOptions(advantage_std_norm=False)
    inputs = outcome([1.0, 0.0, 1.0, 1.0])
    torch.testing.assert_close(compute_advantages("group_norm", inputs, options).advantages[LAST], torch.tensor([0.5, -0.5, 0.0, 0.0]))
    returns = torch.tensor([1.0, 0.0, 1.0, 1.0])[EPISODE]
    torch.testing.assert_close(compute_advantages("reinforce", inputs, options).advantages, returns - returns.mean())


def test_whitening_clamps_the_variance() -> None:
    assert torch.equal(whiten(torch.full((5,), 0.3)), torch.zeros(5))
    tiny = torch.tensor([1e-6, -1e-6])
    torch.testing.assert_close(whiten(tiny), tiny / math.sqrt(1e-8))


def test_group_numbers_need_not_be_dense() -> None:
    near = compute_advantages("rloo", outcome([1.0, 0.0, 2.0, 1.0]), estimator_options("rloo"))
    far = compute_advantages("rloo", outcome([1.0, 0.0, 2.0, 1.0], group=torch.tensor([70, 70, 5, 5])), estimator_options("rloo"))
    assert torch.equal(near.advantages, far.advantages)


def test_advantages_carry_no_gradient() -> None:
    values = torch.zeros(len(EPISODE), requires_grad=True)
    result = compute_advantages("gae", outcome([1.0, 0.0, 1.0, 1.0], values=values), estimator_options("gae"))
    assert result.returns is not None
    assert not result.advantages.requires_grad
    assert not result.returns.requires_grad


def test_config_errors_name_the_remedy() -> None:
    inputs = outcome([1.0, 0.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match=r"--advantage-estimator = 'gpro'.*group_norm"):
        compute_advantages("gpro", inputs, AdvantageOptions())
    with pytest.raises(ConfigError, match="critic"):
        compute_advantages("gae", inputs, estimator_options("gae"))
    with pytest.raises(ConfigError, match="--reward-clip-range"):
        AdvantageOptions(reward_clip_range=(0.5, 1.0))
    for name in [*GROUP_BASELINES, "grpo"]:
        with pytest.raises(ConfigError, match=r"--gamma = 0.9: has no effect"):
            load_config(["--agent", "module:Name", "--advantage-estimator", name, "--gamma", "0.9"])


def test_lengths_that_disagree_are_refused() -> None:
    with pytest.raises(BatchError, match="values"):
        outcome([1.0, 0.0, 1.0, 1.0], values=torch.zeros(3))
    with pytest.raises(BatchError, match="group"):
        outcome([1.0, 0.0, 1.0, 1.0], group=torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_rank_without_a_single_token_works(name: str) -> None:
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    inputs = AdvantageInputs(
        token_rewards=empty, episode=none, group=none, rewards=empty, values=empty, kl=empty, turn=none, baseline=empty
    )
    assert compute_advantages(name, inputs, estimator_options(name)).advantages.shape == (0,)
