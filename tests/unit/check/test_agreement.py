"""A check and the episode loop of a run agree on which environments work, and a run asks the check before it starts anything heavy."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.api.checking import REHEARSAL, rehearse
from agentrl.assets import tiny_model_path
from agentrl.check.findings import CheckSettings, Severity
from agentrl.check.policies import label_text
from agentrl.check.tokenizer import load_codec
from agentrl.cluster.plan import RunConfig
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import GroupRequest, Status, Task
from agentrl.env.plan import DataConfig
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.tasks import open_tasks
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.sandboxes import needs_sandbox
from tests.scripted_engine import ScriptedEngine
from tests.unit.check.support import BROKEN, checked, ids, played, settings_of
from tests.unit.check.test_same_loop import HEAD, USES

ROOT = Path(__file__).parents[3]
OPENRLHF = ROOT / "tests" / "openrlhf_files"
MARKS: dict[str, Any] = {"code": needs_sandbox, "swe": (needs_sandbox, pytest.mark.slow)}
FILES = [
    pytest.param(file, id=f"{file.parent.name}-{file.stem}", marks=MARKS.get(file.stem, ()))
    for file in sorted([*(ROOT / "envs").glob("*.py"), *(ROOT / "examples").glob("*.py"), *OPENRLHF.glob("*.py")])
]
NO_ENVIRONMENTS = ("callback", "demonstrations", "loop", "loop_async", "own_algorithm", "own_engine", "own_loss")
DATA = {"dictionary_form": DataConfig(prompts=str(ROOT / "examples" / "reverse.jsonl"), input_key="question", label_key="answer")}
PACKAGES = {"reasoning": "reasoning_gym", "blackjack": "gymnasium", "frozen_lake": "gymnasium", "langgraph_agent": "langgraph"}
MODELS = {"shapes": "tiny-vision", "picture_grid": "tiny-vision", "pictures": "tiny-vision"}
FAILING = [f"bad_results:{name}" for name in ("NeedsArguments", "ResetRaises", "GymnasiumTuple", "RewardKeyMisspelt", "DoneIsText")]
"""Environments in which every episode fails."""


def model_of(env: str) -> ModelConfig:
    """Return the model that a file of ours is for."""
    return ModelConfig(model=MODELS.get(Path(env).stem, str(tiny_model_path())))


async def is_found_broken(env: str, data: DataConfig) -> bool:
    """Return True if a check finds an error when it plays the policies; an executor is not played."""
    return bool(ids((await played(env, data, model=model_of(env).model, episodes=1)).report, Severity.ERROR))


async def fails_in_a_run(env: str, data: DataConfig) -> bool:
    """Return True if an episode of the worker of a run fails, with an engine that writes the label."""
    settings = replace(settings_of(env), data=data, model=model_of(env))
    spec, codec = load_agent(env), load_codec(settings)
    task = open_tasks(replace(data, shuffle=False), spec).draw()
    ids_of_label = [*codec.encode_text(label_text(task.label)), *codec.turn_end_ids]
    engine = ScriptedEngine(answer=lambda request: ids_of_label, max_model_len=4096, end_token_ids=codec.end_token_ids)
    run = EpisodePlan(data=data, model=model_of(env))
    worker = EpisodeWorker(engine, spec, run)
    await worker.start()
    try:
        _, group = await worker.run_group(GroupRequest(group_id=0, task=task, n_samples_per_prompt=2, version=0))
    finally:
        await worker.close()
    return any(trajectory.status not in (Status.FINISHED, Status.TRUNCATED) for trajectory in group.trajectories)


@pytest.mark.anyio
@pytest.mark.parametrize("file", FILES)
async def test_check_and_run_agree_on_files(file: Path) -> None:
    if file.stem in PACKAGES:
        pytest.importorskip(PACKAGES[file.stem])
    data = DATA.get(file.stem, DataConfig(prompts=str(OPENRLHF / "prompts.jsonl")) if file.parent == OPENRLHF else DataConfig())
    if file.parent.name == "examples" and file.stem in (
        "callback",
        "demonstrations",
        "loop",
        "loop_async",
        "own_algorithm",
        "own_engine",
        "own_loss",
    ):
        for look in (is_found_broken, fails_in_a_run):
            with pytest.raises(ConfigError, match="defines no environment"):
                await look(str(file), data)
        return
    assert (await is_found_broken(str(file), data), await fails_in_a_run(str(file), data)) == (False, False)


@pytest.mark.anyio
async def test_check_and_run_agree_on_an_async_init(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(HEAD + USES["async_init"])
    env = f"{tmp_path}/env.py:Env"
    assert (await is_found_broken(env, DataConfig()), await fails_in_a_run(env, DataConfig())) == (False, False)


@pytest.mark.anyio
@pytest.mark.parametrize("name", FAILING)
async def test_check_and_run_agree_on_what_fails(name: str) -> None:
    file, _, cls = name.partition(":")
    env = f"{BROKEN / file}.py:{cls}"
    assert (await is_found_broken(env, DataConfig()), await fails_in_a_run(env, DataConfig())) == (True, True)


BEFORE = """
import os
import subprocess
import time
from pathlib import Path

