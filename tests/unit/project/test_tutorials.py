"""The tutorial's environment plays and passes the check; the one on the page about debugging really does not earn anything."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl import check_async
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT, Scene, says

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("tutorial", "debugging")}


def file_of(page: str, folder: Path) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    path = folder / f"{page}.py"
    path.write_text(code)
    return path


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("page", "answers", "reward", "turns"),
    [
        ("tutorial", ["5"], 1.0, 1),
        ("tutorial", ["52", "5"], 0.5, 2),
        ("tutorial", ["52", "4"], 0.0, 2),
        ("debugging", ["5", "5"], 0.0, 2),
    ],
)
async def test_episodes_earn_what_the_pages_say(page: str, answers: list[str], reward: float, turns: int, tmp_path: Path) -> None:
    cls = load_agent(str(file_of(page, tmp_path))).load()
    task = next(task for task in cls.tasks() if task.prompt == "What is 2+3?")
    engine = ScriptedEngine(answer=says(*answers), max_model_len=1000)
    trajectory = await Scene(cls, engine, PATIENT, replace(Scene.group_request, task=replace(task, id="23", seed=0))).play()
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, reward, turns)


def test_the_mended_line_is_the_difference(tmp_path: Path) -> None:
    broken, whole = file_of("debugging", tmp_path).read_text(), file_of("tutorial", tmp_path).read_text()
    minus, plus = re.findall(r"^[-+] +(right = .*)$", PAGES["debugging"], re.MULTILINE)
    assert broken.replace(minus, plus) == whole


@pytest.mark.anyio
@pytest.mark.parametrize(("page", "expected"), [("tutorial", set()), ("debugging", {"reward-constant"})])
async def test_the_check_says_what_the_pages_say(page: str, expected: set[str], tmp_path: Path) -> None:
    result = await check_async(str(file_of(page, tmp_path)))
    assert {finding["id"] for finding in result.to_dict()["findings"]} == expected
