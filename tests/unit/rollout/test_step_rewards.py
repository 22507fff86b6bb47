"""Rewards of steps within a turn: where they are paid, and what estimators make of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl import StepResult
from agentrl.algo.compute import compute_advantages
from agentrl.core.types import FinishReason, Group, Status, Trajectory
from agentrl.env.isolation import wire
from agentrl.env.results import check_step
from agentrl.learner.batch import advantage_inputs, collate
from agentrl.rollout.penalties import penalize
from agentrl.rollout.plan import PenaltyConfig
from agentrl.rollout.records import _turn, recorded_turn
from agentrl.rollout.step_rewards import with_reward
from tests.scripted_engine import ScriptedEngine
from tests.unit.algo.chosen import estimator_options
from tests.unit.rollout.scenes import CODEC, TASK, Scene, env_class, says

pytestmark = pytest.mark.anyio
ANSWER = "one plus two\nis three\nso three"


def by_line(state: Any) -> StepResult:
    """Pays 0.5 for the first line and 0.25 for the second, and 1 for the turn."""
    ends = [place for place, letter in enumerate(state.action_text) if letter == "\n"]
    return StepResult(1.0, terminated=True, step_rewards=[(ends[0], 0.5), (ends[1] + 1, 0.25)])


async def played(step: Any = by_line) -> Trajectory:
    return await Scene(env_class(step), ScriptedEngine(answer=says(ANSWER))).play()


async def test_each_step_is_paid_at_the_token_that_completes_it() -> None:
    trajectory = await played()
    (turn,) = trajectory.turns
    texts = [CODEC.decode(turn.token_ids[: place + 1].tolist()) for place in range(len(turn.token_ids))]
    for (place, value), text in zip(turn.step_rewards, ("one plus two", "one plus two\nis three\n"), strict=True):
        assert texts[place].startswith(text)
        assert not texts[place - 1].startswith(text)
        assert value in (0.5, 0.25)
    assert (turn.reward, trajectory.reward) == (1.75, 1.75)
    batch = collate([Group(group_id=0, task=TASK, trajectories=(trajectory,))])
    expected = torch.zeros(len(turn.token_ids))
    for place, value in turn.step_rewards:
        expected[place] += value
    expected[-1] += 1.0
    torch.testing.assert_close(batch.token_rewards, expected)


async def test_the_rest_of_a_turn_is_paid_at_its_own_end() -> None:
    trajectory = await played()
    (turn,) = trajectory.turns
    twice = replace(trajectory, turns=(turn, replace(turn, number=1, reward=3.0, step_rewards=())), reward=4.75)
    rewards = collate([Group(group_id=0, task=TASK, trajectories=(twice,))]).token_rewards
    count = len(turn.token_ids)
    assert (float(rewards[count - 1]), float(rewards[count:].sum()), float(rewards[-1])) == (1.0, 3.0, 3.0)


async def test_estimators_with_token_rewards_credit_what_comes_after() -> None:
    """Written out: with gamma 1 the return of a token is what is paid from it on; `gae` with values of 0 and lambda 1 says the same."""
    trajectory = await played()
    (turn,) = trajectory.turns
    (first, _), (second, _) = turn.step_rewards
    batch = collate([Group(group_id=0, task=TASK, trajectories=(trajectory,))])
    ahead = torch.tensor([1.75 if place <= first else 1.25 if place <= second else 1.0 for place in range(len(turn.token_ids))])
    inputs = advantage_inputs(batch, values=torch.zeros(len(ahead)))
    returns = compute_advantages("gae", inputs, estimator_options("gae")).returns
    torch.testing.assert_close(returns, ahead)
    plain = estimator_options("reinforce", advantage_std_norm=False)
    torch.testing.assert_close(compute_advantages("reinforce", inputs, plain).advantages, ahead - ahead.mean())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([(500, 1.0)], "behind the end of action_text"),
        ([(0, 1.0)], "pairs"),
        ([(True, 1.0)], "pairs"),
        ([3], "pairs"),
        ("12", "pairs"),
        ([(1, float("nan"))], "finite"),
    ],
)
async def test_what_cannot_be_placed_is_an_error_of_the_environment(given: Any, words: str) -> None:
    trajectory = await played(lambda _: StepResult(0.0, terminated=True, step_rewards=given))
    assert trajectory.status is Status.ENV_ERROR
    assert "step_rewards" in str(trajectory.error)
    assert words in str(trajectory.error)


@pytest.mark.parametrize(("penalty", "reward", "steps"), [(None, 1.75, (0.5, 0.25)), (0.5, 0.875, (0.25, 0.125)), (-1.0, -1.0, ())])
async def test_penalties_for_a_cut_turn_take_their_share_of_each_step(penalty: Any, reward: float, steps: tuple[float, ...]) -> None:
    (turn,) = (await played()).turns
    (found,) = penalize([replace(turn, finish_reason=FinishReason.LENGTH)], [64], PenaltyConfig(stop_properly_penalty=penalty))
    assert (found.reward, tuple(value for _, value in found.step_rewards)) == (reward, steps)
    assert with_reward(turn, turn.reward, 1.0) is turn


async def test_they_pass_through_processes_and_records() -> None:
    (turn,) = (await played()).turns
    assert recorded_turn(_turn(turn)).step_rewards == turn.step_rewards
    body = wire.encode_result(check_step(StepResult(1.0, terminated=True, step_rewards=[(3, 0.5)]), "step"), "step")
    result = wire.decode_result(StepResult, wire.decode(body, "step"), "step", lambda value: check_step(value, "step"))
    assert [tuple(pair) for pair in result.step_rewards] == [(3, 0.5)]
