"""The viewer's server as a user starts it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.runs import start


@dataclass(frozen=True)
class Served:
    """A server that runs: the page's address, with its token and a slash at the end."""

    address: str


@contextmanager
def serve(folder: Path) -> Iterator[Served]:
    """Run ``agentrl view`` on a folder of runs, or on one run."""
    process = start("view", str(folder), "--no-browser")
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), address + process.stdout.read()
        yield Served(address)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
