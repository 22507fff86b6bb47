"""Directories that one process at a time writes to: made, locked as long as it does, and named in the answer to a second one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.core.paths import absolute_path, shown_path

LOCK = ".lock"
"""File in a directory that its writer holds a lock on; it names the process, its machine and since when."""
OWNER_ONLY = 0o700
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems that have no locks."""


def make_directory(path: Path, flag: str = "--run-dir", *, new: bool = False) -> bool:
    """Make a directory that this user alone may read, if it is not there.

    Args:
        path: The directory.
        flag: Setting that names it, for messages.
        new: It is for a process that wants one of its own; one that is there need not be fit for use.

    Returns:
        True if it was made.

    Raises:
        ConfigError: If it cannot be made or written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=OWNER_ONLY)
    except FileExistsError:
        if new:
            return False
        if not path.is_dir():
            raise ConfigError(flag, str(path), "is a file", "Name a directory that is new or empty.") from None
    except OSError as error:
        raise ConfigError(flag, str(path), f"cannot be made: {error.strerror}", "Name a directory that you may write to.") from error
    else:
        return True
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(flag, str(path), "may not be written to", "Change its permissions, or name another directory.")
    return False


@contextlib.contextmanager
def held_directory(path: Path, flag: str = "--run-dir") -> Iterator[Path]:
    """Make a directory and keep every other process from writing a run into it; yields its absolute path.

    The system releases the lock with the process, however that ends. A directory that stays empty is removed again.

    Raises:
        ConfigError: If it cannot be made, or another process writes to it; the message names the process.
    """
    path = absolute_path(path)
    made = make_directory(path, flag)
    with _held(path, flag, made=made):
        yield path


@contextlib.contextmanager
def held_new_directory(path: Path, flag: str = "--run-dir") -> Iterator[Path]:
    """Hold a directory that nobody had before, `path` or else ``path-2``, ``path-3`` and so on; see `held_directory`."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    # `mkdir` itself decides between two commands that begin within the same second.
    free = next(name for name in map(absolute_path, names) if make_directory(name, flag, new=True))
    with _held(free, flag, made=True):
        yield free


@contextlib.contextmanager
def _held(path: Path, flag: str, *, made: bool) -> Iterator[None]:
    lock = _locked(path / LOCK, flag)
    try:
        yield
    finally:
        (path / LOCK).unlink(missing_ok=True)  # before it is released, so that who waits for it sees that the file is gone
        os.close(lock)
        if made:
            with contextlib.suppress(OSError):
                path.rmdir()


def _locked(file: Path, flag: str) -> int:
    """Lock a file and write into it who does; the file may be that of a process that was killed."""
    while True:
        # Not emptied when it is opened: who does not get the lock reads in it who has it.
        lock = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A file system without locks does not keep a run from starting; a second writer is not noticed there.
            if error.errno not in NO_LOCKS:
                os.close(lock)
                raise _in_use(file, flag) from error
        if _is_still(file, lock):
            break
        os.close(lock)  # its holder has ended between the two calls, and removed it
    writer = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(lock, 0)
    os.write(lock, (json.dumps(writer) + "\n").encode())
    return lock


def _is_still(file: Path, lock: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(lock))
    except FileNotFoundError:
        return False


def _in_use(file: Path, flag: str) -> ConfigError:
    who = "another process"
    with contextlib.suppress(OSError, ValueError, KeyError):
        writer = json.loads(file.read_text(encoding="utf-8"))
        who = f"process {writer['pid']} on {writer['host']}, since {writer['since']}"
    return ConfigError(flag, shown_path(file.parent), f"is being written to by {who}", "Wait until it ends, or name another directory.")
