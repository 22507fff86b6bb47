"""What docs/honest_rewards.md shows of `agentrl check`, and what it says that answers earn, is what comes out."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.check.findings import RULES
from agentrl.check.report import print_report
from agentrl.config.sections import changed
from agentrl.core.types import GroupRequest, Status
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.check.support import checked
from tests.unit.rollout.scenes import SETTINGS, Scene, says

PAGE = (Path(__file__).parents[3] / "docs" / "honest_rewards.md").read_text()
CHECKS = re.findall(r"```python\n((?:(?!```).)*?)```\s+```console\n\$ agentrl check (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
LONG = changed(SETTINGS, max_new_tokens=100)
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_output_has_its_environment() -> None:
    assert len(CHECKS) == PAGE.count("```console") >= 7
    assert len({name for _, name, _ in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(("code", "name", "shown"), CHECKS, ids=[name for _, name, _ in CHECKS])
def test_the_check_prints_what_the_page_shows(code: str, name: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(code)
    out = StringIO()
    print_report(checked(str(tmp_path / name), episodes=8), console=Console(file=out, width=110))
    printed = [line.rstrip() for line in out.getvalue().splitlines()]
    for line in filter(None, shown.splitlines()):
        assert line == "..." or line in printed, "\n".join(printed)
    found = {line.split(":")[0] for line in printed if re.match(r"(error|warning) [\w-]+:", line)}
    assert found == {line.split(":")[0] for line in shown.splitlines() if re.match(r"(error|warning) ", line)}


def test_rules_that_are_named_exist() -> None:
    table = re.search(r"\| error \| rewarded behaviour.*?\n\n", PAGE, re.DOTALL)
    assert table is not None
    assert set(re.findall(r"`([a-z]+-[a-z]+)`", table[0])) <= set(RULES)


def rewards_of(form: str) -> list[tuple[str, ...]]:
    return re.findall(form, PAGE, re.MULTILINE)


@pytest.mark.anyio
@pytest.mark.parametrize(("text", "right", "form", "reward"), rewards_of(r"^\| `(.*)` \| (\d) \| (\d) \| ([\d.]+) \|$"))
async def test_forms_earn_what_the_table_says(text: str, right: str, form: str, reward: str, tmp_path: Path) -> None:
    path = tmp_path / "form.py"
    path.write_text(next(block for block in BLOCKS if "form=" in block).replace("label=str(a + b)", 'label="3"'))
    trajectory = await Scene(load_agent(str(path)).load(), ScriptedEngine(answer=says(text)), LONG, with_label("3")).play()
    assert trajectory.status is Status.FINISHED
    assert trajectory.reward == pytest.approx(float(reward))
    assert trajectory.metrics == {"reward/right": float(right), "reward/form": float(form)}


def with_label(label: str) -> GroupRequest:
    return replace(Scene.group_request, task=replace(Scene.group_request.task, label=label))
