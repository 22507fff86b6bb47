"""Training the bundled model on environment servers: tools of a NeMo Gym-like server, a game on OpenEnv."""

from __future__ import annotations

import json
import operator
import statistics
from pathlib import Path

import pytest

from tests import env_servers
from tests.e2e.runs import Run, succeeded, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SYSTEM = 'Call {"tool":"add|sub|mul","args":[a,b]}, then answer.'  # what the bundled model knows
SIGNS = {"add": ("+", operator.add), "sub": ("-", operator.sub), "mul": ("*", operator.mul)}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
FLAGS = ("--runtime", "local", "--groups-per-step", "8", "--n-samples-per-prompt", "8", "--learning-rate", "5e-4", "--seed", "1")

CALCULATOR = """
from agentrl import NemoGymEnv

class Calculator(NemoGymEnv):
    url = "http://127.0.0.1:{port}"
    tool_prompt = ""  # the rows say it themselves
"""
WORDS = """
def words(observation):
    return observation["text"].replace("A number", "Guess my number").rstrip(".").replace("15", "15. I say higher or lower.").replace(
        "Higher", "higher").replace("Lower", "lower")
"""


def rewards(run: Run) -> list[float]:
    return [row["reward/mean"] for row in run.metrics]


def test_tools_of_a_nemo_gym_server(tmp_path: Path) -> None:
    tools = [{"type": "function", "name": name, "parameters": NUMBERS} for name in SIGNS]
    rows = [
        {
            "responses_create_params": {
                "input": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{a}{sign}{b}=?"}],
                "tools": tools,
            },
            "initial_count": 0,
            "expected_count": 0,
            "answer": compute(a, b),
        }
        for sign, compute in SIGNS.values()
        for a in range(10)
        for b in range(10)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with env_servers.module("nemo_like") as server:
        file = tmp_path / "calculator_server.py"
        file.write_text(CALCULATOR.format(port=server.port))
        flags = (*FLAGS, "--prompts", str(tmp_path / "rows.jsonl"), "--num-steps", "30", "--max-new-tokens", "32", "--async")
        run = succeeded(train(tmp_path / "run", *flags, agent=file, timeout_s=800))
    gained = rewards(run)
    print("reward", [round(value, 2) for value in gained])
    assert statistics.fmean(gained[-5:]) > statistics.fmean(gained[:5]) + 0.1
    assert run.metrics[-1]["env/num_calls"] > 0.9


def test_a_game_on_an_openenv_server(tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text(WORDS)
    with env_servers.module("open_env", "128", "15") as server:
        agent = f"openenv:ws://127.0.0.1:{server.port}?formatter={tmp_path}/text.py:words"
        run = succeeded(train(tmp_path / "run", *FLAGS, "--num-steps", "30", "--max-new-tokens", "8", agent=agent, timeout_s=800))
    gained = rewards(run)
    print("reward", [round(value, 2) for value in gained])
    assert statistics.fmean(gained[-5:]) > statistics.fmean(gained[:5]) + 0.1
