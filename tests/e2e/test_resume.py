"""Killed with SIGKILL and resumed on the real stack, a synchronous run ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import ENVS, SMALL, Run, start, succeeded, train
from tests.e2e.test_train import untimed
from tests.faults.report import Saw

pytestmark = pytest.mark.timeout(900)

LOCAL = ("--runtime", "local", "--save-every", "2", *SMALL)


def kill_after(directory: Path, seconds: float, *args: str) -> bool:
    """Start or continue the run, and kill it this long after its metrics begin to grow; whether it was still running."""
    process = start("train", "--resume", "auto", "--run-dir", str(directory), "--agent", str(ENVS / "arithmetic.py"), *args)
    metrics, deadline = directory / "metrics.jsonl", time.monotonic() + 200
    while not (directory / "config.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    before = metrics.stat().st_size if metrics.exists() else 0
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.stat().st_size > before:
            break
        time.sleep(0.02)
    time.sleep(seconds)
    running = process.poll() is None
    if running:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return running


def weights(run: Run) -> bytes:
    return (run.directory / "model" / "model.safetensors").read_bytes()


def same_after_kills(folder: Path, kills: int, num_steps: int) -> None:
    arguments = (*LOCAL, "--num-steps", str(num_steps))
    once = succeeded(train(folder / "once", *arguments))
    killed = [kill_after(folder / "killed", random.uniform(0.0, 1.5), *arguments) for _ in range(kills)]
    assert sum(killed) > kills / 2  # the last ones may come too late
    again = succeeded(train(folder / "killed", "--resume", "auto", *arguments))
    assert weights(again) == weights(once)
    assert untimed(again) == untimed(once)
    assert again.summary["steps"] == num_steps
    assert not list((folder / "killed" / "checkpoints").glob(".*"))


def test_one_kill_changes_nothing(tmp_path: Path) -> None:
    same_after_kills(tmp_path, 1, 8)


def test_a_signal_saves_and_changes_nothing(tmp_path: Path) -> None:
    arguments = ("--runtime", "local", "--num-steps", "6", *SMALL)
    once = succeeded(train(tmp_path / "once", *arguments))
    process = start("train", "--run-dir", str(tmp_path / "stopped"), "--agent", str(ENVS / "arithmetic.py"), *arguments)
    metrics, deadline = tmp_path / "stopped" / "metrics.jsonl", time.monotonic() + 100
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"continue with: agentrl train --resume {tmp_path / 'stopped'}" in output
    assert time.monotonic() - begin < 30
    done = len(metrics.read_text().splitlines())
    assert 1 <= done < 6
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == [f"step-{done:08d}"]
    resumed = start("train", "--resume", str(tmp_path / "stopped"))
    output, _ = resumed.communicate(timeout=200)
    again = Run(resumed.returncode, output, tmp_path / "stopped")
    assert weights(succeeded(again)) == weights(once)
    assert untimed(again) == untimed(once)


@pytest.mark.faults
@pytest.mark.row(12, "10 times SIGKILL at random points of a synchronous run (real vLLM and DeepSpeed), resumed each time")
def test_ten_kills_change_nothing(tmp_path: Path, saw: Saw) -> None:
    same_after_kills(tmp_path, 10, 30)
    saw("weights and metrics of all 30 steps equal those of the uninterrupted run, byte for byte")
