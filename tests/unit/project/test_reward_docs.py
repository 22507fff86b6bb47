"""Every block of docs/rewards.md is a file that can be given as --agent."""

import re
from pathlib import Path

import pytest

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.settings import flag
from agentrl.core.types import Status
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import Scene, says

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.anyio
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
async def test_a_block_judges_a_right_and_a_wrong_answer(block: str, tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(block)
    cls = load_agent(str(path)).load()
    right = "<answer>three</answer>" if "<answer>" in block else "three"
    found = [await Scene(cls, ScriptedEngine(answer=says(text))).play() for text in (right, "four")]
    assert [trajectory.status for trajectory in found] == [Status.FINISHED] * 2
    assert [trajectory.score for trajectory in found] == [1.0, 0.0]


def test_flags_on_the_page_exist() -> None:
    known = {flag(name) for name in settings_of(TrainConfig.schema({}))}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) <= known


def test_links_within_the_page_lead_somewhere() -> None:
    anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) == anchors
