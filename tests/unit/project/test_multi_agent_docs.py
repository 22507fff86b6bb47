"""The environment in docs/multi_agent.md plays the episode printed below it, and the flags on the page exist."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed, settings_of
from agentrl.core.settings import flag
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import SETTINGS, Scene
from tests.unit.rollout.test_agents import say

PAGE = (Path(__file__).parents[3] / "docs" / "multi_agent.md").read_text()


@pytest.mark.anyio
async def test_the_example_plays_the_episode_below_it(tmp_path: Path) -> None:
    code, text = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", PAGE, re.DOTALL).groups()  # type: ignore[union-attr]
    path = tmp_path / "example.py"
    path.write_text(code)
    cls = load_agent(str(path)).load()
    task = next(iter(cls.tasks()))
    engine = ScriptedEngine(answer=say(writer=["tree"], critic=["no"]), max_model_len=1000)
    scene = Scene(cls, engine, changed(SETTINGS, max_new_tokens=100), replace(Scene.group_request, task=task))
    writer, critic = await scene.play_all()
    assert (writer.reward, critic.reward) == (0.0, 1.0)
    for trajectory in (writer, critic):
        shown = [line[len("writer     ") :] for line in re.sub(r"\n  +", "\n", text).splitlines() if line.startswith(trajectory.agent)]
        assert [line.split(maxsplit=1)[0] for line in shown] == ["user", "assistant"]
        played = "".join(turn.prompt_text + turn.text for turn in trajectory.turns)
        assert all(line.split(maxsplit=1)[1] in played for line in shown)


def test_flags_on_the_page_exist() -> None:
    assert set(re.findall(r"--[a-z][a-z-]*", PAGE)) <= {flag(name) for name in settings_of(TrainConfig.schema({}))}
