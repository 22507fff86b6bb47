"""``agentrl view``: runs, episodes and tokens in the browser, while they are made or later."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.words import command_of, read, word
from agentrl.core.errors import ConfigError
from agentrl.core.operating_system import on_linux
from agentrl.core.settings import Port

REDIRECT_S = 20.0
"""Seconds that a browser has to read the file that leads to the page."""


@dataclass(frozen=True, kw_only=True)
class ViewArgs:
    """Show runs in the browser: curves, steps, groups, episodes and every token. Only reads; Ctrl-C ends it."""

    run: str = "runs"
    """Directory of a run, which may still be running; a folder of runs; or a file of episodes of another system."""
    port: Port = 0
    """Port on 127.0.0.1. 0: a free one."""
    html: Path | None = None
    """Write the page into this one file, which opens without a server, in place of serving."""
    episode: tuple[str, ...] = ()
    """With --html: these episodes."""
    step: tuple[int, ...] = ()
    """With --html: these steps with their episodes. Without --episode and --step: the whole run, if it is small."""
    browser: bool = True
    """Open the page in a browser, where there is one."""


VIEW = command_of("view", ViewArgs, word("run", "RUN|FOLDER|FILE", required=False))


def main(words: list[str]) -> int:
    """Run the command with the words after ``view``; serves until a signal comes, and the exit code is 0 then."""
    args: ViewArgs = read(VIEW, words)
    from agentrl.api.viewing import open_library, run_viewer

    if (args.episode or args.step) and args.html is None:
        raise ConfigError("--html", None, "is missing: --episode and --step say what one file shows", "Add --html OUT.")
    with open_library(Path(args.run).expanduser()) as collection:
        if args.html is not None:
            from agentrl.viewer.collect import write_page

            size = write_page(collection, args.html, episodes=args.episode, steps=args.step)
            sys.stdout.write(f"{args.html} written, {size / 1e6:.1f} MB; a browser opens it without a server\n")
            return 0
        run_viewer(collection, args.port, lambda address: _ready(address, browser=args.browser))
    return 0


def _ready(address: str, *, browser: bool) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    if browser and _has_browser():
        _open(address)


def _open(address: str) -> None:
    """Open the page by a file that leads there, because other users of the machine see the arguments of a browser's process."""
    handle, name = tempfile.mkstemp(prefix="agentrl-view-", suffix=".html")  # readable by this user alone
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0; url={address}">')
    path = Path(name)
    # The file holds the secret of the page, so it also goes away when the command ends before the timer.
    atexit.register(path.unlink, missing_ok=True)
    webbrowser.open(path.as_uri())
    timer = threading.Timer(REDIRECT_S, path.unlink, kwargs={"missing_ok": True})
    timer.daemon = True
    timer.start()


def _has_browser() -> bool:
    """Return True if a browser with a window can be opened: not on a machine without a display, nor in one of its text browsers."""
    return not on_linux() or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
