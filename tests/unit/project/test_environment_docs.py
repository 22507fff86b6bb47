"""Every environment in docs/environments.md is loaded from a file and plays the episode printed below it."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agentrl import Task
from agentrl.config.load import field_homes, flag
from agentrl.core.types import Sampling, Status
from agentrl.engine.scripted import ScriptedEngine
from agentrl.env.boundary import EnvLimits
from agentrl.env.load import load_agent
from tests.unit.rollout.scenes import SETTINGS, TASK, Scene, says

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", PAGE, re.DOTALL)
LINE = re.compile(r"(\w+) +(.*)")
LONG = replace(SETTINGS, env=EnvLimits(), max_turns=8, sampling=Sampling(max_tokens=400))


def episode(text: str) -> list[tuple[str, str]]:
    """What was said, by whom; a line that begins with spaces continues the one before."""
    said: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith(" "):
            role, before = said.pop()
            said.append((role, f"{before}\n{line.strip()}"))
        else:
            said.append(LINE.fullmatch(line).groups())
    return said


def task_of(cls: type[Any], question: str) -> Task:
    """The task that the printed episode begins with; of a class without tasks, the one that it is given."""
    tasks = cls.tasks() if hasattr(cls, "tasks") else [TASK]
    return next(task for task in islice(tasks, 10_000) if task.prompt == question or question.startswith("Keep the pole"))


def test_every_example_has_its_episode() -> None:
    assert len(EXAMPLES) == PAGE.count("```python") == PAGE.count("```text") == 9


def test_flags_on_the_page_exist() -> None:
    used = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    assert len(used) > 8
    assert used <= {flag(name) for name in field_homes()}


@pytest.mark.anyio
@pytest.mark.parametrize(("code", "text"), EXAMPLES, ids=[re.search(r"class (\w+)", code)[1] for code, _ in EXAMPLES])
async def test_the_example_plays_the_episode_below_it(code: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(code)
    cls, said = load_agent(str(path)).load(), episode(text)
    task = task_of(cls, next(content for role, content in said if role == "user"))
    engine = ScriptedEngine(answer=says(*(content for role, content in said if role == "assistant"), *["?"] * 8), max_model_len=10_000)
    scene = Scene(cls, engine, LONG, replace(Scene.ticket, task=replace(task, seed=0)))
    trajectory = await scene.play()

    role, content = said[-1]
    if role == "error":
        assert trajectory.status is Status.ENV_ERROR
        assert content in trajectory.error
        return
    shown = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said if role != "reward")
    assert shown.rstrip() in without_tools("".join(turn.prompt_text + turn.text for turn in trajectory.turns))
    if role == "reward":
        assert trajectory.status is Status.FINISHED
        assert trajectory.reward == pytest.approx(float(content))


def without_tools(played: str) -> str:
    """An episode without the system message that describes tools, which the page does not repeat."""
    return re.sub(r"<\|im_start\|>system\nYou may call tools.*?<\|im_end\|>\n", "", played, flags=re.DOTALL)
