"""The environment in docs/forks.md can be forked, and the flags on the page exist."""

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.settings import flag
from agentrl.env.agent import has_snapshots
from tests.unit.rollout.test_forks import asked, engine, read, running

PAGE = (Path(__file__).parents[3] / "docs" / "forks.md").read_text()


@pytest.mark.anyio
async def test_the_example_goes_on_from_its_state(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    async with running(tmp_path, engine(), code, at=1, branches=4) as worker:
        cls: Any = worker._agent.load()
        assert has_snapshots(cls)
        summary, group = await worker.run_group(asked(4))
    assert summary.num_forked == 3
    told = {tuple(map(tuple, read(group, index)[:3])) for index in range(4)}
    assert len(told) == 1  # the roll after the fork is the same for all


def test_flags_on_the_page_exist() -> None:
    assert set(re.findall(r"--[a-z][a-z-]*", PAGE)) <= {flag(name) for name in settings_of(TrainConfig.schema({}))}
