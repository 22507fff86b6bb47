"""Demonstrations of scripted policies: chats as `agentrl sft` takes them, of episodes that earned 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "demonstrations.py"


def written(folder: Path, agent: str, number: int) -> list[list[dict[str, str]]]:
    out = folder / "chats.jsonl"
    subprocess.run([sys.executable, str(SCRIPT), agent, str(number), str(out)], check=True, cwd=ROOT, capture_output=True)
    return [json.loads(line)["messages"] for line in out.read_text().splitlines()]


def test_the_chats_are_those_of_the_scripted_policy(tmp_path: Path) -> None:
    chats = written(tmp_path, "envs/service_desk.py:ServiceDesk", 5)
    assert len(chats) == 5
    for chat in chats:
        roles = [message["role"] for message in chat]
        assert (roles[:3], roles[-1]) == (["system", "user", "assistant"], "assistant")
        assert chat[2]["content"] == "Your number and code?"
        assert json.loads(chat[4]["content"])["tool"] == "order"
        assert chat[5]["role"] == "tool"


def test_only_episodes_that_earned_1_are_written(tmp_path: Path) -> None:
    file = tmp_path / "weak.py"
    file.write_text(
        "from agentrl import AgentInstance, StepResult, Task\n\n\n"
        "class Weak(AgentInstance):\n"
        "    @classmethod\n"
        "    def tasks(cls):\n"
        "        return [Task(f'Say {number}.', label=number) for number in range(4)]\n\n"
        "    def solve(self, state):\n"
        "        return '2'\n\n"
        "    def step(self, state):\n"
        "        return StepResult(float(state.action_text == str(state.label)), terminated=True)\n"
    )
    assert written(tmp_path, f"{file}:Weak", 4) == [[{"role": "user", "content": "Say 2."}, {"role": "assistant", "content": "2"}]]
