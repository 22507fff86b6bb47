"""Episodes on NeMo Gym's own servers. The package asks for Python >= 3.12, 0.5 for >= 3.13.14, so that it runs in a Python of its own.

NEMO_GYM_PYTHON=/path/to/python pytest -m slow tests/e2e/test_nemo_gym_package.py
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.types import Task
from agentrl.env.prompts import PromptFormat, read_prompts
from agentrl.suites.load import load_agent
from agentrl.suites.nemo_gym import load_nemo_gym
from tests import env_servers
from tests.e2e.everywhere import runs_everywhere
from tests.unit.examples.test_agents import play_class
from tests.unit.suites.remote import call, outcome, play, said, script

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

DATA = "import resources_servers.{} as m; print(list(m.__path__)[0])"
COUNTER, TURNS, WEATHER = "example_session_state_mgmt", "example_multi_turn_gymnasium", "example_mcp_weather"


@pytest.fixture(scope="module")
def python() -> str:
    name = os.environ.get("NEMO_GYM_PYTHON", sys.executable)
    found = subprocess.run(
        [name, "-c", "import nemo_gym, sys; print(sys.version)"], capture_output=True, text=True, timeout=120, check=False
    )
    if found.returncode:
        pytest.skip(f"{name} has no nemo-gym; name another in NEMO_GYM_PYTHON")
    return name


@pytest.fixture(scope="module")
def url(python: str) -> Iterator[str]:
    with env_servers.running(python, "-m", "tests.env_servers.nemo_counter") as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def tasks(python: str) -> list[Task]:
    return rows(python, COUNTER)


def rows(python: str, name: str) -> list[Task]:
    return read_prompts([str(data(python, name))], PromptFormat())[0].tasks


def data(python: str, name: str) -> Path:
    """The file of rows that the package brings."""
    folder = subprocess.run([python, "-c", DATA.format(name)], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    return Path(folder) / "data/example.jsonl"


def counting(task: Task, offset: int) -> Any:
    """Adds what the server expects, in two calls, plus `offset`; answers with what the counter says."""
    difference = task.metadata["expected_count"] - task.metadata["initial_count"]

    def write(turn: int, text: str) -> str:
        counts = (1, difference - 1 + offset)
        return call("increment_counter", count=counts[turn]) if turn < 2 else call("get_counter_value") if turn == 2 else "Done."

    return write


async def test_the_counter_server(url: str, tasks: list[Task]) -> None:
    cls = load_nemo_gym(f"nemo-gym:{url}")
    played = [play(cls, task, counting(task, number % 2), number) for number, task in enumerate(tasks * 8)]
    for number, (task, trajectory) in enumerate(zip(tasks * 8, await asyncio.gather(*played), strict=True)):
        expected = task.metadata["expected_count"] + number % 2
        assert outcome(trajectory) == ("finished", float(number % 2 == 0))
        assert json.dumps({"count": expected}, separators=(",", ":")) in said(trajectory)


async def test_wrong_calls(url: str, tasks: list[Task]) -> None:
    write = counting(tasks[0], 0)
    wrong = (call("increment_counter", count="x"), call("increment_counter"), call("close_session"))
    trajectory = await play(
        load_nemo_gym(f"nemo-gym:{url}"), tasks[0], lambda turn, text: wrong[turn] if turn < 3 else write(turn - 3, text)
    )
    assert outcome(trajectory) == ("finished", 1.0)
    assert said(trajectory).count("Error: 422: ") == 2
    assert "there is no tool 'close_session'" in said(trajectory)


async def test_a_gymnasium_like_server(python: str) -> None:
    task = rows(python, TURNS)[0]
    with env_servers.running(python, "-m", "tests.env_servers.nemo_agents", "turns-alone", "0") as server:
        cls: Any = load_agent(f"nemo-gym:http://127.0.0.1:{server.port}?form=gymnasium").load()
        right = await play(cls, task, script("Paris", "2 million", "The Eiffel tower"))
        wrong = await play(cls, task, script("Paris", "2 million", "None"))
    assert (outcome(right), outcome(wrong)) == (("finished", 1.0), ("finished", 0.0))
    assert "What is the approximate population" in right.turns[1].prompt_text


async def test_a_server_whose_tool_is_listed_over_mcp(python: str) -> None:
    tasks = rows(python, WEATHER)
    with env_servers.running(python, "-m", "tests.env_servers.nemo_agents", "weather-alone", "0") as server:
        cls: Any = load_agent(f"nemo-gym:http://127.0.0.1:{server.port}").load()
        cities = [task.metadata["verifier_metadata"]["expected_city"] for task in tasks]
        said_right = [script(call("get_weather", city=city), f"The weather in {city} is sunny and 72 F.") for city in cities]
        right = await asyncio.gather(*(play(cls, task, text) for task, text in zip(tasks, said_right, strict=True)))
        wrong = await play(cls, tasks[0], script(call("get_weather", city="Rome"), "The weather in Paris is sunny and 72 F."))
        bad = await play(cls, tasks[0], script(call("get_weather", town="Paris"), "no"))
    assert [outcome(trajectory) for trajectory in right] == [("finished", 1.0)] * len(tasks)
    assert (outcome(wrong), outcome(bad)) == (("finished", 0.0), ("finished", 0.0))
    assert "Get a deterministic weather report" in right[0].turns[0].prompt_text
    assert "The weather in Paris is sunny" in said(right[0])
    assert "validation error" in said(bad)


@pytest.mark.parametrize(
    ("kind", "name", "texts", "wrong"),
    [
        ("counter", COUNTER, (call("increment_counter", count=3), call("get_counter_value"), "Done."), "Done."),
        ("turns", TURNS, ("Paris", "2 million", "The Eiffel tower"), "None"),
    ],
)
async def test_an_agent_server(python: str, kind: str, name: str, texts: tuple[str, ...], wrong: str) -> None:
    task = rows(python, name)[0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with env_servers.running(python, "-m", "tests.env_servers.nemo_agents", kind, str(port)) as server:
        cls: Any = load_agent(f"nemo-gym:http://127.0.0.1:{server.port}?form=agent&model_port={port}").load()
        played = await asyncio.gather(*(play_class(cls, task, *said) for said in (texts, (wrong,), texts, (wrong,))))
    for number, (trajectory,) in enumerate(played):
        assert (trajectory.error, trajectory.reward) == (None, float(number % 2 == 0))
        assert trajectory.metrics["endpoint/branches"] == trajectory.metrics["endpoint/delivered"] == 1.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "name"), [("weather-alone", WEATHER), ("turns-alone", TURNS), ("turns", TURNS), ("counter", COUNTER)])
def test_servers_are_checked_evaluated_and_trained_on(python: str, kind: str, name: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with env_servers.running(python, "-m", "tests.env_servers.nemo_agents", kind, str(port)) as server:
        form = {"weather-alone": "", "turns-alone": "?form=gymnasium"}.get(kind, f"?form=agent&model_port={port}")
        runs_everywhere(tmp_path, f"nemo-gym:http://127.0.0.1:{server.port}{form}", prompts=data(python, name))
