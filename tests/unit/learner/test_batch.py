from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.core.errors import BatchError
from agentrl.core.types import FinishReason, Group, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.batch import collate, describe_batch
from agentrl.learner.layout import Layout
from agentrl.learner.trees import one_row_bundles


def turn(prompt: list[int], sampled: list[int], *, fresh: bool = False, reward: float = 0.0, version: int = 0) -> Turn:
    return Turn(
        prompt_ids=ints(prompt),
        token_ids=ints(sampled),
        logprobs=floats([-0.5 * token for token in sampled]),
        versions=ints([version] * len(sampled)),
        finish_reason=FinishReason.STOP,
        fresh=fresh,
        reward=reward,
    )


def trajectory(*turns: Turn, reward: float | None = 1.0, status: Status = Status.FINISHED) -> Trajectory:
    return Trajectory(trajectory_id="t", episode_id="t", group_id=0, turns=turns, status=status, reward=reward)


def group(*members: Trajectory) -> Group:
    return Group(group_id=0, task=Task("x"), trajectories=members)


TWO_TURNS = trajectory(turn([1, 2], [3, 4], reward=0.25, version=5), turn([5], [6], reward=0.5, version=6), reward=1.0)
TWO_BRANCHES = trajectory(turn([1], [7]), turn([8, 9], [10, 11], fresh=True), reward=-2.0)


def test_rows_hold_the_tokens_and_the_batch_is_flat_over_actions() -> None:
    batch = collate([group(TWO_TURNS, TWO_BRANCHES)])
    assert [row.tokens.tolist() for row in batch.rows] == [[1, 2, 3, 4, 5, 6], [1, 7], [8, 9, 10, 11]]
    assert [row.action_positions.tolist() for row in batch.rows] == [[2, 3, 5], [1], [2, 3]]
    assert (batch.row_lengths.tolist(), batch.row_actions.tolist(), batch.row_episode.tolist()) == ([6, 2, 4], [3, 1, 2], [0, 1, 1])
    assert (batch.num_tokens, batch.num_actions) == (12, 6)
    assert batch.logprobs.tolist() == [-1.5, -2.0, -3.0, -3.5, -5.0, -5.5]
    assert batch.versions.tolist() == [5, 5, 6, 0, 0, 0]
    assert batch.row.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.episode.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.episode_length().tolist() == [3] * 6
    assert batch.row_group().tolist() == [0, 0, 0]


def test_turns_are_counted_and_components_are_by_episode() -> None:
    other = replace(TWO_BRANCHES, reward_parts={"right": 1.0, "short": -3.0})
    batch = collate([group(replace(TWO_TURNS, reward_parts={"right": 0.5}), other)])
    assert batch.turn.tolist() == [0, 0, 1, 2, 3, 3]
    assert (batch.part_names, batch.parts.tolist()) == (("right", "short"), [[0.5, 1.0], [0.0, -3.0]])
    assert (collate([group(TWO_TURNS)]).part_names, collate([group(TWO_TURNS)]).parts.shape) == ((), (0, 1))


def test_the_greedy_episode_is_a_baseline_of_its_agent_and_not_trained() -> None:
    members = [replace(t, agent=agent) for t, agent in ((TWO_TURNS, "a"), (TWO_BRANCHES, "b"), (TWO_TURNS, "a"))]
    greedy = tuple(replace(TWO_TURNS, agent=agent, reward=reward) for agent, reward in (("a", 0.5), ("b", -1.0)))
    first = Group(group_id=0, task=Task("x"), trajectories=tuple(members), greedy=greedy)
    other = Group(group_id=1, task=Task("y"), trajectories=(replace(TWO_TURNS, group_id=1, agent="a"),))
    batch = collate([first])
    assert batch.num_episodes == 3
    assert batch.baseline is not None
    assert batch.baseline.tolist() == [0.5, 0.5, -1.0]
    assert collate([first, other]).baseline is None


def test_masked_branches_have_no_rows() -> None:
    masked = trajectory(
        turn([1], [7]), replace(turn([8, 9], [10, 11], fresh=True), masked="forced"), turn([5], [6], fresh=True), reward=1.0
    )
    assert [row.tokens.tolist() for row in collate([group(masked)]).rows] == [[1, 7], [5, 6]]


def test_ages_are_counted_in_steps_since_the_token_was_sampled() -> None:
    found = describe_batch(collate([group(TWO_TURNS)]), 7).result()
    assert found["staleness/mean"] == pytest.approx((2 + 2 + 1) / 3)
    assert found["staleness/max"] == 2.0
    assert (found["staleness/share_2"], found["staleness/share_1"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))


