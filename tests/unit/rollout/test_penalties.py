"""What an episode pays for its length, and that its score does not."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl import Message, StepResult
from agentrl.config.sections import changed
from agentrl.core.types import FinishReason, Status, Turn, floats, ints
from agentrl.rollout.penalties import penalize
from agentrl.rollout.plan import PenaltyConfig
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT, Scene, env_class, says


def turn(length: int, reward: float, finish: FinishReason = FinishReason.STOP) -> Turn:
    return Turn(
        prompt_ids=ints([1]),
        token_ids=ints([7] * length),
        logprobs=floats([-1.0] * length),
        versions=ints([0] * length),
        finish_reason=finish,
        reward=reward,
    )


def rewards(turns: list[Turn], budgets: list[int], **penalties: Any) -> list[float]:
    return [turn.reward for turn in penalize(turns, budgets, PenaltyConfig(**penalties))]


def test_each_turn_pays_for_coming_close_to_its_own_budget() -> None:
    turns = [turn(6, 0.0), turn(8, 0.0), turn(10, 1.0, FinishReason.LENGTH), turn(8, 1.0)]
    assert rewards(turns, [10, 10, 10, 100], overlong_buffer=4, overlong_penalty=2.0) == [0.0, -1.0, -1.0, 1.0]


def test_a_buffer_larger_than_the_budget_covers_all_of_it() -> None:
    assert rewards([turn(2, 0.0)], [4], overlong_buffer=100) == [-0.5]


@pytest.mark.parametrize(
    ("coefficient", "cut", "expected"),
    [
        (0.5, True, [0.5, 1.0]),
        (0.0, True, [0.0, 0.0]),
        (-0.3, True, [0.0, -0.3]),
        (-0.3, False, [1.0, 2.0]),
        (0.0, False, [1.0, 2.0]),
        (None, True, [1.0, 2.0]),
    ],
)
def test_an_episode_that_did_not_stop_by_itself(coefficient: float | None, cut: bool, expected: list[float]) -> None:
    turns = [turn(3, 1.0), turn(3, 2.0, FinishReason.LENGTH if cut else FinishReason.STOP)]
    assert rewards(turns, [9, 9], stop_properly_penalty=coefficient) == expected


def test_a_replaced_reward_is_not_lowered_by_the_overlong_penalty() -> None:
    turns = [turn(4, 1.0, FinishReason.LENGTH)]
    assert rewards(turns, [4], overlong_buffer=2, stop_properly_penalty=-0.3) == [-0.3]
    assert rewards(turns, [4], overlong_buffer=2, overlong_penalty=3.0, stop_properly_penalty=0.5) == [-1.0]


def test_turns_that_pay_nothing_stay_the_same_objects() -> None:
    turns = [turn(3, 1.0), turn(3, 2.0, FinishReason.LENGTH)]
    assert list(penalize(turns, [9, 3], PenaltyConfig())) == turns


def step(state: Any) -> StepResult:
    return StepResult(0.25, [Message(role="user", content="go on")]) if state.turn == 0 else StepResult(0.5, terminated=True)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("penalties", "reward"),
    [({}, 0.75), ({"stop_properly_penalty": 0.0}, 0.0), ({"stop_properly_penalty": -1.0}, -1.0), ({"overlong_buffer": 2}, -0.25)],
)
async def test_the_score_is_what_was_earned(penalties: dict[str, Any], reward: float) -> None:
    """The second turn is as long as its budget and has no end token."""
    settings = changed(PATIENT, max_new_tokens=5, **penalties)
    trajectory = await Scene(env_class(step), ScriptedEngine(answer=says("a", "abcdefgh~")), settings).play()
    assert trajectory.turns[-1].finish_reason is FinishReason.LENGTH
    assert (trajectory.reward, trajectory.score) == (reward, 0.75)
    assert sum(turn.reward for turn in trajectory.turns) == reward


@pytest.mark.anyio
async def test_an_episode_that_failed_has_no_reward_to_penalize() -> None:
    def broken(state: Any) -> StepResult:
        raise ValueError("broken")

    settings = changed(PATIENT, stop_properly_penalty=-1.0)
    trajectory = await Scene(env_class(broken), settings=settings).play()
    assert (trajectory.status, trajectory.reward, trajectory.score) == (Status.ENV_ERROR, None, None)
