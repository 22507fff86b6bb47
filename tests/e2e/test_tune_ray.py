"""Ranks of training on given data on a Ray cluster: the weights of local ranks, signals, a lost rank, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.assets import tiny_model_path
from agentrl.core.tokenizers import load_tokenizer
from agentrl.tune.directory import CHECKPOINTS, latest_checkpoint
from tests.e2e.runs import ROOT, start
from tests.e2e.test_endings import family, running
from tests.faults.raylets import raylets
from tests.faults.support import ended, killed_at_the_end, until, workers_of
from tests.learner_support import untimed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DATA = ROOT / "examples" / "tune" / "pairs.jsonl"
SHORT = ["--num-steps", "4", "--batch-size", "8", "--eval-size", "8", "--save-every", "2", "--no-tensorboard", "--learning-rate", "1e-3"]


def finished(process: subprocess.Popen[str]) -> str:
    with killed_at_the_end(process):
        output = ended(process, 300)
    assert process.returncode == 0, output
    return output


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


def step_of(run_dir: Path) -> int:
    path = latest_checkpoint(run_dir / CHECKPOINTS)
    return int(path.name.rpartition("-")[2]) if path else 0


def cluster_of(process: subprocess.Popen[str]) -> tuple[list[psutil.Process], set[str]]:
    """Processes of a private cluster, and its folder."""
    children = family(process.pid)
    words = [word for child in children if psutil.pid_exists(child.pid) for word in child.cmdline()]
    return children, {word.split("=")[-1] for word in words if word.startswith(("--temp-dir=", "--temp_dir="))}


def nothing_is_left(children: list[psutil.Process], folders: set[str], seconds: float = 15.0) -> None:
    assert children
    assert folders
    end = time.monotonic() + seconds
    while (running(children) or any(map(os.path.exists, folders))) and time.monotonic() < end:
        time.sleep(0.2)
    assert not running(children)
    assert not [folder for folder in folders if os.path.exists(folder)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_on_ray_give_the_weights_of_local_ranks(num_ranks: int, tmp_path: Path) -> None:
    words, env = ["dpo", "--data", str(DATA), *SHORT, "--num-ranks", str(num_ranks)], {"OMP_NUM_THREADS": "1"}
    finished(start(*words, "--run-dir", str(tmp_path / "local"), env=env))
    process = start(*words, "--run-dir", str(tmp_path / "ray"), "--runtime", "ray", env=env)
    until(process, lambda: (tmp_path / "ray" / "metrics.jsonl").exists())
    children, folders = cluster_of(process)
    output = finished(process)
    assert "step 4/4" in output
    assert output.count("held out   ") == 1
    for path in ("local", "ray"):
        assert [row["step"] for row in untimed(tmp_path / path)] == [0, 1, 2, 3, 4]
    assert untimed(tmp_path / "ray") == untimed(tmp_path / "local")
    assert weights(tmp_path / "ray") == weights(tmp_path / "local")
    assert (tmp_path / "ray" / "rows.jsonl").read_text() == (tmp_path / "local" / "rows.jsonl").read_text()
    launched = json.loads((tmp_path / "ray" / "launches.jsonl").read_text().splitlines()[0])
    assert launched["command"].startswith("agentrl dpo --data")
    nothing_is_left(children, folders)


def test_a_lost_rank_and_a_signal_end_a_run_that_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The run is resumed without Ray in the end."""
    env = {"OMP_NUM_THREADS": "1"}
    words = ["dpo", "--data", str(DATA), *SHORT, "--num-steps", "60", "--num-ranks", "2"]
    once, broken = tmp_path / "once", tmp_path / "broken"
    finished(start(*words, "--run-dir", str(once), env=env))
    with killed_at_the_end(start(*words, "--run-dir", str(broken), "--runtime", "ray", env=env)) as process:
        until(process, lambda: step_of(broken) > 0)
        children, folders = cluster_of(process)
        victims = sorted(workers_of(process.pid, "LearnerActor"), key=lambda victim: victim.create_time())
        assert len(victims) == 2
        victims[-1].kill()
        output = ended(process, 90)
    assert process.returncode == 1, output
    assert "is gone" in output
    assert "Traceback" not in output
    nothing_is_left(children, folders)
    killed = step_of(broken)
    with killed_at_the_end(start("dpo", "--resume", str(broken), env=env)) as process:
        until(process, lambda: step_of(broken) > killed)
        children, folders = cluster_of(process)
        assert workers_of(process.pid, "LearnerActor")  # the settings of the run say so
        process.send_signal(signal.SIGINT)
        output = ended(process, 60)
    assert process.returncode == 130, output
    assert "finishing the step under way" in output
    assert json.loads((broken / "summary.json").read_text())["status"] == "interrupted"
    nothing_is_left(children, folders)
    assert killed < step_of(broken) < 60
    finished(start("dpo", "--resume", str(broken), "--runtime", "local", env=env))
    assert untimed(broken) == untimed(once)
    assert weights(broken) == weights(once)


def test_a_driver_that_is_killed_leaves_nothing_and_a_refusal_of_the_ranks_is_one_error(tmp_path: Path) -> None:
    words = ["dpo", "--data", str(DATA), *SHORT, "--num-steps", "1000", "--run-dir", str(tmp_path / "run"), "--runtime", "ray"]
    with killed_at_the_end(start(*words)) as process:
        until(process, lambda: step_of(tmp_path / "run") > 0)
        children, folders = cluster_of(process)
        process.kill()
        process.communicate()
    nothing_is_left(children, folders, seconds=40)
    (tmp_path / "broken").mkdir()
    for name, text in (("config.json", '{"model_type": "llama", "vocab_size": 512}'), ("model.safetensors", "none")):
        (tmp_path / "broken" / name).write_text(text)
    load_tokenizer(str(tiny_model_path())).save_pretrained(tmp_path / "broken")
    process = start(*words[:3], "--model", str(tmp_path / "broken"), "--run-dir", str(tmp_path / "other"), "--runtime", "ray")
    with killed_at_the_end(process):
        output = ended(process, 90)
    assert process.returncode == 2, output
    assert "cannot be trained" in output
    assert "Traceback" not in output


def test_ranks_join_a_cluster_of_two_machines(tmp_path: Path) -> None:
    """Started elsewhere, with relative paths."""
    (tmp_path / "pairs.jsonl").write_bytes(DATA.read_bytes())
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "agentrl", "dpo", "--data", "pairs.jsonl", *SHORT, "--num-ranks", "2"]
    named: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, **loopback}, "text": True, "stdout": subprocess.PIPE}
    named |= {"stderr": subprocess.STDOUT, "start_new_session": True}
    with raylets(1, 1) as cluster:
        finished(subprocess.Popen([*words, "--run-dir", "joined", "--ray-address", cluster.address], **named))
        assert cluster.actors("127.0.0.1") == cluster.actors("127.0.0.2") == []
    finished(subprocess.Popen([*words, "--run-dir", "local"], **named))
    assert untimed(tmp_path / "joined") == untimed(tmp_path / "local")
    assert weights(tmp_path / "joined") == weights(tmp_path / "local")
