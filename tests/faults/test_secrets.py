"""A secret in the environment of the command stays there: it is in no file, no message, and in no environment's process."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import SMALL, Run, succeeded
from tests.e2e.test_endings import family
from tests.faults.report import Saw
from tests.faults.support import disturbed, ended, until

NAMES = ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_REWARD_SERVER_KEY")

ENV = """
import os
from agentrl import AgentInstance, StepResult, Task

class Curious(AgentInstance):
    '''Shows its whole environment to whoever reads the records, and to the log.'''

    @classmethod
    def tasks(cls):
        return [Task(f"Say {i}.", label=i) for i in range(20)]

    def step(self, state):
        print(os.environ)
        if state.turn == 0 and state.label % 5 == 0:
            raise ValueError(f"all I know: {dict(os.environ)}")
        told = " ".join(f"{k}={v}" for k, v in os.environ.items())[:300]
        return StepResult(float(len(state.action_text) % 2), told, terminated=state.turn == 1)
"""


def holding(folder: Path, canary: bytes) -> list[str]:
    """Files under a folder that hold the secret."""
    found = []
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink() and canary in path.read_bytes():
                found.append(str(path.relative_to(folder)))
        except OSError:
            continue
    return found


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.row(24, "5 secrets in the environment of a run on Ray whose isolated environment prints and records all it can see")
def test_secrets_stay_where_they_are(tmp_path: Path, saw: Saw) -> None:
    canary = f"canary{secrets.token_hex(12)}"
    agent, run_dir = tmp_path / "curious.py", tmp_path / "run"
    agent.write_text(ENV)
    words = ("--agent", str(agent), "--run-dir", str(run_dir), "--num-steps", "6", "--save-every", "2", "--record", "all", "--async")
    words += ("--env-isolation", "process", "--max-turns", "2", "--max-failure-rate", "0.9", *SMALL)
    with disturbed(*words, env=dict.fromkeys(NAMES, canary)) as process:
        until(process, lambda: (run_dir / "metrics.jsonl").exists() and bool((run_dir / "metrics.jsonl").stat().st_size))
        sessions = session_folders(process.pid)
        assert sessions
        copies = [Path(shutil.copytree(folder, tmp_path / f"session{i}", ignore=sockets)) for i, folder in enumerate(sessions)]
        isolated = [child for child in family(process.pid) if "agentrl.env.isolation" in command_line(child)]
        assert isolated
        seen_by_environments = [canary in str(environment(child)) for child in isolated]
        output = ended(process, 300)
    run = succeeded(Run(process.returncode, output, run_dir))
    records = (run_dir / "trajectories.jsonl").read_text()
    assert "all I know" in records  # it could speak, and had nothing to tell
    assert "PATH=" in records
    assert not any(seen_by_environments)
    assert canary not in output
    files = holding(run_dir, canary.encode())
    logs = [name for copy in copies for name in holding(copy, canary.encode())]
    assert files == []
    assert logs == []
    count = sum(path.is_file() for path in run_dir.rglob("*"))
    saw(f"in none of the {count} files of the run (config, metrics, records, TensorBoard, checkpoints, model), in no file of Ray's")
    saw(f"in no output, and not in the {len(isolated)} processes of environments that were looked at")
    assert run.summary["ledger"]["in_flight"] == 0


def session_folders(pid: int) -> list[Path]:
    """Where Ray keeps the files of a run's private cluster."""
    words = {word for child in family(pid) for word in command_line(child).split() if "--temp-dir=" in word or "--temp_dir=" in word}
    return [Path(folder) for folder in {word.split("=")[-1] for word in words} if Path(folder).is_dir()]


def sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (os.path.isfile(f"{folder}/{name}") or os.path.isdir(f"{folder}/{name}"))]


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}
