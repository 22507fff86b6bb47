"""Rewards and scores of an episode: each is paid once, and a score counts for the turn that it came with."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl import AgentInstance, StepResult
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT, Scene, env_class, says

pytestmark = pytest.mark.anyio


async def played(*results: StepResult) -> Any:
    steps = list(results)
    answers = ScriptedEngine(answer=says(*["one"] * len(steps)))
    return await Scene(env_class(lambda _: steps.pop(0)), answers, PATIENT).play()


@pytest.mark.parametrize(
    ("scores", "rewards", "score"),
    [((0.9, None), (0.0, 0.25), 0.25), ((None, 0.9), (0.5, 0.0), 0.9), ((0.9, 0.1), (1.0, 0.0), 0.1), ((1.0, None), (0.0, -3.0), 0.0)],
)
async def test_an_earlier_turns_score_does_not_stick(scores: tuple[Any, Any], rewards: tuple[float, float], score: float) -> None:
    first = StepResult(rewards[0], "go on", score=scores[0])
    found = await played(first, StepResult(rewards[1], terminated=True, score=scores[1]))
    assert found.error is None
    assert (found.score, found.reward) == (score, sum(rewards))


def duel(*results: StepResult) -> type[AgentInstance]:
    steps = list(results)
    return type("Duel", (AgentInstance,), {"agents": ("ann", "bob"), "step": lambda self, state: steps.pop(0)})


async def test_what_an_agent_earns_before_its_first_turn_is_paid_once() -> None:
    script = duel(
        StepResult(0.5, "to bob", rewards={"bob": 0.25}),
        StepResult(0.0, "to ann", rewards={"ann": 2.0}),
        StepResult(0.0, "to bob", scores={"bob": 0.75}),
        StepResult(1.0, terminated=True, rewards={"ann": 4.0}, scores={"ann": 0.5}),
    )
    ann, bob = await Scene(script, ScriptedEngine(answer=says(*["one"] * 4)), PATIENT).play_all()
    assert ([turn.reward for turn in ann.turns], ann.score) == ([2.5, 4.0], 0.5)
    assert ([turn.reward for turn in bob.turns], bob.score) == ([0.25, 1.0], 1.0)


async def test_a_reward_without_a_score_keeps_the_score_that_was_given() -> None:
    script = duel(
        StepResult(0.0, "to bob", score=0.75),
        StepResult(0.0, terminated=True, rewards={"ann": 2.0}),
    )
    ann, _ = await Scene(script, ScriptedEngine(answer=says("one", "one")), PATIENT).play_all()
    assert (ann.reward, ann.score) == (2.0, 0.75)
