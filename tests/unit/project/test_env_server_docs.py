"""The examples of docs/nemo_gym.md and docs/openenv.md run on the servers that they speak of."""

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.types import Task
from agentrl.env.responses import PARAMS, chat_of
from agentrl.suites.load import load_agent
from agentrl.suites.openenv import load_openenv
from tests import env_servers
from tests.unit.suites.remote import outcome, play, said, script

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[3] / "docs"


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def loaded(example: str, path: Path, port: int) -> Any:
    file = path / "example.py"
    file.write_text(example.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    return load_agent(str(file)).load()


async def test_nemo_gym(tmp_path: Path) -> None:
    tool = {"type": "function", "name": "increment_counter", "parameters": {"properties": {"count": {"type": "integer"}}}}
    row = {PARAMS: {"input": "Add 1.", "tools": [tool]}, "initial_count": 3, "expected_count": 4}
    (example,) = examples("nemo_gym.md")
    with env_servers.module("nemo_like") as server:
        cls = loaded(example, tmp_path, server.port)
        steps = script('{"tool": "increment_counter", "args": [1]}', "It is 4.")
        trajectory = await play(cls, Task(chat_of(row[PARAMS]), metadata=row, id="t"), steps)
    assert outcome(trajectory) == ("finished", 1.0)
    assert 'Write {"tool": NAME, "args": [...]} to call a tool.' in said(trajectory)


async def test_openenv(tmp_path: Path) -> None:
    formatter, example = examples("openenv.md")
    transcript = re.findall(r"^assistant  (.*)$", (DOCS / "openenv.md").read_text(), re.MULTILINE)
    task = Task("guess", id="g", seed=3, metadata={"numbered": True})
    with env_servers.module("open_env", "4") as server:
        trajectory = await play(load_openenv(f"openenv:ws://127.0.0.1:{server.port}"), task, script(*transcript))
        assert outcome(trajectory) == ("finished", 1.0)
        for line in ("A number from 1 to 9.\nguesses: 0", "Write a number (number).", "text: Lower.\nguesses: 1"):
            assert line in said(trajectory)
        (tmp_path / "words.py").write_text(formatter)
        spec = f"openenv:ws://127.0.0.1:{server.port}?formatter={tmp_path}/words.py:words"
        assert "Higher. You have made 1 guesses." in said(await play(load_openenv(spec), task, script("3", "4")))
        cls = loaded(example, tmp_path, server.port)
        assert len(cls.tasks()) == 100
        trajectory = await play(cls, task, script("three", "four"))
        assert outcome(trajectory) == ("finished", 1.0)
