"""The environment in docs/credit.md names its states, and the flags on the page exist."""

import re
from pathlib import Path

import pytest

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import flag, settings_of
from agentrl.env.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import Scene, says

PAGE = (Path(__file__).parents[3] / "docs" / "credit.md").read_text()


@pytest.mark.anyio
async def test_the_example_names_its_states(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "corridor.py").write_text(code)
    cls = load_agent(str(tmp_path / "corridor.py")).load()
    scene = Scene(cls, ScriptedEngine(answer=says("right", "right", "left", "right"), max_model_len=1000))
    trajectory = await scene.play()
    assert [turn.state_key for turn in trajectory.turns] == ["0", "1", "2", "1"]


def test_flags_on_the_page_exist() -> None:
    settings = {flag(name) for name in settings_of(TrainConfig.schema({}))} | {"--gae-alpha"}
    assert set(re.findall(r"--[a-z][a-z-]*", PAGE)) <= settings
