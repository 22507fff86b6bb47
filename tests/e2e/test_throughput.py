"""What makes a run fast must not change what it learns."""

from __future__ import annotations

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
    words = ("--runtime", "local", "--num-steps", "1", *SMALL)
    run = succeeded(train(tmp_path / "run", *words, agent=tmp_path / "env.py"))
    assert run.metrics[0]["engine/cached_prompt_share"] > 0.8, run.metrics[0]
    assert 0 < run.metrics[0]["engine/kv_usage"] < 1
