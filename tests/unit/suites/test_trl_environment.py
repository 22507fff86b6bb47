"""Environments of TRL's `environment_factory`, unchanged: tools, columns, rewards, and what the trainer of TRL itself finds in them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import GroupRequest, Status, Task, Trajectory
from agentrl.env.plan import DataConfig
from agentrl.env.prompts import PromptFormat, read_prompts
from agentrl.rollout.tasks import open_tasks
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import SETTINGS, Scene, changed, says

pytestmark = pytest.mark.anyio

FILE = '''
class Counter:
    """Counts up to a number."""

    def __init__(self):
        self.value = None

    def reset(self, **row):
        self.row, self.value = row, 0
        return f" Count to {row['goal']}." if "goal" in row else None

    def add(self, amount: int) -> str:
        """Add to the count.

        Args:
            amount: How much.
        """
        self.value += amount
        return str(self.value)

    async def read(self) -> str:
        """Read the count."""
        return str(self.value)

    def _hidden(self) -> None:
        """Not offered."""

    def get_reward(self) -> float:
        return float(self.value == self.row.get("goal"))


class Silent(Counter):
    async def get_reward(self):
        return None


class Judged:
    """Has no reward of its own."""

    def reset(self, prompt, **row):
        self.said = [prompt]


FACTORIES = {"count": Counter, "silent": Silent}


def length(completions, environments, goal, **columns):
    assert set(columns) >= {"prompts", "log_extra", "log_metric", "trainer_state"}, columns
    assert environments[0].value is not None
    return [len(completions[0]) / 10]


async def nothing(completions, **columns):
    return [None]


def several(completions, **columns):
    return [1.0, 2.0]


def make():
    return Counter()
'''
ADD = '<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'
READ = '<tool_call>{"name": "read", "arguments": {}}</tool_call>'
TASK = Task("Begin.", id="a", metadata={"goal": 2})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "counting.py"
    path.write_text(FILE)
    return path


async def play(spec: str, *texts: str, task: Task = TASK, **settings: Any) -> Trajectory:
    engine = ScriptedEngine(answer=says(*texts), max_model_len=4096)
    request = GroupRequest(group_id=3, task=task, n_samples_per_prompt=2, version=0)
    cls = load_agent(spec).load()
    cls.preload()
    return await Scene(cls, engine, changed(SETTINGS, max_new_tokens=200, **settings), request).play()


async def test_the_methods_are_tools_and_get_reward_judges_the_answer(file: Path) -> None:
    trajectory = await play(f"trl:{file}@Counter", ADD, READ, "done")
    assert (trajectory.status, trajectory.reward, trajectory.error) == (Status.FINISHED, 1.0, None)
    assert trajectory.reward_parts == {"Counter": 1.0}
    shown = json.dumps(trajectory.messages)
    assert "Begin. Count to 2." in shown
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"] == ["2", "2"]
    assert (await play(f"trl:{file}@Counter", "done")).reward == 0.0


async def test_a_rollout_without_a_turn_left_is_judged_as_in_trl(file: Path) -> None:
    trajectory = await play(f"trl:{file}@make", ADD, READ, max_turns=2)
    assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED, 1.0)


async def test_reward_functions_get_the_environments_and_are_added(file: Path) -> None:
    trajectory = await play(f"trl:{file}@Counter?reward=length,nothing", ADD, "done")
    assert trajectory.reward_parts == pytest.approx({"Counter": 1.0, "length": 0.3})  # an answer, a result of a tool, an answer
    assert (await play(f"trl:{file}@Judged?reward=nothing", "done")).status is Status.NOT_SCORED
    wrong = await play(f"trl:{file}@Counter?reward=several", "done")
    assert wrong.status is Status.ENV_ERROR
    assert "several returned rewards = [1.0, 2.0]" in (wrong.error or "")


async def test_none_of_an_environments_own_reward_leaves_the_episode_out(file: Path) -> None:
    trajectory = await play(f"trl:{file}@Silent", "done")
    assert (trajectory.status, trajectory.reward) == (Status.NOT_SCORED, None)


async def test_a_column_chooses_among_several_environments(file: Path) -> None:
    for name, status in (("count", Status.FINISHED), ("silent", Status.NOT_SCORED)):
        task = Task("Begin.", metadata={"goal": 0, "environment": name})
        assert (await play(f"trl:{file}@FACTORIES", "done", task=task)).status is status
    other = await play(f"trl:{file}@FACTORIES", "done", task=Task("Begin.", metadata={"environment": "chess"}))
    assert "column 'environment' is 'chess', and the environments are count, silent" in (other.error or "")


async def test_the_row_of_a_data_set_reaches_reset_and_without_one_there_are_tasks(file: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "Go."}], "goal": 5, "label": "x"}) + "\n")
    (part,) = read_prompts([str(rows)], PromptFormat())
    env = load_agent(f"trl:{file}@Counter").load()()
    env._object = env._made(part.tasks[0])
    from agentrl.suites.trl_environment import _columns

    assert _columns(part.tasks[0]) == {"prompt": [{"role": "user", "content": "Go."}], "goal": 5, "label": "x"}
    tasks = open_tasks(DataConfig(), load_agent(f"trl:{file}@Counter?num_tasks=3"))
    assert tasks.num_tasks == 3
    trajectory = await play(f"trl:{file}@Counter?num_tasks=3", "done", task=tasks.draw())
    assert (trajectory.status, trajectory.reward) == (Status.FINISHED, 0.0)


async def test_trl_itself_offers_the_same_tools(file: Path) -> None:
    """TRL finds them among the members of the class; its trainer is not started, since this is all that it does with them."""
    source = inspect.getsource(pytest.importorskip("trl").GRPOTrainer.__init__)
    assert 'member_name.startswith("_")' in source  # else TRL has changed the rule
    assert "inspect.getmembers(type(instance), predicate=inspect.isfunction)" in source
    env = load_agent(f"trl:{file}@Counter").load()()
    env._object = env._made(TASK)
    assert [tool.__name__ for tool in env.list_tools()] == ["add", "read"]
    assert [schema["function"]["name"] for schema in env._box().schemas()] == ["add", "read"]


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("trl:{}@Missing", "there is no 'Missing' in it"),
        ("trl:{}@Conter", "Did you mean Counter"),
        ("trl:{}", "there is no '' in it.*trl:file.py@CLASS"),
        ("trl:{}@Judged", r"Judged has no method get_reward\. Name reward functions of its file with \?reward=NAME"),
        ("trl:{}@Counter?reward=nobody", "reward = 'nobody' is no function of the same file"),
        ("trl:{}@Counter?max=1", "there is no option 'max'"),
        ("trl:nowhere.py@Counter", "there is no such file"),
        ("{}:Counter", "class Counter has no method step.*write --agent trl:file.py@Counter"),
    ],
)
async def test_specifications_that_cannot_be_used(spec: str, problem: str, file: Path) -> None:
    with pytest.raises(EnvLoadError, match=problem):
        load_agent(spec.format(file))
