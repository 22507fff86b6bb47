"""Files of a sandbox, read and written from outside: no link that a program left there leads out of the folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from agentrl.core.errors import SandboxError
from agentrl.env.isolation.system import MIB

MAX_FILE = 16 * MIB
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def read_beneath(folder: Path, name: str, limit: int = MAX_FILE) -> bytes:
    """Return the content of a file.

    Raises:
        FileNotFoundError: If there is none.
        SandboxError: If the name leads out of the folder, or to no plain file, or the file is too large.
    """
    descriptor = _open(folder, name, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise SandboxError(f"{name!r} holds more than {limit} bytes; read it with a program in the sandbox")
    return data


def write_beneath(folder: Path, name: str, data: bytes) -> None:
    """Write a file, and the folders above it; raises as `read_beneath` does."""
    descriptor = _open(folder, name, os.O_WRONLY | os.O_CREAT)
    with os.fdopen(descriptor, "wb") as file:
        file.truncate()
        file.write(data)


def _open(folder: Path, name: str, flags: int) -> int:
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise SandboxError(f"{name!r} is no path below the folder of the sandbox; write a relative one")
    here = os.open(folder, _FOLDER)
    try:
        for part in parts[:-1]:
            if flags & os.O_CREAT and part not in os.listdir(here):
                os.mkdir(part, 0o755, dir_fd=here)
            inner = os.open(part, _FOLDER, dir_fd=here)
            os.close(here)
            here = inner
        found = os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=here)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SandboxError(f"{name!r} of a sandbox cannot be opened: {error.strerror}; links are not followed") from error
    finally:
        os.close(here)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise SandboxError(f"{name!r} of a sandbox is no plain file")
    return found
