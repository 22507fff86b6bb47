"""Environment servers as processes of their own, on free ports of loopback."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_S = 60.0


@dataclass
class Process:
    """A server that listens on `port`."""

    process: subprocess.Popen[str]
    port: int

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def running(*command: str) -> Iterator[Process]:
    """Start a server whose first line of output is its port, and kill it in the end."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Process(process, _port(process))
        finally:
            process.kill()


@contextlib.contextmanager
def module(name: str, *args: str) -> Iterator[Process]:
    """Start ``python -m tests.env_servers.NAME``."""
    with running(sys.executable, "-m", f"tests.env_servers.{name}", *args) as process:
        yield process


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if select.select([process.stdout], [], [], 0.2)[0]:
            line = process.stdout.readline()
            if line.startswith("port "):
                return int(line.split()[1])
    raise RuntimeError(f"the server did not start: {process.args}, exit code {process.poll()}")
