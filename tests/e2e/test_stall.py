"""A run in which nothing ends any more: the report shows the line at which user code hangs, in another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, train

ENV = """
import asyncio, time
from agentrl import AgentInstance, StepResult, Task

class Hanging(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"What is {i}+1?", id=str(i)) for i in range(100)]

    async def step(self, state):
        if state.task.position == 9:
            await self.ask_the_database()
        if state.task.position == 10:
            while True:  # in an async method: everything in this process stands still
                time.sleep(0.01)  # the line that hangs
        return StepResult(float(len(state.action_text) % 2), terminated=True)

    async def ask_the_database(self):
        await asyncio.sleep(3600)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_report_of_a_stall_shows_where_an_environment_hangs(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENV)
    run = train(
        tmp_path / "run",
        *("--num-steps", "10", "--no-shuffle", "--stall-timeout-s", "8", "--async", *SMALL),
        agent=tmp_path / "env.py",
        timeout_s=200,
    )
    assert run.code == 1
    assert "agentrl: StallError: no group finished" in run.output
    (path,) = (tmp_path / "run").glob("stall-*.txt")
    assert str(path.name) in run.output
    driver, _, rest = path.read_text().partition("== engine-0")
    engine, _, learner = rest.partition("== learner-0")
    assert "train_steps" in driver
    assert "time.sleep(0.01)  # the line that hangs" in engine
    assert "in Hanging.ask_the_database" in engine
    assert "thread MainThread" in learner
