"""The process that removes the containers of this one after its end, however it ends; it runs while there may be any."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from agentrl.env.sandbox import reaper
from agentrl.env.sandbox.engine import Engine, owner_label

_lock = threading.Lock()
_users = 0
_process: tuple[int, subprocess.Popen[bytes]] | None = None  # the process that started it, which forks do not share, and itself


def begin_watch(engine: Engine) -> None:
    """Have the containers removed that this process makes from now on, unless `end_watch` comes first."""
    global _users, _process
    with _lock:
        if _process is None or _process[0] != os.getpid():
            words = [sys.executable, "-I", "-S", reaper.__file__, owner_label(), *engine.program]
            pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
            _users = 0
            _process = os.getpid(), subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=quiet, start_new_session=True)
        _users += 1


def end_watch() -> None:
    """Take back one `begin_watch`, after the removal of all containers that it was for."""
    global _users, _process
    with _lock:
        _users -= 1
        if not _users and _process is not None:
            _process[1].communicate(reaper.DONE)  # until it closes its output: the process that was started is its parent, and gone
            _process = None
