"""Advantages of several agents, against a calculation by hand; nothing mixes what agents earn."""

import numpy as np
import pytest
import torch

from agentrl.algo.advantages import AdvantageInputs
from agentrl.algo.compute import compute_advantages
from agentrl.core.types import FinishReason, Group, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.batch import Batch, collate
from agentrl.learner.sharding import plan_updates
from tests.unit.algo.chosen import estimator_options

REWARDS = {"ann": [1.0, 0.0, 0.5, 0.5], "bob": [-3.0, 5.0, -3.0, 1.0]}


def trajectory(group: int, member: int, agent: str, reward: float, *, tokens: int = 2, frozen: bool = False) -> Trajectory:
    turn = Turn(
        prompt_ids=ints([7]),
        token_ids=ints([member + 1] * tokens),
        logprobs=floats([-1.0] * tokens),
        versions=ints([0] * tokens),
        finish_reason=FinishReason.STOP,
        reward=reward,
    )
    return Trajectory(
        trajectory_id=f"{group}-{member}-{agent}",
        episode_id=f"{group}-{member}",
        group_id=group,
        turns=(turn,) if tokens else (),
        status=Status.FINISHED,
        reward=reward,
        agent=agent,
        frozen=frozen,
    )


def group(number: int = 0, scale: float = 1.0, **changes: object) -> Group:
    """Four episodes of two agents, member by member, as a worker makes them."""
    members = [trajectory(number, m, agent, scale * REWARDS[agent][m], **changes) for m in range(4) for agent in REWARDS]  # type: ignore[arg-type]
    return Group(group_id=number, task=Task("x"), trajectories=tuple(members))


def advantages(batch: Batch, estimator: str) -> list[float]:
    """One number per trajectory, in the batch's order."""
    inputs = AdvantageInputs(token_rewards=batch.token_rewards, episode=batch.episode, group=batch.group, rewards=batch.rewards)
    found = compute_advantages(estimator, inputs, estimator_options(estimator, advantage_std_norm=estimator == "group_norm")).advantages
    return [float(found[batch.episode == number][0]) for number in range(batch.num_episodes)]


def by_hand(estimator: str, rewards: list[float]) -> list[float]:
    own = np.array(rewards)
    if estimator == "rloo":
        return [r - np.delete(own, i).mean() for i, r in enumerate(own)]
    return list((own - own.mean()) / (own.std(ddof=1) if estimator == "group_norm" else 1.0))


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo"])
def test_an_agent_is_compared_with_itself_only(estimator: str) -> None:
    batch = collate([group(0), group(1, scale=2.0)])
    assert batch.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    expected = [value for scale in (1.0, 2.0) for agent in REWARDS for value in by_hand(estimator, [scale * r for r in REWARDS[agent]])]
    assert advantages(batch, estimator) == pytest.approx(expected, abs=1e-5)


def test_the_baseline_of_reinforce_is_the_agents_own() -> None:
    """The mean is taken per agent; whitening, which follows, only shifts and scales all tokens alike."""
    batch = collate([group()])
    centred = np.array([value for agent in REWARDS for value in by_hand("dr_grpo", REWARDS[agent])])
    assert advantages(batch, "reinforce_baseline") == pytest.approx(list(centred - centred.mean()), abs=1e-5)


def test_one_agents_rewards_do_not_move_the_others_advantages() -> None:
    shifted = tuple(
        t if t.agent == "ann" else trajectory(0, int(t.episode_id[-1]), "bob", 10.0 - (t.reward or 0.0)) for t in group().trajectories
    )
    before, after = (
        advantages(collate([group()]), "group_norm"),
        advantages(collate([Group(group_id=0, task=Task("x"), trajectories=shifted)]), "group_norm"),
    )
    assert before[:4] == after[:4]
    assert before[4:] != after[4:]


def test_frozen_agents_and_those_who_never_acted_are_left_out() -> None:
    members = [
        *(trajectory(0, m, "ann", float(m)) for m in range(3)),
        *(trajectory(0, m, "bob", float(m), frozen=True) for m in range(3)),
        trajectory(0, 0, "cat", 1.0, tokens=0),
        trajectory(0, 1, "cat", 5.0),
    ]
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=tuple(members))])
    assert batch.rewards.tolist() == [0.0, 1.0, 2.0, 5.0]
    assert batch.group.tolist() == [0, 0, 0, 1]
    assert advantages(batch, "group_norm") == pytest.approx([-1, 0, 1, 0], abs=1e-5)


def test_what_is_compared_stays_in_one_update() -> None:
    batch = collate([group(number) for number in range(3)])
    row_group = batch.row_group().tolist()
    plans = plan_updates(batch.input_lengths().tolist(), row_group, updates=2, ranks=2, budget=64, packed=False, hidden_size=8)
    places = [(row_group[row], number) for number, plan in enumerate(plans) for row in plan.rows]
    assert sorted(row for plan in plans for row in plan.rows) == list(range(batch.num_rows))
    assert len(set(places)) == len(set(row_group)) == 6


def test_a_batch_of_one_agent_is_that_of_an_environment_without_names() -> None:
    solo = tuple(t for t in group().trajectories if t.agent == "ann")
    plain = tuple(trajectory(0, m, "", REWARDS["ann"][m]) for m in range(4))
    one, other = (collate([Group(group_id=0, task=Task("x"), trajectories=members)]) for members in (solo, plain))
    for field in ("row_lengths", "row_actions", "row_episode", "row", "episode", "group", "token_rewards", "rewards"):
        assert torch.equal(getattr(one, field), getattr(other, field))
