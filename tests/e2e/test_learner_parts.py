"""On the real stack a step's first groups are trained while its last is still under way, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, succeeded, train
from tests.e2e.test_resume import kill_at, weights
from tests.e2e.test_train import untimed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PARTS = ("--advantage-estimator", "rloo", "--learner-parts", "4", *SMALL)
LAST_IS_LATE = """
import asyncio, itertools
from agentrl import AgentInstance, StepResult, Task

made = itertools.count()

class Late(AgentInstance):
    def __init__(self):
        self.late = next(made) // 4 % 4 == 3  # the last of four groups of four episodes

    @classmethod
    def tasks(cls):
        return [Task(f"{number}+1?", id=str(number)) for number in range(40)]

    async def step(self, state):
        await asyncio.sleep(1.5 if self.late else 0.0)
        return StepResult(float(len(state.action_text) % 2), terminated=True)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "late.py"
    path.write_text(LAST_IS_LATE)
    return path


def test_a_synchronous_run_trains_early_and_is_the_same_after_a_kill(tmp_path: Path, agent: Path) -> None:
    words = ("--runtime", "local", "--num-steps", "5", "--save-every", "2", *PARTS)
    once = succeeded(train(tmp_path / "once", *words, agent=agent))
    assert all(row["time/train_early_s"] > 0.5 * row["time/train_s"] for row in once.metrics), once.metrics
    assert kill_at(tmp_path / "killed", 3, 0.8, *words, agent=agent) == 3  # step 4 waits 1.5 s for its last group; its others are trained
    again = succeeded(train(tmp_path / "killed", "--resume", "auto", *words, agent=agent))
    assert weights(again) == weights(once)
    assert untimed(again) == untimed(once)
    whole = succeeded(train(tmp_path / "whole", *words, "--learner-parts", "1", "--num-steps", "1", agent=agent))
    for name in ("reward/mean", "loss", "grad_norm", "entropy", "tokens/trained"):
        assert once.metrics[0][name] == pytest.approx(whole.metrics[0][name], rel=1e-3, abs=1e-5), name


def test_an_asynchronous_run_with_ray_trains_every_group_once(tmp_path: Path, agent: Path) -> None:
    run = succeeded(train(tmp_path / "run", "--runtime", "ray", "--async", "--num-steps", "4", *PARTS, agent=agent))
    assert all("time/train_early_s" in row for row in run.metrics)
    assert max(row["staleness/max"] for row in run.metrics) <= 1
    assert (run.summary["ledger"]["trained"], run.summary["ledger"]["in_flight"]) == (16, 0)
