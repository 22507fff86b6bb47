"""Environments of SkyRL-gym: a class of the same protocol. `tests/e2e/test_skyrl_package.py` has those of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import GroupRequest, Status, Task, Trajectory
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import SETTINGS, Scene, changed, says

pytestmark = pytest.mark.anyio

FILE = '''
class Doubling:
    """The protocol of BaseTextEnv."""

    closed = 0

    def __init__(self, env_config, extras):
        self.goal, self.turns = extras["reward_spec"]["ground_truth"], 0
        self.max_turns = extras.get("max_turns", 3)
        self.scale = getattr(env_config, "scale", 1)

    def init(self, prompt):
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + " Be brief."}], {"level": 2}

    def step(self, action):
        self.turns += 1
        right, over = action == self.goal, self.turns >= self.max_turns
        observations = [] if right or over else [{"role": "user", "content": "Again."}]
        return {"observations": observations, "reward": self.scale * (1.0 if right else 0.1), "done": right or over,
                "metadata": {"tried": self.turns}, "postprocessed_action": action}

    def get_metrics(self):
        return {"steps": self.turns, "name": "x"}

    def close(self):
        type(self).closed += 1


class Bad(Doubling):
    def step(self, action):
        return None


class Stuck(Doubling):
    def step(self, action):
        return {"observations": [], "reward": 0.0, "done": False, "metadata": {}}


class NoInit:
    def step(self, action):
        return None
'''
TASK = Task("1+1?", metadata={"reward_spec": {"ground_truth": "2"}, "data_source": "sums"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "doubling.py"
    path.write_text(FILE)
    return path


async def play(spec: str, *texts: str, task: Task = TASK) -> Trajectory:
    engine = ScriptedEngine(answer=says(*texts), max_model_len=4096)
    request = GroupRequest(group_id=3, task=task, n_samples_per_prompt=2, version=0)
    return await Scene(load_agent(spec).load(), engine, changed(SETTINGS), request).play()


async def test_a_class_of_the_protocol_runs_unchanged(file: Path) -> None:
    trajectory = await play(f"skyrl:{file}@Doubling", "3", "2")
    assert (trajectory.status, trajectory.error) == (Status.FINISHED, None)
    assert trajectory.reward == pytest.approx(1.1)
    assert [message["content"] for message in trajectory.messages] == ["1+1? Be brief.", "3", "Again.", "2"]
    assert trajectory.metrics == {"level": 2.0, "tried": 1.5, "steps": 2.0}
    assert load_agent(f"skyrl:{file}@Doubling").load().make.__closure__[0].cell_contents.closed == 1


async def test_options_are_the_settings_of_the_environment(file: Path) -> None:
    trajectory = await play(f"skyrl:{file}@Doubling?scale=10&max_turns=1", "3")
    assert (trajectory.status, trajectory.reward) == (Status.FINISHED, 1.0)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("Bad", "must be a BaseTextEnvStepOutput with reward and done"), ("Stuck", "the episode is not over, so the model needs one")],
)
async def test_results_that_cannot_be_used_fail_the_episode(name: str, problem: str, file: Path) -> None:
    trajectory = await play(f"skyrl:{file}@{name}", "3")
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert problem in (trajectory.error or "")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("skyrl:{}@NoInit", "has no method init"),
        ("skyrl:{}@Doublin", "Did you mean Doubling"),
        ("skyrl:{}@Doubling?max_turns=0", "max_turns = 0 is out of range"),
        ("{}:Doubling", "class Doubling has no method reset.*write --agent skyrl:file.py@Doubling"),
    ],
)
async def test_specifications_that_cannot_be_used(spec: str, problem: str, file: Path) -> None:
    with pytest.raises(EnvLoadError, match=problem):
        load_agent(spec.format(file))


async def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "skyrl_gym", None)
    with pytest.raises(EnvLoadError, match=r"importing skyrl_gym.* raised .*pip install skyrl-gym"):
        load_agent("skyrl:gsm8k-missing")
