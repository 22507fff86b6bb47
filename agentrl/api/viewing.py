"""The work of ``agentrl view``: open runs, and serve the page; and links to it in notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.api.background import run_until_signal
from agentrl.core.errors import ConfigError
from agentrl.core.paths import shown_path
from agentrl.inspect.directory import TRAJECTORIES
from agentrl.inspect.foreign import import_file
from agentrl.inspect.listing import is_run
from agentrl.track.html import escaped
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


OPENING_S = 20.0
"""Seconds within which a page must be served."""


def viewer_link(path: Path) -> str:
    """Return a link to the page of a run, which this process serves from now on, and the command that serves it without this process."""
    command = f"<code>agentrl view {escaped(shown_path(path))}</code>"
    try:
        address = _served(path.resolve())
    except (ConfigError, OSError, TimeoutError):
        return f"<div>{command} shows it in the browser.</div>"
    return f'<div><a href="{escaped(address)}" target="_blank">Open in the viewer</a> or, without this kernel, {command}</div>'


@cache
def _served(path: Path) -> str:
    """The address at which a thread of this process serves the page of a run until the process ends."""
    from agentrl.viewer.serve import view

    collection, address = RunCollection(path), Future[str]()

    def serve() -> None:
        try:
            asyncio.run(view(collection, 0, ready=address.set_result))
        except Exception as error:  # of the start: whoever waits for the address is told
            address.set_exception(error)

    threading.Thread(target=serve, name="agentrl-viewer", daemon=True).start()
    return address.result(OPENING_S)
