"""However a run ends, no process of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import ENVS, SMALL, start
from tests.processes import still_runs

LONG = ("--num-steps", "10000", "--async", *SMALL)


def wait_for_a_step(process: subprocess.Popen[str], directory: Path, seconds: float = 300) -> None:
    """Until the run has written its first metrics."""
    end, path = time.monotonic() + seconds, directory / "metrics.jsonl"
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"no step within {seconds} s"
        time.sleep(0.1)


def family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if still_runs(process)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_signal_ends_a_ray_run_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    process = start("train", "--agent", str(ENVS / "calculator.py"), "--run-dir", str(tmp_path / "run"), *LONG)
    try:
        wait_for_a_step(process, tmp_path / "run")
        children = family(process.pid)
        assert children
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert (tmp_path / "run" / "summary.json").exists()
    assert not running(children)
