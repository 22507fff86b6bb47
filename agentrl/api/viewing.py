"""The work of ``agentrl view``: open runs, and serve the page."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl.api.background import run_until_signal
from agentrl.inspect.directory import TRAJECTORIES
from agentrl.inspect.foreign import import_file
from agentrl.inspect.listing import is_run
from agentrl.viewer.runs import RunCollection


@contextlib.contextmanager
def open_library(path: Path) -> Iterator[RunCollection]:
    """Open a run, a folder of runs, or a file of episodes that another system wrote, which becomes a run in a temporary folder.

    Raises:
        ConfigError: If there is nothing to show.
    """
    if not path.is_file():
        yield RunCollection(path)
    elif path.name == TRAJECTORIES and is_run(path.parent):
        yield RunCollection(path.parent)
    else:
        with tempfile.TemporaryDirectory(prefix="agentrl-view-") as folder:
            run = Path(folder) / path.stem
            run.mkdir()
            import_file(path, run)
            yield RunCollection(run)


def run_viewer(collection: RunCollection, port: int, ready: Callable[[str], Any]) -> None:
    """Serve until a signal comes; `ready` is told the address.

    Raises:
        ConfigError: If the port is taken.
    """
    from agentrl.viewer.serve import view

    with contextlib.suppress(KeyboardInterrupt):
        run_until_signal(view(collection, port, ready=ready))