def test_the_model_sees_all_of_a_row_but_its_last_token() -> None:
    assert collate([group(TWO_TURNS, TWO_BRANCHES)]).input_lengths().tolist() == [5, 1, 3]


def test_turn_rewards_are_placed_and_the_rest_comes_last() -> None:
    batch = collate([group(TWO_TURNS, TWO_BRANCHES)])
    assert batch.token_rewards.tolist() == [0.0, 0.25, 0.75, 0.0, 0.0, -2.0]
    assert batch.rewards.tolist() == [1.0, -2.0]


def test_truncated_members_have_no_rows_and_their_rewards_stay_or_go() -> None:
    cut = replace(TWO_BRANCHES, turns=(*TWO_BRANCHES.turns[:1], replace(TWO_BRANCHES.turns[1], finish_reason=FinishReason.LENGTH)))
    over = trajectory(turn([1], [5]), reward=3.0, status=Status.TRUNCATED)
    groups = [group(cut, TWO_TURNS), group(over), group(over, TWO_TURNS)]
    stays = collate(groups, mask_truncated=True)
    assert (stays.group.tolist(), stays.rewards.tolist()) == ([0, 0, 1, 2, 2], [-2.0, 1.0, 3.0, 3.0, 1.0])
    assert (stays.row_episode.tolist(), stays.episode.tolist()) == ([1, 4], [1, 1, 1, 4, 4, 4])
    assert stays.token_rewards.tolist() == [0.0, 0.25, 0.75] * 2
    goes = collate(groups, mask_truncated=True, in_baseline=False)
    assert (goes.rewards.tolist(), goes.row_episode.tolist()) == ([1.0, 1.0], [0, 1])
    assert collate(groups).num_rows == 6
    with pytest.raises(BatchError, match="cut short"):
        collate([group(over)], mask_truncated=True)


def test_failed_members_and_groups_without_any_other_are_left_out() -> None:
    failed = trajectory(turn([1], [2]), reward=None, status=Status.ENV_ERROR)
    batch = collate([group(failed), group(TWO_TURNS, failed), group(TWO_BRANCHES)])
    assert batch.num_groups == 2
    assert batch.num_episodes == 2
    assert batch.group.tolist() == [0, 1]
    with pytest.raises(BatchError, match="no group"):
        collate([group(failed)])


def test_a_row_that_starts_with_a_sampled_token_is_refused() -> None:
    with pytest.raises(BatchError, match="first token"):
        collate([group(trajectory(turn([], [1, 2])))])


def test_mismatched_lengths_are_refused() -> None:
    batch = collate([group(TWO_TURNS)])
    with pytest.raises(BatchError, match="logprobs"):
        replace(batch, logprobs=batch.logprobs[:-1])
    with pytest.raises(BatchError, match="episodes"):
        replace(batch, rewards=torch.zeros(3))


def test_padded_layout_selects_the_place_before_each_action() -> None:
    batch = collate([group(TWO_TURNS, TWO_BRANCHES)])
    micro = Layout(batch).micro_batch([one_row_bundles(batch)[2], one_row_bundles(batch)[0]], packed=False)
    assert micro.input_ids.tolist() == [[8, 9, 10, 0, 0], [1, 2, 3, 4, 5]]
    assert micro.select.tolist() == [1, 2, 6, 7, 9]
    assert micro.targets.tolist() == [10, 11, 3, 4, 6]
    assert micro.actions.tolist() == [4, 5, 0, 1, 2]
    assert micro.num_tokens == 8


def test_packed_layout_restarts_positions() -> None:
    batch = collate([group(TWO_TURNS, TWO_BRANCHES)])
    micro = Layout(batch).micro_batch([one_row_bundles(batch)[2], one_row_bundles(batch)[0]], packed=True)
    assert micro.input_ids.tolist() == [[8, 9, 10, 1, 2, 3, 4, 5]]
    assert micro.position_ids is not None
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert micro.input_ids[0, micro.select].tolist() == [9, 10, 2, 3, 5]


def test_an_empty_micro_batch_has_no_actions() -> None:
    micro = Layout(collate([group(TWO_TURNS)])).micro_batch([], packed=False)
    assert micro.input_ids.shape == (1, 1)
    assert len(micro.select) == len(micro.targets) == len(micro.actions) == micro.num_tokens == 0


def test_arrays_of_the_group_are_not_shared_with_the_batch() -> None:
    batch = collate([group(TWO_TURNS)])
    batch.logprobs.zero_()
    assert np.allclose(TWO_TURNS.turns[0].logprobs, [-1.5, -2.0])
