"""The process that ends a cluster after its driver spares the one that removes containers."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import psutil
import pytest

from agentrl.cluster.reaper import MARK, members
from agentrl.env.sandbox import reaper

PROGRAM = str(reaper.__file__)
WAITS = "print(flush=True); import time; time.sleep(60)"


def starting(*more: str) -> str:
    """A program that starts another, and waits beside it."""
    return f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", {WAITS!r}, *{more!r}], stdout=subprocess.PIPE)
child.stdout.readline()
{WAITS}
"""


@pytest.mark.parametrize(
    ("calls", "ended"),
    [([(WAITS,), (WAITS, PROGRAM)], 1), ([(starting(PROGRAM),)], 1), ([(starting(), PROGRAM)], 0)],
    ids=["beside others", "started by another", "with a process of its own"],
)
def test_the_process_that_removes_containers_is_spared(calls: list[tuple[str, ...]], ended: int) -> None:
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark}
    begun = [psutil.Popen([sys.executable, "-S", "-c", *call], env=env, stdout=subprocess.PIPE) for call in calls]
    try:
        for process in begun:
            process.stdout.readline()
        assert [process.pid for process in members(mark, [])] == [process.pid for process in begun[:ended]]
    finally:
        for process in begun:
            for each in (*process.children(), process):
                each.kill()
            process.communicate()