from agentrl import AgentInstance, ResetResult, StepResult, Task


class Sound(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task("2?", label="2")]

    def step(self, state):
        with Path(__file__).with_suffix(".txt").open("a") as file:
            file.write(state.action_text + "\\n")
        return StepResult(float(state.action_text == state.label), terminated=True)


class Number(Sound):
    def step(self, state):
        return 0.5


class Picture(Sound):
    def reset(self, state):
        return ResetResult("What is this?", images=["board.png"])


class Typo(Sound):
    def step(self, state):
        return StepResult(anwser)


class Picky(Sound):
    def step(self, state):
        return StepResult({"only this": 1.0}[state.action_text], terminated=True)


class Unloaded(Sound):
    @classmethod
    def preload(cls):
        raise FileNotFoundError("no word list")


class Leaves(Sound):
    def reset(self, state):
        os._exit(3)


class Moves(Sound):
    def reset(self, state):
        os.chdir("/")


class Daemons(Sound):
    def reset(self, state):
        subprocess.run(["sh", "-c", "setsid sleep 3600 > /dev/null 2>&1 &"], check=True)


class Forks(Sound):
    async def step(self, state):
        os.fork() or time.sleep(3600)
        return StepResult(0.0, terminated=True)
"""
ENDED = {
    "Moves": ("a call changes the current directory", "env.py, line", "`os.chdir"),
    "Daemons": ("child processes go on after close", "1 more after each episode: `sleep 3600` (3 of them), at env.py, line", "setsid"),
    "Forks": ("child processes go on after close", "env.py, line", "os.fork()"),
    "Number": ("a method returns something that is no result", "returned result = 0.5"),
    "Picture": ("images are given", "1 image for the model"),
    "Typo": ("NameError", "anwser"),
    "Unloaded": ("preload raised FileNotFoundError", "no word list"),
    "Leaves": ("the environment ends its process", "exit code 3"),
}


def config_of(tmp_path: Path, name: str) -> TrainConfig:
    file = tmp_path / "env.py"
    file.write_text(BEFORE)
    return TrainConfig(run=RunConfig(agent=f"{file}:{name}"))


TASK = Task("2?", label="2", id="0")


def settings_before(config: TrainConfig) -> CheckSettings:
    """What a run gives its scripted episode."""
    return CheckSettings(
        run=config.run, model=config.model, data=config.data, rollout=config.rollout, engine=config.engine, check=REHEARSAL
    )


@pytest.mark.anyio
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.linux if name == "Daemons" else ()) for name in ENDED])
async def test_a_run_ends_before_anything_starts(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        await rehearse(settings_before(config_of(tmp_path, name)), TASK)
    for words in (*ENDED[name], f"{name}.", "--skip-checks env"):
        assert words in str(caught.value)
    assert caught.value.field == "--agent"


@pytest.mark.anyio
async def test_the_message_is_that_of_the_check(tmp_path: Path) -> None:
    config = config_of(tmp_path, "Number")
    found = checked(config.run.agent, budget_s=20.0).findings[0]
    with pytest.raises(ConfigError) as caught:
        await rehearse(settings_before(config), TASK)
    assert found.rule.title in str(caught.value)
    assert found.rule.remedy in str(caught.value)


@pytest.mark.anyio
async def test_one_episode_is_enough_where_the_environment_works(tmp_path: Path) -> None:
    assert await rehearse(settings_before(config_of(tmp_path, "Sound")), TASK) == ""
    assert (tmp_path / "env.txt").read_text() == "2" + os.linesep


@pytest.mark.anyio
async def test_text_that_only_a_model_could_write_is_a_warning(tmp_path: Path) -> None:
    assert "raised KeyError" in await rehearse(settings_before(config_of(tmp_path, "Picky")), TASK)
