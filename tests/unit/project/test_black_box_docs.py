"""The agent in docs/black_box.md plays, and what the page says holds."""

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl import ModelEndpoint
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.settings import flag
from agentrl.rollout.endpoint import graph, session
from agentrl.suites.load import load_agent
from tests.unit.rollout.endpoint.support import play_one

MASKS = (session.ABANDONED, session.CANCELLED, session.UNDELIVERED, session.NOT_SELECTED, graph.CONSTRAINED)
PAGE = (Path(__file__).parents[3] / "docs" / "black_box.md").read_text()


@pytest.mark.anyio
async def test_the_example_plays(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    cls: Any = load_agent(str(tmp_path / "example.py")).load()
    assert len(cls.tasks()) == 100
    _, trajectory = await play_one(cls, "3?", "three")
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 0.0, 2)


def test_the_table_names_what_there_is() -> None:
    (table,) = re.findall(r"^\| of `llm`.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)[`(]", row)}
    assert named == {name for name in dir(ModelEndpoint) if not name.startswith("_")} - {"root"}


def test_reasons_and_masks_on_the_page_exist() -> None:
    source = Path(graph.__file__).read_text()
    reasons = re.findall(r"^\| (`[\w-]+`(?:, `[\w-]+`)*) \| (?:went|changed|dropped|sent|began|forced)", PAGE, re.MULTILINE)
    for reason in re.findall(r"`([\w-]+)`", " ".join(reasons)):
        assert f'"{reason.replace("_", " ")}"' in source
    assert {"system_changed", "edited", "template", "constrained"} <= set(re.findall(r"`([\w-]+)`", " ".join(reasons)))
    masked = PAGE.partition("| masked |")[2]
    assert all(f"| `{reason}` |" in masked for reason in MASKS)


def test_flags_on_the_page_exist() -> None:
    assert set(re.findall(r"--[a-z][a-z-]*", PAGE)) <= {flag(name) for name in settings_of(TrainConfig.schema({}))} | {
        "--agent",
        "--reward",
        "--all",
    }  # the last is of `agentrl replay`
