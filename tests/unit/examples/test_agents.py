"""The examples of black-box agents, against a scripted model."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.types import GroupRequest, Status, Task, Trajectory
from agentrl.env.black_box import BlackBoxSession
from agentrl.rollout.endpoint.episode import BlackBoxEpisode
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.suites.load import load_agent
from tests.sandboxes import needs_sandbox
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import CODEC, SETTINGS, says

pytestmark = pytest.mark.anyio

EXAMPLES = Path(__file__).parents[3] / "examples"


async def play_class(cls: Any, task: Task, *texts: str) -> tuple[Trajectory, ...]:
    """Play a task; ``LABEL`` in a text is the right answer."""
    engine, server = (
        ScriptedEngine(answer=says(*(text.replace("LABEL", str(task.label)) for text in texts)), max_model_len=4096),
        EndpointServer(),
    )
    await engine.start()
    env = BlackBoxSession(cls, "file.py", SETTINGS.env)
    group_request = GroupRequest(group_id=0, task=task, n_samples_per_prompt=1, version=0)
    try:
        return await BlackBoxEpisode(group_request, 0, engine=engine, codec=CODEC, env=env, settings=SETTINGS, server=server).run()
    finally:
        await server.close()


async def play(name: str, *texts: str) -> tuple[Trajectory, ...]:
    """Play the first task of an example."""
    cls: Any = load_agent(str(EXAMPLES / name)).load()
    return await play_class(cls, cls.tasks()[0], *texts)


async def test_the_tool_agent_calls_the_tool_and_answers() -> None:
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
    (trajectory,) = await play("openai_agent.py", call, "LABEL")
    assert (trajectory.error, trajectory.reward, trajectory.metrics["turns"]) == (None, 1.0, 2.0)
    assert "42" in trajectory.turns[1].prompt_text
    (wrong,) = await play("openai_agent.py", call.replace("6", '"six"'), "no idea")
    assert (wrong.error, wrong.reward) == (None, 0.0)
    assert "error: a and b must be whole numbers" in wrong.turns[1].prompt_text


async def test_the_tool_agent_that_never_answers_is_truncated() -> None:
    (trajectory,) = await play("openai_agent.py", '<tool_call>\n{"name": "multiply", "arguments": {}}\n</tool_call>')
    assert (trajectory.error, trajectory.status, len(trajectory.turns)) == (None, Status.TRUNCATED, 4)


async def test_solver_and_checker_have_rewards_of_their_own() -> None:
    played = await play("anthropic_agent.py", "7", "LABEL")
    assert {trajectory.agent: trajectory.reward for trajectory in played} == {"solver": 0.0, "checker": 1.0}
    assert [trajectory.error for trajectory in played] == [None, None]


@needs_sandbox
async def test_the_agent_on_the_command_line_works_in_a_folder_that_a_judge_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    command = re.search(r'"(command:.*?)"', (EXAMPLES / "command_line" / "agent.py").read_text(), re.DOTALL)
    assert command is not None
    cls = load_agent(command[1].replace("\n", "").replace("python ", f"{sys.executable} ")).load()
    rows = map(json.loads, (EXAMPLES / "command_line" / "tasks.jsonl").read_text().splitlines())
    tasks = [Task(row["prompt"], label=row["label"]) for row in rows]
    (right,) = await play_class(cls, tasks[0], "echo LABEL > result.txt; ls", "DONE")
    assert (right.error, right.reward, len(right.turns)) == (None, 1.0, 2)
    assert "result.txt" in right.turns[1].prompt_text
    (wrong,) = await play_class(cls, tasks[1], "sleep 0", "echo 1000 > result.txt", "DONE")
    assert (wrong.error, wrong.reward, wrong.metrics["endpoint/branches"]) == (None, 0.0, 1.0)
    (endless,) = await play_class(cls, tasks[2], "echo on and on")
    assert (endless.error, endless.reward, len(endless.turns)) == (None, 0.0, 6)
