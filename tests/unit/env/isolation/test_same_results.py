"""An environment does not notice where it runs: the same results, the same errors, in this process and in one of its own."""

import re
from pathlib import Path

import pytest

from agentrl import Task
from agentrl.core.errors import EnvError, EnvLoadError
from agentrl.core.types import Span
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation import wire
from agentrl.env.isolation.pool import LocalSessions, Sessions, open_sessions
from agentrl.env.isolation.system import ProcessLimits
from agentrl.suites.load import load_agent
from tests.unit.env.isolation.support import state, survivors

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]
ANSWERS = ("4", "LOOK 12", '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "left", "stick")

FORMS = """
import random
import numpy as np
from agentrl import AgentInstance, Message, ResetResult, StepResult, Task, ToolEnv

def add(a: int, b: int) -> int:
    '''Add.

    Args:
        a: One.
        b: Other.
    '''
    return a + b

class Typed(AgentInstance):
    def reset(self, state):
        assert state.task.metadata == {"k": (1, 2)} and state.task.label is state.label and state.observation == "prompt", state
        return ResetResult([Message(role="system", content="a\\ud800b\\x00"), Message(role="user", content=[{"type": "text"}])],
                           info={"np": np.float32(0.1)}, sampling={"stop": "x", "top_k": 3}, images=["data:,x"])

    def step(self, state):
        assert state.sampling_params.temperature == 0.5 and state.sampling_params["stop"] == ["x"], state
        calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
        observation = [Message(role="assistant", content=None, tool_calls=calls), Message(role="tool", content="3", tool_call_id="1")]
        return StepResult(np.float64(1 / 3), observation, truncated=np.bool_(True), score=0.25, info={"turn": state.turn},
                          reward_parts={"a": 0.1}, sampling={"stop": ["x", "y"], "temperature": None, "stop_token_ids": (1, 2)})

class Tools(ToolEnv):
    tools = (add,)

    def judge(self, state):
        return random.random() * 0 + len(state.observation_text)

class Dictionary:
    async def reset(self, states, **kwargs):
        return {"observation": "<|raw|>" + states["observation"]}

    async def step(self, states, **kwargs):
        done = states["action_text"] == "left"
        return {"rewards": [0.5], "scores": 0.5, "environment_feedback": "<|next|>", "done": done, "extra_logs": {"x": 1}}

class Bad(AgentInstance):
    def step(self, state):
        kind = state.turn
        if kind == 0:
            return StepResult(1.0, observation=5)
        if kind == 1:
            return {"reward": 1.0}
        if kind == 2:
            return StepResult(1.0, "x", info={"a": "b"})
        if kind == 3:
            raise ValueError("first line\\nsecond line")
        return None

def reward(completion, label):
    return float(completion == "4") + len(label)
"""

TIMED = """
import asyncio
from agentrl import timed

class Timed(Tools):
    async def reset(self, state):
        with timed("look up"):
            await asyncio.sleep(0.02)

    def judge(self, state):
        with timed("judge"):
            raise RuntimeError("it broke")
"""

ENVS = [*sorted(str(path) for path in (ROOT / "envs").glob("*.py")), "gym:FrozenLake-v1?is_slippery=True", "gym:Blackjack-v1"]
OPENRLHF = [str(ROOT / "tests/openrlhf_files" / name) for name in ("feedback.py", "extra_logs.py", "reward_func.py", "sampling.py")]


@pytest.mark.linux
@pytest.mark.parametrize("spec", [*ENVS, *OPENRLHF], ids=lambda spec: Path(spec).name)
async def test_ready_made_environments_play_alike(spec: str) -> None:
    await compare(load_agent(spec))


@pytest.mark.parametrize("name", ["Typed", "Tools", "Dictionary", "Bad", "reward"])
async def test_every_form_passes_unchanged(name: str, tmp_path: Path) -> None:
    path = tmp_path / "forms.py"
    path.write_text(FORMS)
    await compare(load_agent(f"{path}:{name}"))


async def test_times_of_tools_leave_the_process_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "forms.py"
    path.write_text(FORMS + TIMED)
    agent = load_agent(f"{path}:Timed")
    for sessions in (LocalSessions(agent, EnvLimits()), open_sessions(agent, EnvLimits(process=ProcessLimits()))):
        await sessions.start()
        session = sessions.session()
        try:
            await session.reset(Task("prompt"), 3)
            [look] = session.take_spans()
            await session.step(state(ANSWERS[2]))
            [call] = session.take_spans()
            with pytest.raises(EnvError, match="it broke"):
                await session.step(state("an answer"))
            [failed] = session.take_spans()
            assert session.take_spans() == ()
        finally:
            await session.close()
            await sessions.close()
        assert (look.name, call.name, failed.name) == ("tool:look up", "tool:add", "tool:judge")
        assert all(span.turn is None and span.start_s >= 0.0 for span in (look, call, failed))
        assert look.seconds >= 0.02


@pytest.mark.parametrize(
    ("spans", "kept"),
    [
        ([["tool:a", 0.5, 1]], [Span("tool:a", None, 0.5, 1.0)]),
        ([["generate", 0.5, 1.0], ["tool:" + "x" * 81, 0.0, 0.0], ["tool:a", -1.0, 0.0], ["tool:a", 0.0, 1e7], ["tool:a", 0.0], 3], []),
        ([["tool:a", "0", 1.0], ["tool:a", float("nan"), 1.0], [["tool:a"], 0.0, 1.0]], []),
        ("tool:a", []),
        ([["tool:a", 0.0, 0.0]] * 1000, [Span("tool:a", None, 0.0, 0.0)] * 200),
    ],
)
def test_times_from_a_process_are_not_trusted(spans: object, kept: list[Span]) -> None:
    assert list(wire.spans_of({"spans": spans})) == kept


async def test_what_json_cannot_say_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "sets.py"
    path.write_text(
        "from agentrl import AgentInstance, StepResult\n"
        "class Sets(AgentInstance):\n"
        "    def step(self, state):\n"
        "        return StepResult(1.0, [{'role': 'user', 'content': [{'a': {1}}]}])\n"
    )
    told = await played(open_sessions(load_agent(str(path)), EnvLimits(process=ProcessLimits())), Task("prompt"))
    assert "sets.py: Sets.step: the result must be made of texts, numbers, lists and dictionaries" in told[1]


async def test_a_task_that_cannot_be_sent_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "forms.py"
    path.write_text(FORMS)
    told = await played(open_sessions(load_agent(f"{path}:Bad"), EnvLimits(process=ProcessLimits())), Task("p", label=lambda: 1, id="odd"))
    assert "forms.py: Bad.reset: task 'odd' cannot be sent to the environment's process" in told[0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; secret = os.environ['CANARY_KEY']", "importing it raised KeyError: 'CANARY_KEY'"),
        ("import os; 'CANARY_KEY' in os.environ or os._exit(1)", "its process ended while it was loaded"),
    ],
)
async def test_a_file_that_cannot_be_loaded_outside_fails_the_start(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_KEY", "canary")
    path = tmp_path / "needs.py"
    path.write_text(f"{code}\n{FORMS}")
    sessions = open_sessions(load_agent(f"{path}:Bad"), EnvLimits(process=ProcessLimits()))
    with pytest.raises(EnvLoadError, match=message):
        await sessions.start()
    await sessions.close()
    assert survivors(sessions) == []  # type: ignore[arg-type]


async def compare(agent: AgentSpec) -> None:
    tasks = agent.load().tasks() if hasattr(agent.load(), "tasks") else None
    task = next(iter(tasks)) if tasks else Task("prompt", label="label", id="t", metadata={"k": (1, 2)}, seed=3)
    inside = await played(LocalSessions(agent, EnvLimits()), task)
    outside = await played(open_sessions(agent, EnvLimits(process=ProcessLimits())), task)
    assert outside == inside
    assert len(inside) > 1


async def played(sessions: Sessions, task: Task) -> list[str]:
    """What reset and each step returned or raised."""
    await sessions.start()
    session = sessions.session()
    told: list[str] = []
    try:
        told.append(repr(await session.reset(task, 3)))
        for turn, text in enumerate(ANSWERS):
            try:
                result = await session.step(state(text, task=task, turn=turn, observation="before" * turn))
            except EnvError as error:
                told.append(f"{type(error).__name__}: {without_addresses(str(error))}")
                continue
            told.append(repr(result))
            if result.terminated:
                break
    except EnvError as error:
        told.append(f"{type(error).__name__}: {error}")
    finally:
        await session.close()
        await sessions.close()
    return told


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


async def test_an_executor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from agentrl.env.executor import Executor\nclass Own(Executor):\n    async def execute(self, task, policy):\n        return None\n"
    )
    with pytest.raises(EnvLoadError, match="Own calls the model itself"):
        await open_sessions(load_agent(str(path)), EnvLimits(process=ProcessLimits())).start()
