"""The executor in docs/executors.md plays, and what the page says of it holds."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl import Policy
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.settings import flag
from agentrl.learner.batch import merge_turns
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import Scene, says
from tests.unit.rollout.test_episode import dialogue

PAGE = (Path(__file__).parents[3] / "docs" / "executors.md").read_text()


@pytest.mark.anyio
async def test_the_example_plays(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "example.py"
    path.write_text(code)
    cls = load_agent(str(path)).load()
    task = next(task for task in cls.tasks() if task.label == "3")
    scene = Scene(cls, ScriptedEngine(answer=says("4", "3")), group_request=replace(Scene.group_request, task=task))
    trajectory = await scene.play()
    assert (trajectory.error, trajectory.reward, trajectory.metrics) == (None, 1.0, {"changed": 1.0})
    assert len(merge_turns(trajectory)) == 1
    played = "".join(turn.prompt_text + turn.text for turn in trajectory.turns)
    assert played.startswith(dialogue(("user", task.prompt), ("assistant", "4"), ("user", "Sure?")))


def test_the_table_names_what_there_is() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)[`(]", row)} - {"llm"}
    assert named == {name for name in vars(Policy) if not name.startswith("_")}


def test_flags_on_the_page_exist() -> None:
    assert set(re.findall(r"--[a-z][a-z-]*", PAGE)) <= {flag(name) for name in settings_of(TrainConfig.schema({}))} | {"--agent"}
