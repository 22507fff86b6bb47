"""Folders of sandboxes, which disappear with the process that made them, however it ends.

All folders of a process lie in one, with a file that it keeps locked. The lock ends with the process, also after kill -9;
so the first sandbox of every process removes the folders of those that are gone.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import tempfile
import threading
from pathlib import Path

from agentrl.env.sandbox.place_files import remove_abandoned_places
from agentrl.env.sandbox.trees import remove

PREFIX = "agentrl-sandboxes-"
LOCK = "lock"

_root: tuple[int, Path] | None = None  # the process that made it, which forks do not share, and the folder
_pipe: tuple[int, int, int] | None = None  # the process that made it, and its ends
_making = threading.RLock()  # sandboxes are opened on threads, and two folders would be two owners
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


def own_root() -> Path:
    """Return the folder of all sandboxes of this process, whose path is also the name of their owner."""
    global _root
    with _making:
        if _root is None or _root[0] != os.getpid():
            remove_abandoned()
            remove_abandoned_places()
            _root = os.getpid(), _locked()
            atexit.register(_remove_own, *_root)
        return _root[1]


def make_folder() -> Path:
    """Return a new, empty folder that disappears with this process."""
    return Path(tempfile.mkdtemp(dir=own_root()))


def is_abandoned(root: Path) -> bool:
    """Return True if the process is gone that made a folder with `own_root`."""
    try:
        descriptor = os.open(root / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        # The folder of another user cannot be opened, which says nothing of the process that made it.
        return isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def owner_pipe() -> int:
    """Return the end of a pipe that closes when this process ends."""
    global _pipe
    if _pipe is None or _pipe[0] != os.getpid():
        _pipe = os.getpid(), *os.pipe()
    return _pipe[1]


def remove_abandoned() -> list[Path]:
    """Remove the folders of processes of this user that are gone, and return them."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, still locked, or removed meanwhile
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
                removed.append(folder)
            finally:
                os.close(descriptor)
    return removed


def _locked() -> Path:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    fresh = folder / "new"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600)  # kept open as long as the process lives
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fresh.rename(folder / LOCK)  # only now others may look at it
    return folder


def _remove_own(owner: int, folder: Path) -> None:
    if os.getpid() == owner:
        remove(folder)
