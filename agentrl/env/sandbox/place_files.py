"""Places that all processes of a run share on a machine: files, each locked by the process that has the place, until it ends in any way.

A file is there while its place is taken. Whoever gives a place back removes the file, while it still has the lock; so a lock on a file
that is no longer there counts for nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "agentrl-places-"


@dataclass(frozen=True, slots=True)
class PlaceFile:
    """A place that this process has."""

    path: Path
    descriptor: int

    def give_back(self) -> None:
        """Let others have the place."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self.descriptor)
        with contextlib.suppress(OSError):  # another place of the folder is taken
            self.path.parent.rmdir()


def folder_of(name: str) -> Path:
    """Return the folder for the places of a run, or of anything else with a name; it is there while one of them is taken."""
    digest = hashlib.sha256(f"{os.geteuid()}\0{name}".encode()).hexdigest()
    return Path(tempfile.gettempdir(), f"{PREFIX}{digest[:16]}")


def take_place(folder: Path, limit: int) -> PlaceFile | None:
    """Return one of `limit` places, `None` if all are taken."""
    folder.mkdir(mode=0o700, exist_ok=True)
    return next(filter(None, map(_taken, (folder / str(number) for number in range(limit)))), None)


def remove_abandoned_places() -> None:
    """Remove the files of processes of this user that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        for place in filter(None, map(_taken, _files(folder))):
            place.give_back()


def _files(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # another user's, or removed meanwhile
        yield from list(folder.iterdir())


def _taken(path: Path) -> PlaceFile | None:
    """Return the place of a file if nobody has it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:  # the folder was removed with the last place
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.fstat(descriptor).st_nlink > 0
    except BlockingIOError:
        is_there = False
    if is_there:
        return PlaceFile(path, descriptor)
    os.close(descriptor)
    return None
