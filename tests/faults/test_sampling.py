"""``agentrl sample`` killed with SIGKILL and resumed: every task is in the data set exactly once, as if nothing had happened."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.runs import start
from tests.faults.support import ended, kill, killed_at_the_end, lines, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

SLOW = """
import asyncio

from agentrl import AgentInstance, StepResult, Task


class Slow(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"Say {i}.", label=str(i), id=f"say-{i}") for i in range(40)]

    async def step(self, state):
        await asyncio.sleep(0.3)
        return StepResult(float(len(state.action_text)), terminated=True)
"""
WORDS = ("--select", "all", "--n-samples-per-prompt", "2", "--max-new-tokens", "8", "--engine", "transformers", "--max-num-seqs", "2")


def test_three_kills_and_each_task_exactly_once(tmp_path: Path) -> None:
    env, journal = tmp_path / "slow.py", tmp_path / "out" / "episodes.jsonl"
    env.write_text(SLOW)
    done = 0
    for _ in range(3):
        with killed_at_the_end(start("sample", str(env), *WORDS, "--output", str(journal.parent), "--resume")) as process:
            until(process, lambda done=done: len(lines(journal)) >= done + 5)  # type: ignore[misc]
            kill(process)
        assert not (journal.parent / "data.jsonl").exists()
        done = len(lines(journal))
        journal.open("a").write('{"position": 3, "task_id": "cut sho')  # what a kill in the middle of a line leaves
    assert 15 <= done < 40
    with killed_at_the_end(start("sample", str(env), *WORDS, "--output", str(journal.parent), "--resume")) as process:
        output = ended(process, 300)
    assert process.returncode == 0, output
    assert f"{done} of them done before" in output
    assert Counter(entry["task_id"] for entry in lines(journal)) == {f"say-{index}": 1 for index in range(40)}
    rows = lines(journal.parent / "data.jsonl")
    assert max(Counter(row["task_id"] for row in rows).values()) == 2  # one where an answer is empty
    with killed_at_the_end(start("sample", str(env), *WORDS, "--output", str(tmp_path / "straight"))) as process:
        assert ended(process, 300)
    assert lines(tmp_path / "straight" / "data.jsonl") == rows
