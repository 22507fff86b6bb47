"""Oversampled groups in worker processes of their own: the slow ones are ended there, not only forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import succeeded, train

ENV = """
import asyncio, os
from agentrl import AgentInstance, StepResult, Task

class Sleepy(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"What is {i}+1?", label=i % 5 == 2, id=str(i)) for i in range(10)]

    live = 0

    async def step(self, state):
        if not state.label:
            return StepResult(float(len(state.action_text) % 2), terminated=True)
        Sleepy.live += 1
        open(os.environ["SLEEPERS"], "a").write(str(Sleepy.live))
        try:
            await asyncio.sleep(600)
        finally:
            Sleepy.live -= 1
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_steps_do_not_wait_for_the_slowest(tmp_path: Path, runtime: str) -> None:
    (tmp_path / "env.py").write_text(ENV)
    flags = ("--num-steps", "3", "--groups-per-step", "4", "--n-samples-per-prompt", "2", "--max-new-tokens", "4", "--oversample", "0.25")
    sleepers = tmp_path / "sleepers"
    run = succeeded(
        train(
            tmp_path / "run",
            *(*flags, "--no-shuffle", "--runtime", runtime),
            agent=tmp_path / "env.py",
            env={"SLEEPERS": str(sleepers)},
            timeout_s=200,
        )
    )
    last = run.metrics[-1]
    assert (last["ledger/trained"], last["ledger/dropped"], last["dropped/oversampled"], last["ledger/in_flight"]) == (12, 3, 3, 0)
    assert max(row["staleness/max"] for row in run.metrics) == 0
    assert max(sleepers.read_text()) == "2"  # the two members of one group; those of the step before are gone
