"""The process that ends what a driver left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from agentrl.cluster.reaper import MARK, Reaper, members

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
HOLD = [sys.executable, "-c", "import os, sys, time; file = open(sys.argv[1], 'w'); time.sleep(60)"]

DRIVER = """
import os, subprocess, sys
from agentrl.cluster.reaper import MARK, Reaper
reaper = Reaper(sys.argv[1])
child = subprocess.Popen(sys.argv[2:], start_new_session=True)
print(child.pid, os.environ[MARK], flush=True)
sys.stdin.read()
"""


def wait_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


def test_a_killed_drivers_orphans_and_folder_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    (folder / "logs").mkdir(parents=True)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder), *SLEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    orphan, mark = driver.stdout.readline().split()
    assert psutil.pid_exists(int(orphan))
    deadline = time.monotonic() + 10
    while int(orphan) not in [process.pid for process in members(mark, [])]:  # until it has begun its program
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    assert wait_gone(int(orphan), 10)
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


def test_a_released_reaper_leaves_everything_alone(tmp_path: Path) -> None:
    reaper = Reaper(tmp_path)
    other = subprocess.Popen(SLEEP)  # inherits the mark
    try:
        reaper.release()
        assert MARK not in os.environ
        assert wait_gone(reaper.pid, 5)
        assert other.poll() is None
        assert tmp_path.exists()
    finally:
        other.kill()
        other.wait()


def test_a_process_without_the_mark_belongs_by_its_open_file(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    process = subprocess.Popen([*HOLD, str(tmp_path / "log")], env=environment)
    try:
        deadline = time.monotonic() + 10
        while process.pid not in {found.pid for found in members("no such mark", [str(tmp_path)])} and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.pid in {found.pid for found in members("no such mark", [str(tmp_path)])}
        assert process.pid not in {found.pid for found in members("no such mark", [str(tmp_path / "other")])}
    finally:
        process.kill()
        process.wait()
