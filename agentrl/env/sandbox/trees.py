"""Folders in which programs of sandboxes write, walked from outside: by descriptors, so that no link leads out, and without recursion."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_BYTES = 1024
"""Bytes that an entry of a folder counts at least, as a disk has room for so many entries only."""

Entry: TypeAlias = Callable[[int, str, os.stat_result], None]
"""Is told of the folder of an entry, as a descriptor, and of its name and status."""

_log = logging.getLogger(__name__)


def size(folder: Path) -> int:
    """Return the bytes of what is in a folder: of a sparse file its length, as a copy of it may be without holes."""
    total = 0

    def count(here: int, name: str, status: os.stat_result) -> None:
        nonlocal total
        length = status.st_size if stat.S_ISREG(status.st_mode) else 0
        total += max(length, status.st_blocks * 512, FILE_BYTES)

    with contextlib.suppress(OSError), opened(folder) as top:
        visit(top, count)
    return total


def give(folder: Path, user: int) -> None:
    """Make a user the owner of a folder and of all that is in it; of a link itself, not of what it leads to."""

    def change(here: int, name: str, status: os.stat_result) -> None:
        if status.st_uid != user:
            os.chown(name, user, user, dir_fd=here, follow_symlinks=False)

    with opened(folder) as top:
        if os.fstat(top).st_uid != user:
            os.fchown(top, user, user)
        visit(top, change)


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, also where a program took away its own rights; what cannot be removed is named in the log."""
    try:
        with opened(folder.parent) as parent:
            remove_entry(parent, folder.name)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("%s of a sandbox could not be removed whole, and is left: %s", folder, error)


def remove_entry(parent: int, name: str) -> None:
    """Remove a file, a link, or a folder with all that is in it.

    Raises:
        OSError: If something of it cannot be removed.
    """
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=parent)
        return

    def unlink(here: int, inner: str, status: os.stat_result) -> None:
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(inner, dir_fd=here)

    top = _enter(parent, name, unlock=True)
    try:
        visit(top, unlink, lambda here, inner: os.rmdir(inner, dir_fd=here), unlock=True)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Hold a descriptor of a folder, which is no link."""
    top = os.open(folder, FOLDER)
    try:
        yield top
    finally:
        os.close(top)


def visit(top: int, entry: Entry, left: Callable[[int, str], None] | None = None, *, unlock: bool = False) -> None:
    """Tell of everything below an open folder, while programs may still change it.

    One descriptor is open at a time, however deep a folder is. What cannot be read, or goes away, is passed over.

    Args:
        top: Descriptor of the folder.
        entry: Is told of each entry, of a folder before what is in it.
        left: Is told of each folder, behind what is in it.
        unlock: Give back the rights that a folder lacks.
    """
    here, names, above = os.dup(top), os.listdir(top), list[tuple[tuple[int, int], str, list[str]]]()
    try:
        while names or above:
            if not names:
                known, name, names = above.pop()
                here, back = _leave(here, known, top, (name for _, name, _ in above)), here
                os.close(back)
                with contextlib.suppress(OSError):
                    if left is not None:
                        left(here, name)
                continue
            name = names.pop()
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=here, follow_symlinks=False)
                entry(here, name, status)
                if stat.S_ISDIR(status.st_mode):
                    inner = _enter(here, name, unlock=unlock)
                    above.append((identity(here), name, names))
                    os.close(here)
                    here, names = inner, []
                    names = os.listdir(inner)
    finally:
        os.close(here)


def identity(folder: int) -> tuple[int, int]:
    """Return what tells an open folder from all others."""
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


def _leave(here: int, known: tuple[int, int], top: int, names: Iterable[str]) -> int:
    """Open the folder above, which is known; where it is another one now, the old one is looked for by the names from the top."""
    with contextlib.suppress(OSError):
        above = os.open("..", FOLDER, dir_fd=here)
        if identity(above) == known:
            return above
        os.close(above)
    found = os.dup(top)
    for name in names:
        try:
            inner = os.open(name, FOLDER, dir_fd=found)
        except OSError:  # moved too; what is left of it is passed over
            break
        os.close(found)
        found = inner
    return found


def _enter(parent: int, name: str, *, unlock: bool) -> int:
    try:
        return os.open(name, FOLDER, dir_fd=parent)
    except PermissionError:
        if not unlock:
            raise
    # By a descriptor, as a program may put a link in the folder's place.
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{place}", 0o700)
    finally:
        os.close(place)
    return os.open(name, FOLDER, dir_fd=parent)
