"""The page on sandboxes: its example plays, and its defaults are those of the code."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from agentrl import SandboxSpec, StepState
from agentrl.suites.load import load_agent
from tests.sandboxes import needs_sandbox

PAGE = (Path(__file__).parents[3] / "docs" / "sandboxes.md").read_text()


@needs_sandbox
@pytest.mark.anyio
async def test_the_example_plays(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "example.py"
    path.write_text(code)
    env = load_agent(str(path)).load()()
    for text, reward in (("def double(n): return 2 * n", 1.0), ("def double(n): return n * n", 0.0)):
        result = await env.step(StepState(action_text=text))
        assert (result.reward, result.terminated) == (reward, True)


def test_the_defaults_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE, re.MULTILINE))
    numbers = {
        field.name: field.default
        for field in fields(SandboxSpec)
        if isinstance(field.default, int | float) and not isinstance(field.default, bool)
    }
    assert {name: float(value) for name, value in rows.items()} == numbers
