"""The work of ``agentrl view``: open runs, and serve the page."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl.api.background import run_until_signal
from agentrl.viewer.runs import Library


@contextlib.contextmanager
def open_library(path: Path) -> Iterator[Library]:
    """Open a run, or a folder of runs.

    Raises:
        ConfigError: If there is nothing to show.
    """
    yield Library(path)


def run_viewer(library: Library, port: int, ready: Callable[[str], Any]) -> None:
    """Serve until a signal comes; `ready` is told the address.

    Raises:
        ConfigError: If the port is taken.
    """
    from agentrl.viewer.serve import view

    with contextlib.suppress(KeyboardInterrupt):
        run_until_signal(view(library, port, ready=ready))
