"""The example in docs/isolation.md plays, in this process and in one of its own, and its flags exist."""

import re
from pathlib import Path

import pytest

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.settings import flag
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation.pool import open_sessions
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.plan import IsolationConfig
from agentrl.suites.load import load_agent
from tests.unit.env.isolation.support import state

PAGE = (Path(__file__).parents[3] / "docs" / "isolation.md").read_text()


@pytest.mark.anyio
@pytest.mark.parametrize("process", [None, ProcessLimits()])
async def test_the_example_plays(process: ProcessLimits | None, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "example.py"
    path.write_text(code)
    agent = load_agent(str(path))
    sessions = open_sessions(agent, EnvLimits(process=process))
    await sessions.start()
    session, task = sessions.session(), agent.load().tasks()[12]
    await session.reset(task, 1)
    assert (await session.step(state("144", task=task))).reward == 1.0
    await session.close()
    await sessions.close()


def test_flags_and_defaults_are_those_of_the_schema() -> None:
    used = set(re.findall(r"--env-[a-z-]*", PAGE))
    assert used == {flag(name) for name, item in settings_of(TrainConfig).items() if item.section == "isolation"}
    for name, default in re.findall(r"^\| `--(env-[a-z-]+)` \| (\d+) \|", PAGE, re.MULTILINE):
        assert float(default) == getattr(IsolationConfig(), name.replace("-", "_"))
