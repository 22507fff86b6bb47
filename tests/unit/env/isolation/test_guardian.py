"""A guardian ends what its command leaves behind, however the command ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import still_runs

pytestmark = pytest.mark.linux  # orphans are adopted on Linux only

COMMAND = """
import os, signal, subprocess, sys, time
from agentrl.env.isolation import guardian
guardian.GRACE_S = 0.3
guardian.stand_by(gently={gently})
subprocess.run(["sh", "-c", "setsid sleep 3600 > /dev/null 2>&1 &"])
if not os.fork():
    os.setsid()
    time.sleep(3600)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
{work}
"""


def begun(work: str, *, gently: bool = True) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A guarded command with a daemon and a forked copy of itself, and its processes."""
    text = COMMAND.format(gently=gently, work=work)
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, bufsize=1
    )
    assert process.stdout is not None
    command = int(process.stdout.readline())
    assert command != process.pid
    below = psutil.Process(process.pid).children(recursive=True)
    deadline = time.monotonic() + 5
    while len(below) < 3 and time.monotonic() < deadline:  # until the daemon has lost its parents
        time.sleep(0.02)
        below = psutil.Process(process.pid).children(recursive=True)
    return process, sorted(below, key=lambda found: found.pid != command)


def all_ended(processes: list[psutil.Process]) -> bool:
    _, left = psutil.wait_procs(processes, timeout=5)
    return not any(map(still_runs, left))


ENDS = {
    "returns": ("sys.exit(3)", 3, "agentrl: ended 2 processes that the command had left behind"),
    "killed": ("time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "the command was ended by SIGKILL; ended 2 proc"),
}


@pytest.mark.parametrize("name", ["returns", pytest.param("killed", marks=pytest.mark.slow)])
def test_nothing_is_left_and_it_is_said(name: str, tmp_path: Path) -> None:
    work, code, said = ENDS[name]
    go = tmp_path / "go"  # the command ends when the daemon has lost its parents, however busy the machine is
    process, below = begun(f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n{work}")
    go.touch()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert said in errors
    assert "`sleep 3600`" in errors
    assert all_ended(below)


def test_a_signal_is_handed_on() -> None:
    process, below = begun("while True: time.sleep(0.1)")  # Python sleeps on if a signal comes just before it falls asleep
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 5
    assert all_ended(below)


@pytest.mark.slow
def test_a_guardian_that_is_told_to_end_kills_a_command_that_does_not_hear() -> None:
    process, below = begun("signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)", gently=False)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert all_ended(below)


@pytest.mark.slow
def test_a_command_does_not_outlive_its_guardian() -> None:
    process, below = begun("time.sleep(60)")
    process.kill()
    process.wait(timeout=30)
    try:
        assert all_ended(below[:1])
    finally:
        for left in below[1:]:
            left.kill()
        process.communicate()


def test_a_command_that_leaves_nothing_ends_at_once_and_without_a_word() -> None:
    text = "import sys; from agentrl.env.isolation.guardian import stand_by; stand_by(); sys.exit(4)"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (4, "", "")
