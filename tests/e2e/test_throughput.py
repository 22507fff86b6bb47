"""What makes a run fast must not change what it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ENVS, SMALL, Run, succeeded, train
from tests.e2e.test_resume import weights
from tests.e2e.test_train import untimed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SYNC = ("--runtime", "local", "--num-steps", "3", *SMALL)


def learned(run: Run) -> list[dict[str, object]]:
    return [{name: value for name, value in row.items() if name != "engine/cached_prompt_share"} for row in untimed(run)]


def test_a_limit_on_episodes_changes_times_only(tmp_path: Path) -> None:
    free = succeeded(train(tmp_path / "free", *SYNC, agent=ENVS / "calculator.py"))
    held = succeeded(train(tmp_path / "held", *SYNC, "--max-concurrent-episodes", "4", agent=ENVS / "calculator.py"))
    assert max(row["engine/concurrency"] for row in held.metrics) <= 4 < max(row["engine/concurrency"] for row in free.metrics)
    assert learned(held) == learned(free)
    assert weights(held) == weights(free)


def test_later_turns_find_their_context_in_the_cache(tmp_path: Path) -> None:
    """Four turns of a conversation that begins with hundreds of tokens: each later turn has to process its own few tokens only."""
    (tmp_path / "env.py").write_text(
        "from agentrl import AgentInstance, StepResult, Task\n"
        "class Long(AgentInstance):\n"
        "    @classmethod\n"
        "    def tasks(cls):\n"
        "        return [Task(f'{i} ' + 'one two three ' * 40, id=str(i)) for i in range(20)]\n"
        "    async def step(self, state):\n"
        "        return StepResult(float(len(state.action_text) % 2), observation='\\nAnd?\\n', truncated=state.turn == 3)\n"
    )
    words = ("--runtime", "local", "--num-steps", "20", *SMALL)
    run = succeeded(train(tmp_path / "run", *words, agent=tmp_path / "env.py"))
    assert run.metrics[0]["engine/cached_prompt_share"] > 0.8, run.metrics[0]
    assert 0 < max(row["engine/kv_usage"] for row in run.metrics) < 1  # a mean over moments, which a single step may fall between


def test_an_episode_that_never_ends_is_cancelled_and_recorded(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "import asyncio, itertools\n"
        "from agentrl import AgentInstance, StepResult, Task\n"
        "made = itertools.count()\n"
        "class Sleepy(AgentInstance):\n"
        "    def __init__(self):\n"
        "        self.sleeps = next(made) % 4 == 3\n"
        "    @classmethod\n"
        "    def tasks(cls):\n"
        "        return [Task(f'{i}+1?', id=str(i)) for i in range(20)]\n"
        "    async def step(self, state):\n"
        "        if self.sleeps:\n"
        "            await asyncio.sleep(600)\n"
        "        return StepResult(float(len(state.action_text) % 2), terminated=True)\n"
    )
    words = ("--runtime", "local", "--num-steps", "2", "--group-quorum", "0.75", "--record", "all", "--step-timeout-s", "900", *SMALL)
    run = succeeded(train(tmp_path / "run", *words, agent=tmp_path / "env.py"))
    assert [row["group/withheld"] for row in run.metrics] == [4, 4]
    assert all(row["group/withheld_share"] == 0.25 and row["failures/rate"] == 0 for row in run.metrics)
    assert run.metrics[-1]["episode/count"] == 12
    records = [json.loads(line) for line in (run.directory / "trajectories.jsonl").read_text().splitlines()]
    stragglers = [record for record in records if record["status"] == "cancelled_straggler"]
    assert len(stragglers) == 8
    assert all("the median of the 3 that ended is" in record["error"] for record in stragglers)
    assert "episode failed" not in run.output
