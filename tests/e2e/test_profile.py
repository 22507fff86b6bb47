"""`agentrl profile` says where the time of a run went, and how fast it could be at best; here such runs are made."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.e2e.runs import ROOT, Run, command, succeeded, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TURNS, WAITS_S = 2, (0.4, 0.8, 1.2)

WAITS = f"""
import asyncio

from agentrl import AgentInstance, StepResult, Task


class Waits(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"{{i}}+1?", id=str(i), metadata={{"wait_s": {WAITS_S}[i % 3]}}) for i in range(60)]

    async def step(self, state):
        await asyncio.sleep(state.task.metadata["wait_s"])
        over = state.turn == {TURNS - 1}
        return StepResult(float(len(state.action_text) % 2), "" if over else "And?", terminated=over)
"""

STEPS = 20
SIZES = ("--groups-per-step", "4", "--n-samples-per-prompt", "4", "--max-new-tokens", "24")


def run_waits(directory: Path, max_staleness: int) -> Run:
    """Train in the environment that waits; the line, whose groups come in bursts, is filled once and then twice again."""
    (file := directory.parent / "waits.py").write_text(WAITS)
    words = ("--max-staleness", str(max_staleness), "--num-steps", str(max(STEPS, 3 * (max_staleness + 1))), "--record", "all")
    return succeeded(train(directory, "--runtime", "local", *SIZES, *words, agent=file))


def profile_of(run: Run, *args: str) -> dict[str, Any]:
    """What the command says of a run."""
    done = subprocess.run(command("profile", str(run.directory), "--json", *args), cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    profile: dict[str, Any] = json.loads(done.stdout)
    return profile


def steady_step_s(run: Run, max_staleness: int) -> float:
    """Seconds per step once the line is full."""
    return fmean(row["time/step_s"] for row in run.metrics[max_staleness + 1 :])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_waits(tmp_path_factory.mktemp("recorded") / "run", 1)


def test_the_time_of_the_environment_is_the_one_it_waits(recorded: Run) -> None:
    profile = profile_of(recorded)
    assert profile["time"]["episode"]["env_s"] == pytest.approx(TURNS * fmean(WAITS_S), rel=0.15)
    assert profile["measured"]["step_s"] == pytest.approx(steady_step_s(recorded, 1), rel=1e-6)
    assert profile["bound"]["reached"] <= 1.0


def test_a_synchronous_run_could_be_as_fast_as_its_longer_side(recorded: Run, tmp_path: Path) -> None:
    run = run_waits(tmp_path / "run", 0)
    profile = profile_of(run)
    bound = profile["bound"]
    assert bound["synchronous_s"] == pytest.approx(steady_step_s(run, 0), rel=0.1)
    assert bound["generate_s"] >= TURNS * max(WAITS_S)  # a step waits for its slowest group
    assert "--async hides at most" in profile["notes"][-1]
    assert steady_step_s(recorded, 1) < 0.9 * steady_step_s(run, 0)
