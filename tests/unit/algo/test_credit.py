"""Credit per step: turns in the same state, and a lambda by length."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.algo.advantages import AdvantageInputs
from agentrl.algo.compute import compute_advantages
from agentrl.algo.estimators import ESTIMATORS
from agentrl.algo.statistics import reverse_discounted_cumsum
from agentrl.core.types import FinishReason, Group, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.batch import advantage_inputs, collate
from tests.unit.algo.chosen import estimator_options

# Two episodes of three turns and one of two in a group, one token a turn. States: 0 begins all, 1 and 2 are met by two of them, at other
# places; state 3 by one. Another group begins in a state of its own.
EPISODE = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 4])
STATE = torch.tensor([0, 1, 2, 0, 2, 3, 0, 1, 4, 4])
REWARDS = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 3.0])


def inputs(kl: torch.Tensor | None = None) -> AdvantageInputs:
    totals = torch.zeros(5).index_add(0, EPISODE, REWARDS)
    group = torch.tensor([0, 0, 0, 1, 1])
    return AdvantageInputs(token_rewards=REWARDS, episode=EPISODE, group=group, rewards=totals, turn=torch.arange(10), state=STATE, kl=kl)


def written_out(gamma: float, weight: float, divide: bool) -> list[float]:
    """Equations 3 and 5 to 8 of arXiv:2505.10978, by episode and turn; the episodes of a group are compared once each."""
    episodes: dict[int, list[int]] = {}
    for token, episode in enumerate(EPISODE.tolist()):
        episodes.setdefault(episode, []).append(token)
    totals = {episode: sum(float(REWARDS[token]) for token in tokens) for episode, tokens in episodes.items()}
    groups = {0: [0, 1, 2], 1: [3, 4]}

    def normalised(value: float, others: list[float]) -> float:
        centred = value - float(np.mean(others))
        deviation = float(np.std(others, ddof=1)) if len(others) > 1 else 0.0
        return centred if not divide else centred / (deviation + 1e-9) if deviation > 1e-9 else 0.0

    ahead = {
        token: sum(gamma**later * float(REWARDS[other]) for later, other in enumerate(tokens[place:]))
        for tokens in episodes.values()
        for place, token in enumerate(tokens)
    }
    found = []
    for token, episode in enumerate(EPISODE.tolist()):
        whole = next(members for members in groups.values() if episode in members)
        same = [other for other in range(10) if STATE[other] == STATE[token]]
        by_episode = normalised(totals[episode], [totals[other] for other in whole])
        found.append(by_episode + weight * normalised(ahead[token], [ahead[other] for other in same]))
    return found


@pytest.mark.parametrize(("gamma", "weight", "divide"), [(0.95, 1.0, True), (1.0, 0.5, False), (0.5, 2.0, True), (0.9, 0.0, True)])
def test_gigpo_is_the_sum_of_both_comparisons(gamma: float, weight: float, divide: bool) -> None:
    options = estimator_options("gigpo", gamma=gamma, step_advantage_weight=weight, advantage_std_norm=divide)
    found = compute_advantages("gigpo", inputs(), options).advantages
    torch.testing.assert_close(found, torch.tensor(written_out(gamma, weight, divide)), rtol=1e-5, atol=1e-6)


def test_gigpo_without_steps_is_group_norm_and_pays_for_kl_ahead() -> None:
    kl = 0.1 * torch.arange(10.0)
    options = estimator_options("gigpo", step_advantage_weight=0.0)
    found = [
        compute_advantages(name, inputs(kl), chosen).advantages
        for name, chosen in (("gigpo", options), ("group_norm", estimator_options("group_norm")))
    ]
    torch.testing.assert_close(found[0], found[1])


def test_a_state_that_occurs_once_has_the_advantage_of_its_episode() -> None:
    both = compute_advantages("gigpo", inputs(), estimator_options("gigpo")).advantages
    alone = compute_advantages("group_norm", inputs(), estimator_options("group_norm")).advantages
    assert both[5] == alone[5]
    assert both[4] != alone[4]


def turn(prompt: list[int], key: str | None = None) -> Turn:
    return Turn(
        prompt_ids=ints(prompt),
        token_ids=ints([9]),
        logprobs=floats([-1.0]),
        versions=ints([0]),
        finish_reason=FinishReason.STOP,
        state_key=key,
    )


def test_states_are_told_apart_by_name_else_by_what_is_read_and_by_group() -> None:
    def group(number: int, *episodes: list[Turn]) -> Group:
        members = tuple(
            Trajectory(
                trajectory_id=f"{number}-{i}",
                episode_id=f"{number}-{i}",
                group_id=number,
                turns=tuple(turns),
                status=Status.FINISHED,
                reward=0.0,
            )
            for i, turns in enumerate(episodes)
        )
        return Group(group_id=number, task=Task("a"), trajectories=members)

    first = group(0, [turn([1, 2]), turn([3]), turn([4], "home")], [turn([1, 2]), turn([5], "home"), turn([3])])
    batch = collate([first, group(1, [turn([1, 2]), turn([7], "home")], [turn([1, 2])])])
    assert batch.state.tolist() == [0, 1, 2, 0, 2, 1, 3, 4, 3]
    assert advantage_inputs(batch).state is batch.state


def test_a_discount_for_each_segment() -> None:
    values, index = torch.randn(12), torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    each = torch.tensor([0.9, 0.0, 0.5])
    found = reverse_discounted_cumsum(values, index, each)
    for segment, discount in enumerate(each.tolist()):
        mine = values[index == segment]
        torch.testing.assert_close(
            found[index == segment], reverse_discounted_cumsum(mine, torch.zeros(len(mine), dtype=torch.long), discount)
        )


@pytest.mark.parametrize("name", ["gae", "turn_gae"])
def test_lambda_by_length_and_one_for_the_critic(name: str) -> None:
    """VAPO: 1 - 1 / (alpha length), not below 0; the targets of the critic have a lambda of their own."""
    lengths, alpha = [2, 30], 0.1
    episode = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    rewards, values = torch.randn(32), torch.randn(32)
    given = AdvantageInputs(
        token_rewards=rewards,
        episode=episode,
        group=torch.tensor([0, 1]),
        rewards=torch.zeros(2).index_add(0, episode, rewards),
        values=values,
        turn=torch.arange(32),
    )
    wide = {"reward_clip_range": (-1e9, 1e9), "advantage_std_norm": False, "gamma": 0.99}
    options = estimator_options(name, gae_lambda="adaptive", gae_alpha=alpha, critic_lambda=1.0, **wide)
    found = compute_advantages(name, given, options)
    expected, targets = torch.zeros(32), torch.zeros(32)
    for number, length in enumerate(lengths):
        tokens = (episode == number).nonzero()[:, 0].tolist()
        decay = 0.99 * max(0.0, 1 - 1 / (alpha * length))
        ahead = target = 0.0
        for token in reversed(tokens):
            after = float(values[token + 1]) if token + 1 in tokens else 0.0
            delta = float(rewards[token]) + 0.99 * after - float(values[token])
            ahead, target = delta + decay * ahead, delta + 0.99 * target
            expected[token], targets[token] = ahead, target + float(values[token])
    torch.testing.assert_close(found.advantages, expected - expected.mean(), rtol=1e-4, atol=1e-4)
    assert found.returns is not None
    torch.testing.assert_close(found.returns, targets, rtol=1e-4, atol=1e-4)
    same = compute_advantages(name, given, estimator_options(name, gae_lambda=0.5, **wide))
    assert same.returns is not None
    torch.testing.assert_close(same.advantages, same.returns - values - (same.returns - values).mean(), rtol=1e-4, atol=1e-4)
    assert math.isfinite(float(found.advantages.sum()))


@pytest.mark.parametrize("name", ["gae", "turn_gae"])
def test_an_episode_that_was_cut_goes_on_with_the_critics_value(name: str) -> None:
    """Written out for gamma 0.9, lambda 0.5: two episodes alike but for their end, of which the first was cut where the value was 4."""
    given = AdvantageInputs(
        token_rewards=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0]),
        episode=torch.tensor([0, 0, 0, 1, 1, 1]),
        group=torch.tensor([0, 1]),
        rewards=torch.tensor([1.0, 1.0]),
        values=torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0]),
        turn=torch.arange(6),
        at_cut=torch.tensor([4.0, 0.0]),
    )
    options = estimator_options(name, gamma=0.9, gae_lambda=0.5)
    found = ESTIMATORS[name](given, options)
    last, middle, first = 1.0 + 0.9 * 4.0 - 3.0, 0.9 * 3.0 - 2.0, 0.9 * 2.0 - 1.0
    cut = [first + 0.45 * (middle + 0.45 * last), middle + 0.45 * last, last]
    over = [first + 0.45 * (middle - 0.45 * 2.0), middle - 0.45 * 2.0, -2.0]
    torch.testing.assert_close(found.advantages, torch.tensor([*cut, *over]))
    torch.testing.assert_close(found.returns, torch.tensor([*cut, *over]) + given.values)
    without = ESTIMATORS[name](replace(given, at_cut=None), options)
    torch.testing.assert_close(without.advantages, torch.tensor([*over, *over]))
