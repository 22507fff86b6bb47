"""Group rewards in the trajectories of a finished group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl import Task
from agentrl.assets import tiny_model_path
from agentrl.check.tokenizer import load_codec
from agentrl.config.load import load
from agentrl.core.errors import ConfigError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import EvalSampling, Group, GroupRequest, Status
from agentrl.resolve.commands import TRAIN
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.group_rewards import GroupRewardSettings
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.check.support import settings_of

pytestmark = pytest.mark.anyio

ENV = """
import agentrl
from agentrl import AgentInstance, StepResult, Task

class Env(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task("Say it.", id="t")]

    def step(self, state):
        number = state.action_text.count("word")
        if number == 3:
            raise ValueError("fails")
        return StepResult(float(number), "Again.", terminated=state.turn == 1, score=0.5)

@agentrl.group_reward
def places(group):
    assert [len(answer.texts) for answer in group.answers] == [2] * len(group.answers)
    return [10.0 * place for place in range(len(group.answers))]

@agentrl.group_reward
def fails(group):
    raise RuntimeError("no judge")
"""


async def played(tmp_path: Path, name: str, eval_sampling: EvalSampling | None = None, **more: object) -> Group:
    file = tmp_path / "env.py"
    file.write_text(ENV)
    codec = load_codec(settings_of(str(file)))

    def answer(request: GenerationRequest) -> list[int]:
        """As many words as the number of the episode in its group."""
        return [*codec.encode_text("word " * int(request.request_id.rsplit("-", 2)[1])), *codec.turn_end_ids]

    engine = ScriptedEngine(answer=answer, max_model_len=1024, end_token_ids=codec.end_token_ids)
    reward = GroupRewardSettings(name=f"{file}:{name}", **more)  # type: ignore[arg-type]
    settings = EpisodePlan(model=ModelConfig(model=str(tiny_model_path())), group_reward=reward)
    worker = EpisodeWorker(engine, load_agent(f"{file}:Env"), settings)
    await worker.start()
    try:
        task = Task("Say it.", id="t")
        wanted = GroupRequest(group_id=0, task=task, n_samples_per_prompt=4, version=0)
        return (await worker.run_group(replace(wanted, eval_sampling=eval_sampling)))[1]
    finally:
        await worker.close()


async def test_it_is_added_to_the_last_turn_of_what_ended_well(tmp_path: Path) -> None:
    group = await played(tmp_path, "places", weight=0.5)
    assert [trajectory.reward for trajectory in group.trajectories] == [0.0, 7.0, 14.0, None]
    assert [[turn.reward for turn in trajectory.turns] for trajectory in group.trajectories[:3]] == [[0.0, 0.0], [1.0, 6.0], [2.0, 12.0]]
    assert [trajectory.score for trajectory in group.trajectories[:3]] == [0.5] * 3
    assert group.trajectories[2].reward_parts == {"group": 10.0}
    assert group.trajectories[2].metrics["group_reward"] == 20.0


async def test_it_may_take_the_place_of_the_environments(tmp_path: Path) -> None:
    group = await played(tmp_path, "places", replaces=True)
    assert [trajectory.reward for trajectory in group.trajectories] == [0.0, 10.0, 20.0, None]
    assert [turn.reward for turn in group.trajectories[2].turns] == [0.0, 20.0]


async def test_a_failure_is_never_a_reward(tmp_path: Path) -> None:
    group = await played(tmp_path, "fails")
    assert {trajectory.status for trajectory in group.trajectories} == {Status.ENV_ERROR}
    assert "fails of" in str(group.trajectories[0].error)
    assert "no judge" in str(group.trajectories[0].error)


async def test_evaluation_measures_the_environments_own_reward(tmp_path: Path) -> None:
    group = await played(tmp_path, "fails", EvalSampling(name="eval", seed=1))
    assert [trajectory.reward for trajectory in group.trajectories] == [0.0, 2.0, 4.0, None]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--group-reward", "majority", "--n-samples-per-prompt", "1", "--advantage-estimator", "reinforce"], "needs at least 2"),
        (["--group-reward-weight", "2"], "has no effect without --group-reward"),
        (["--group-reward", "vote"], "is not known"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], problem: str, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENV)
    with pytest.raises(ConfigError, match=problem):
        load(TRAIN, ["--agent", str(tmp_path / "env.py"), *words])
