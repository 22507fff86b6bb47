"""Every environment on the pages about writing them is loaded from a file and plays the episode printed below it."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agentrl import GymEnv, Task
from agentrl.config.sections import changed
from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Status
from agentrl.suites.load import load_agent
from tests.sandboxes import needs_sandbox
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT, TASK, Scene, says

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text() for name in ("environments", "tools", "gymnasium", "openrlhf")}
CLASS = re.compile(r"class (\w+)")
EXAMPLES = [
    pytest.param(code, text, id=f"{page}-{CLASS.findall(code)[0]}", marks=needs_sandbox if "tools = (python,)" in code else ())
    for page, content in PAGES.items()
    for code, text in re.findall(r"```python\n((?:(?!```).)*?)```(?:(?!```).)*```text\n(.*?)```", content, re.DOTALL)
]
REFUSAL = re.compile(r"^\$ agentrl train --agent '?([^'\n]*)'?\nagentrl: (.*)$", re.MULTILINE)
REFUSED = [found for page in PAGES.values() for found in REFUSAL.findall(page)]
LINE = re.compile(r"(\w+) +(.*)")
LONG = changed(PATIENT, max_turns=8, max_new_tokens=400)


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
    if issubclass(cls, GymEnv):
        return next(iter(cls.tasks()))
    tasks = cls.tasks() if getattr(cls, "tasks", lambda: None)() else [TASK]
    return next(task for task in islice(tasks, 10_000) if task.prompt == question)


def test_every_example_has_its_episode() -> None:
    assert len(EXAMPLES) == sum(page.count("```python") for page in PAGES.values()) >= 14
    assert len(EXAMPLES) == sum(page.count("```text") for page in PAGES.values())


@pytest.mark.parametrize(("spec", "message"), REFUSED)
def test_what_is_refused_is_refused_in_these_words(spec: str, message: str) -> None:
    with pytest.raises(EnvLoadError) as caught:
        load_agent(spec)
    assert str(caught.value) == message


@pytest.mark.anyio
@pytest.mark.parametrize(("code", "text"), EXAMPLES)
async def test_the_example_plays_the_episode_below_it(code: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(code)
    cls, said = load_agent(str(path)).load(), episode(text)
    task = task_of(cls, next(content for role, content in said if role == "user"))
    engine = ScriptedEngine(answer=says(*(content for role, content in said if role == "assistant"), *["?"] * 8), max_model_len=10_000)
    scene = Scene(cls, engine, LONG, replace(Scene.group_request, task=replace(task, seed=0)))
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


@pytest.mark.parametrize(
    ("old", "new", "printed"),
    [
        ('"rewards": 1.0', '"reward": 1.0', "has the unknown key 'reward'; did you mean 'rewards'?"),
        ('"rewards": 1.0 / self.tries if right else 0.0', '"rewards": [1.0, 2.0]', "rewards = [1.0, 2.0] (list): must be a number"),
    ],
)
@pytest.mark.anyio
async def test_what_openrlhf_files_get_wrong_is_said_as_on_the_page(old: str, new: str, printed: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["openrlhf"], re.DOTALL)
    assert old in code
    assert printed in PAGES["openrlhf"]
    path = tmp_path / "agent.py"
    path.write_text(code.replace(old, new))
    trajectory = await Scene(load_agent(str(path)).load(), ScriptedEngine(answer=says("four"), max_model_len=1000), LONG).play()
    assert trajectory.status is Status.ENV_ERROR
    assert printed in trajectory.error
    assert ": AgentInstance.step returned " in trajectory.error


def test_an_executor_that_names_nothing_is_refused(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["openrlhf"], re.DOTALL)
    (tmp_path / "agent.py").write_text(code.replace("super().__init__(AgentInstance)", "pass"))
    with pytest.raises(EnvLoadError) as caught:
        load_agent(str(tmp_path / "agent.py"))
    assert str(caught.value).split(": ", 1)[1] in PAGES["openrlhf"]


def test_what_tools_get_wrong_is_said_as_on_the_page(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGES["tools"], re.DOTALL)[0]
    (tmp_path / "env.py").write_text(code.replace("a: int, b: int", "a, b"))
    printed = "tool multiply: parameter a needs a type hint"
    assert printed in PAGES["tools"]
    with pytest.raises(EnvLoadError, match=printed):
        load_agent(str(tmp_path / "env.py"))
