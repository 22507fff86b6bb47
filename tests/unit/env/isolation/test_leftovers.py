"""Processes that user code leaves behind in a run of this process."""

from __future__ import annotations

import os
import subprocess
import threading
import time

import pytest

from agentrl.env.isolation import system
from agentrl.env.isolation.leftovers import Leftovers, command_line, listed

pytestmark = pytest.mark.linux  # processes are looked up in /proc

SLEEP = ("sleep", "3600")
DAEMON = ("sh", "-c", "setsid sleep 3599 > /dev/null 2>&1 &")


def ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        return process.wait(timeout=5) < 0
    except subprocess.TimeoutExpired:
        return False


def daemon_ended() -> bool:
    deadline = time.monotonic() + 5
    while "sleep 3599" in map(command_line, system.processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return time.monotonic() < deadline


def test_processes_that_began_since_then_are_ended_and_named(caplog: pytest.LogCaptureFixture) -> None:
    before = subprocess.Popen(SLEEP)
    try:
        leftovers = Leftovers()
        child = subprocess.Popen(SLEEP)
        subprocess.run(DAEMON, check=True)
        leftovers.end()
        assert ended(child)
        assert before.poll() is None
        assert daemon_ended()
        assert "ended 2 processes that the environment had left behind: " in caplog.text
        assert "`sleep 3600`" in caplog.text  # the daemon may still be on its way to being a `sleep`
        leftovers.end()
    finally:
        before.kill()
        before.wait()


def test_a_process_that_is_becoming_a_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows no environment for that moment; one that shows nobody any, as a thread of the kernel, is looked at once."""
    process, other = (subprocess.Popen(SLEEP, env={"NAME": "value"}) for _ in range(2))
    time.sleep(0.1)
    looks: list[int] = []
    reads = system._environment

    def becoming(pid: int) -> list[bytes] | None:
        looks.append(pid)
        if pid == process.pid and looks.count(pid) < 3:
            return []
        return None if pid == os.getppid() else reads(pid)

    monkeypatch.setattr(system, "_environment", becoming)
    try:
        assert system.marked("NAME=value") == {process.pid, other.pid}
        assert looks.count(process.pid) == 3
        assert looks.count(os.getppid()) == 1
        assert system.marked("NAME=val") == system.marked("AME=value") == set()
    finally:
        for begun in (process, other):
            begun.kill()
            begun.wait()


def test_compile_workers_of_torch_are_not_the_environments(caplog: pytest.LogCaptureFixture) -> None:
    """The learner's compiled attention starts them, and they end with what they work for."""
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    leftovers = Leftovers()
    pool = SubprocPool(1)
    try:
        deadline = time.monotonic() + 5
        while "compile_worker" not in command_line(pool.process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)  # until it runs its own program
        leftovers.end()
        assert pool.process.poll() is None
        assert "left behind" not in caplog.text
    finally:
        pool.shutdown()


def test_processes_of_the_main_thread_stay_where_a_program_trains_on_another() -> None:
    made: list[Leftovers] = []
    thread = threading.Thread(target=lambda: made.append(Leftovers()))
    thread.start()
    thread.join()
    own = subprocess.Popen(SLEEP)
    try:
        made[0].end()
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()


def test_equal_command_lines_are_listed_once() -> None:
    lines = ["sleep 9", "python " + "x" * 90, "sleep 9", "a", "b", "c"]
    assert listed(lines) == f"`sleep 9` (2 of them), `python {'x' * 50}...`, `a`, `b`, 1 more"
