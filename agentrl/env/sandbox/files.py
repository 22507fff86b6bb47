"""Files of a sandbox, read and written from outside: no link that a program left there leads out of the folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from agentrl.core.errors import SandboxError
from agentrl.env.isolation.launcher import MIB
from agentrl.env.sandbox.trees import FOLDER, identity, remove_entry, visit

MAX_FILE, PART = 16 * MIB, MIB
# O_NONBLOCK, as the open of a named pipe that a program has put there would wait for its other end.
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_beneath(folder: Path, name: str, limit: int = MAX_FILE) -> bytes:
    """Return the content of a file.

    Raises:
        FileNotFoundError: If there is none.
        SandboxError: If the name leads out of the folder, or to no plain file, or the file is too large.
    """
    with _parent(folder, name) as (parent, last), os.fdopen(_plain(parent, last, name, os.O_RDONLY), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise too_large(name, limit)
    return data


def too_large(name: str, limit: int) -> SandboxError:
    """Return the error for a file with more than `limit` bytes."""
    return SandboxError(f"{name!r} holds more than {limit} bytes; read it with a program in the sandbox")


def write_beneath(folder: Path, name: str, data: bytes) -> None:
    """Write a file, and the folders above it; raises as `read_beneath` does."""
    with _parent(folder, name, make=True) as (parent, last), os.fdopen(_plain(parent, last, name, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.truncate()
        file.write(data)


def make_beneath(folder: Path, name: str) -> None:
    """Make a folder and those above it, unless they are there; a link or a file in their place is removed."""
    parts = PurePosixPath(name).parts
    for number in range(1, len(parts) + 1):
        place = "/".join(parts[:number])
        try:
            with _parent(folder, f"{place}/.", make=True):
                continue
        except SandboxError:
            remove_beneath(folder, place)
        with _parent(folder, f"{place}/.", make=True):
            pass


def remove_beneath(folder: Path, name: str) -> None:
    """Remove a file, a link or a folder with all that is in it, if it is there; raises as `read_beneath` does."""
    with contextlib.suppress(FileNotFoundError), _parent(folder, name) as (parent, last):
        remove_entry(parent, last)


def copy_beneath(folder: Path, name: str, source: Path) -> None:
    """Replace a file or folder by a copy of `source`; raises as `read_beneath` does."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:  # on the same disk, and out of reach
        copy = Path(scratch) / "copy"
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True)
        else:
            shutil.copy2(source, copy)
        with _parent(folder, name, make=True) as (parent, last):
            with contextlib.suppress(FileNotFoundError):
                remove_entry(parent, last)
            os.rename(copy, last, dst_dir_fd=parent)


def copy_out_beneath(folder: Path, name: str, target: Path, limit: int) -> None:
    """Make the folder `target` with the plain files of a folder, without links and devices; raises as `read_beneath` does.

    Files have `limit` bytes together at most, holes of sparse ones included; the copy has these holes too.
    """
    with _parent(folder, f"{name}/.") as (parent, last):
        top = os.open(last, FOLDER, dir_fd=parent)
    try:
        left, places = limit, {identity(top): target}
        target.mkdir(parents=True, exist_ok=True)

        def copy(here: int, inner: str, status: os.stat_result) -> None:
            nonlocal left
            place = places[identity(here)] / inner
            if stat.S_ISDIR(status.st_mode):
                place.mkdir(exist_ok=True)
                places[status.st_dev, status.st_ino] = place
            elif stat.S_ISREG(status.st_mode) and left >= 0:
                with os.fdopen(_plain(here, inner, inner, os.O_RDONLY), "rb") as file:
                    left = _copy(file, place, left)

        visit(top, copy)
    finally:
        os.close(top)
    if left < 0:
        raise SandboxError(f"the folder {name!r} of a sandbox holds more than its limit of {limit} bytes")


def _copy(source: BinaryIO, target: Path, left: int) -> int:
    """Copy a file, which a program may still change, with its holes, and return how many of the `left` bytes are left; -1 for too few."""
    length, at = os.fstat(source.fileno()).st_size, 0
    if length > left:
        return -1
    with target.open("wb") as copy:
        while at < length:
            try:
                at = os.lseek(source.fileno(), at, os.SEEK_DATA)
            except OSError:  # a hole up to the end
                break
            end = min(os.lseek(source.fileno(), at, os.SEEK_HOLE), length)
            source.seek(at)
            copy.seek(at)
            while at < end and (part := source.read(min(end - at, PART))):
                copy.write(part)
                at += len(part)
            if at < end:  # it was cut off meanwhile
                break
        copy.truncate(length)
    return left - length


@contextlib.contextmanager
def _parent(folder: Path, name: str, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder that holds a file, and give it with the last part of the name; ``name/.`` opens the folder `name` itself."""
    parts = [*PurePosixPath(name).parts, *(["."] if name.endswith("/.") else [])]
    if not parts or parts == ["."] or parts[0] == "/" or ".." in parts:
        raise SandboxError(f"{name!r} is no path below the folder of the sandbox; write a relative one")
    here = os.open(folder, FOLDER)
    try:
        # Part by part: O_NOFOLLOW refuses a link only as the last part of a path.
        for part in parts[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=here)
            inner = os.open(part, FOLDER, dir_fd=here)
            os.close(here)
            here = inner
        yield here, parts[-1]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SandboxError(f"{name!r} of a sandbox cannot be opened: {error.strerror}; links are not followed") from error
    finally:
        os.close(here)


def _plain(parent: int, last: str, name: str, flags: int) -> int:
    descriptor = os.open(last, flags | _PLAIN, 0o644, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SandboxError(f"{name!r} of a sandbox is no plain file")
    return descriptor
