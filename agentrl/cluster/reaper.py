"""Ends what a private cluster left behind when the driver died without closing it, by SIGKILL for example.

Ray's daemons are not children that die with the driver, and some of them outlive it. So the driver starts a small process of
this file before the cluster. It reads a pipe that only the driver holds. A word on the pipe means that all was closed; an
end without the word means that the driver is gone, and then whatever belongs to the cluster is killed.

It is run as a script, so that it starts with nothing but the standard library and psutil.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

MARK = "AGENTRL_RUN_MARK"
"""Environment variable that every process of a private cluster inherits."""
SPARED = "agentrl/env/sandbox/reaper.py"
"""Program that removes the containers of a rollout worker after its end, and ends by itself."""
CLOSED = b"closed"
GIVE_UP_S = 30.0
QUIET_ROUNDS = 3  # rounds without a survivor, because a daemon may be starting another process at the moment it is killed
ROUND_S = 0.2


class Reaper:
    """The process that stands by, and its pipe; it removes `folder` together with the processes.

    Call before the cluster starts: the mark is put into this process's environment.
    """

    def __init__(self, folder: str | Path) -> None:
        mark = secrets.token_hex(16)
        os.environ[MARK] = mark
        # Without -P the folder of this script comes first on the path, and its modules would hide others of the same names.
        words = [sys.executable, "-P", str(Path(__file__)), mark, str(folder)]
        clean = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=clean
        )

    def release(self) -> None:
        """Say that everything is closed, and wait for the process to end."""
        os.environ.pop(MARK, None)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(CLOSED, timeout=5)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid


def members(mark: str, folders: Sequence[str]) -> set[psutil.Process]:
    """Live processes that inherited `mark`, their descendants, and those with an open file under one of `folders`, without the `SPARED`.

    The mark alone does not do: a process that gives itself a title, as Ray's do, may overwrite its environment.
    """
    found: set[psutil.Process] = set()
    spared: set[psutil.Process] = {psutil.Process()}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if any(word.endswith(SPARED) for word in process.cmdline()):
                spared |= {process, *process.children(recursive=True)}
            elif process.status() != psutil.STATUS_ZOMBIE and (process.environ().get(MARK) == mark or _uses(process, folders)):
                found |= {process, *process.children(recursive=True)}
    return found - spared


def _uses(process: psutil.Process, folders: Sequence[str]) -> bool:
    from agentrl.core.operating_system import open_paths

    return any(path.startswith(f"{folder}/") for path in open_paths(process.pid) for folder in folders)


def reap(mark: str, folders: Sequence[str], give_up_s: float = GIVE_UP_S) -> None:
    """Kill all `members` until nothing appears any more, then remove `folders`."""
    deadline, quiet = time.monotonic() + give_up_s, 0
    while quiet < QUIET_ROUNDS and time.monotonic() < deadline:
        victims = members(mark, folders)
        quiet = 0 if victims else quiet + 1
        for process in victims:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(ROUND_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ImportError):  # weights in shared memory, which the learner could not remove
        from agentrl.core.files import remove_abandoned
        from agentrl.core.operating_system import memory_root

        remove_abandoned(memory_root())


def main() -> None:
    """Wait for the driver's word or its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these end the driver; what follows from it is seen on the pipe
        signal.signal(number, signal.SIG_IGN)
    mark, *folders = sys.argv[1:]
    if sys.stdin.buffer.read() != CLOSED:
        reap(mark, folders)


if __name__ == "__main__":
    main()
