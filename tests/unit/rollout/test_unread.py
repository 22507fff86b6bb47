"""What the policy would have read next, where a limit cut an episode."""

from dataclasses import replace
from typing import Any

import pytest

from agentrl import AgentInstance, Message, StepResult
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.types import Status
from agentrl.resolve.parts import episode_plan
from agentrl.rollout.episode_plan import EpisodePlan
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT, Scene, env_class, says

pytestmark = pytest.mark.anyio
WATCHED = replace(PATIENT, keeps_unread=True)


def tells(state: Any) -> StepResult:
    return StepResult(0.5, [Message(role="user", content=f"go on {state.turn}")])


def scene(step: Any, settings: EpisodePlan = WATCHED, **changes: Any) -> Scene:
    return Scene(env_class(step), ScriptedEngine(answer=says("one", "two", "three")), changed(settings, **changes))


async def test_the_last_observation_is_what_the_next_turn_would_have_read() -> None:
    cut = await scene(tells, max_turns=2).play()
    longer = await scene(tells, max_turns=3).play()
    assert cut.status is Status.TRUNCATED
    assert cut.unread is not None
    assert cut.unread.prompt_ids.tolist() == longer.turns[2].prompt_ids.tolist()
    assert not len(cut.unread.token_ids)
    # Nothing else of the episode knows of it.
    bare = await scene(tells, PATIENT, max_turns=2).play()
    assert bare.unread is None
    assert (cut.messages, cut.reward, len(cut.turns)) == (bare.messages, bare.reward, len(bare.turns))


@pytest.mark.parametrize(
    ("result", "kept"),
    [
        (StepResult(1.0, "over", terminated=True), False),
        (StepResult(1.0, "your time is up", truncated=True), True),
        (StepResult(1.0, truncated=True), False),
        (StepResult(1.0, "word " * 300, truncated=True), False),  # no room for another turn
    ],
)
async def test_it_is_kept_only_where_another_turn_could_have_followed(result: StepResult, kept: bool) -> None:
    played = await scene(lambda _: result, max_episode_tokens=120).play()
    assert played.error is None
    assert (played.unread is not None) == kept


async def test_of_several_agents_the_next_one_would_have_read_it() -> None:
    methods = {"step": lambda self, state: StepResult(0.0, f"{state.agent} spoke")}
    duel = type("Duel", (AgentInstance,), {"agents": ("ann", "bob"), **methods})
    for turns, reader in ((1, None), (2, "ann"), (3, "bob")):
        found = await Scene(duel, ScriptedEngine(), changed(WATCHED, max_turns=turns)).play_all()
        assert [each.agent for each in found if each.unread is not None] == ([reader] if reader else [])


def test_only_runs_with_a_critic_that_bootstraps_keep_it() -> None:
    assert not episode_plan(TrainConfig()).keeps_unread
    assert episode_plan(changed(TrainConfig(), advantage_estimator="gae")).keeps_unread
