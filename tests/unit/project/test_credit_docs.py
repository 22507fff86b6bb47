"""The environment in docs/credit.md names its states, and the flags on the page exist."""

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.algo.plan import built_in_options
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.settings import flag
from agentrl.core.types import GroupRequest, Task
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import Scene, says

PAGE = (Path(__file__).parents[3] / "docs" / "credit.md").read_text()


def example(folder: Path, number: int) -> type[Any]:
    """The class of an example."""
    file = folder / "example.py"
    file.write_text(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number])
    return load_agent(str(file)).load()


@pytest.mark.anyio
async def test_the_example_names_its_states(tmp_path: Path) -> None:
    scene = Scene(example(tmp_path, 0), ScriptedEngine(answer=says("right", "right", "left", "right"), max_model_len=1000))
    trajectory = await scene.play()
    assert [turn.state_key for turn in trajectory.turns] == ["0", "1", "2", "1"]


@pytest.mark.anyio
async def test_the_example_pays_each_right_line(tmp_path: Path) -> None:
    task = Task("Add 1 to 7 three times, one sum per line.", label=7)
    request = GroupRequest(group_id=0, task=task, n_samples_per_prompt=1, version=0)
    engine = ScriptedEngine(answer=says("7+1=8\n8+1=9\n9+1=11"), max_model_len=1000)
    (turn,) = (await Scene(example(tmp_path, 1), engine, group_request=request).play()).turns
    assert [value for _, value in turn.step_rewards] == [0.2, 0.2, 0.0]
    assert turn.reward == pytest.approx(0.4)


def test_flags_on_the_page_exist() -> None:
    settings = {flag(name) for name in (*settings_of(TrainConfig.schema({})), *built_in_options())}
    settings |= {name.replace("--", "--no-", 1) for name in settings}
    assert set(re.findall(r"--[a-z][a-z-]*", PAGE)) <= settings
