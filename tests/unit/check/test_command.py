"""``agentrl check`` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.check.support import BROKEN

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "vllm", "ray", "deepspeed")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentrl", "check", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_a_sound_environment_passes() -> None:
    done = run("envs/arithmetic.py", "--episodes", "4")
    assert done.returncode == 0, done.stderr
    assert "0 errors, 0 warnings" in done.stdout.splitlines()[-1]
    for words in ("Arithmetic (arithmetic.py), 155 tasks", "Rewards by policy", "Time per call", "Best constant answer", "context 1024"):
        assert words in done.stdout


def test_a_broken_environment_fails_with_a_remedy_and_code() -> None:
    done = run(f"{BROKEN}/bad_results.py:StepRaisesOnText", "--fix-hints", "--episodes", "2")
    assert done.returncode == 1
    assert "error step-raises: step raises for something that a model may write" in done.stdout
    assert "bad_results.py: StepRaisesOnText.step: raised ValueError: could not convert string to float" in done.stdout
    assert "guess = int(state.action_text)" in done.stdout


def test_json() -> None:
    done = run(f"{BROKEN}/bad_tasks.py:SameTaskTwice", "--json", "--episodes", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["counts"]["warning"] == 1
    (warning,) = (finding for finding in report["findings"] if finding["severity"] == "warning")
    assert warning["id"] == "tasks-duplicate"
    assert warning["where"] == "bad_tasks.py: SameTaskTwice.tasks"
    assert {row["policy"] for row in report["policies"]} >= {"label", "random text", "empty", "long", "control tokens"}


def test_a_bad_request() -> None:
    for words, message in (
        (("no/such.py",), "no such file"),
        (("envs/arithmetic.py", "--recorded", "no/such/run"), "--recorded"),
        ((f"{BROKEN}/bad_text.py:RawWithoutTemplate", "--prompts", "no/such.jsonl"), "no/such.jsonl"),
        (("envs/arithmetic.py", "--episodes", "0"), "episodes"),
    ):
        done = run(*words)
        assert done.returncode == 2, done.stdout
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_recorded_answers_are_given_again(tmp_path: Path) -> None:
    turn = {"text": "19<|end|>"}
    records = [{"task": {"id": f"{a}+{b}"}, "reward": 1.0, "turns": [turn]} for a in range(10) for b in range(10)]
    (tmp_path / "trajectories.jsonl").write_text("\n".join(map(json.dumps, records)))
    done = run("envs/arithmetic.py", "--recorded", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    (row,) = (row for row in json.loads(done.stdout)["policies"] if row["policy"] == "recorded")
    assert row["episodes"] > 0
    assert row["failed"] == 0


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "spy.py"
    names = repr(HEAVY)
    file.write_text(
        "import sys\nfrom agentrl import AgentInstance, StepResult, Task\n\n\nclass Spy(AgentInstance):\n"
        "    @classmethod\n    def tasks(cls):\n        return [Task(f'Say {n}', label=str(n)) for n in range(4)]\n\n"
        f"    def step(self, state):\n        loaded = [name for name in {names} if name in sys.modules]\n"
        "        assert not loaded, loaded\n        return StepResult(float(state.action_text == state.label), terminated=True)\n"
    )
    done = run(str(file), "--episodes", "2")
    assert done.returncode == 0, done.stdout
