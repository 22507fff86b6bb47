"""Control groups by which the system limits the memory of a local sandbox: of its processes, and all else that it holds for them.

A limit of each process leaves out what belongs to none, such as files in memory. Groups need rights that a trainer in a container often
lacks; where there are none, the limits of processes and a look at them four times a second remain.

A process keeps its groups and uses them again, because the system frees the memory of removed ones late. It locks them, so that another
process can tell those of one that is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.env.sandbox import cgroup

PREFIX = "agentrl-sandboxes-"
ENTER = 'echo 0 > "$0" && exec "$@"'
"""Commands of a shell that joins a group and becomes a program."""
FILES = (("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), ("memory.max", "memory.swap.max"))
"""Limits of memory, and of memory with swap or of swap alone, in the two versions of control groups."""
_free: list[MemoryGroup] = []
_owner = 0  # the process of the groups that are free


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group that this process has."""

    folder: Path
    descriptor: int

    def entering(self, words: list[str]) -> list[str]:
        """Return the words of a program that runs in the group."""
        return ["sh", "-c", ENTER, str(self.folder / "cgroup.procs"), *words]

    @property
    def num_killed(self) -> int:
        """Processes that the system has ended because the group's memory was used up."""
        return cgroup.num_killed(self.folder)

    def give_back(self) -> None:
        """Have the group be used again, once it has no process."""
        if _owner == os.getpid():
            _free.append(self)
        else:
            self.remove()

    def remove(self) -> None:
        """Remove the group; one that still has a process is left to the next start."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        os.close(self.descriptor)

    def limit(self, limit: int) -> bool:
        """Let the group have so many bytes; False if the system refuses."""
        memory, swap = (self.folder / name for name in next(names for names in FILES if (self.folder / names[0]).exists()))
        try:
            if swap.name.startswith("memory.memsw") and swap.exists():
                swap.write_text("-1")  # which is never less than the other
            memory.write_text(str(limit))
            if swap.exists():
                swap.write_text("0" if swap.name == "memory.swap.max" else str(limit))
        except OSError:
            return False
        return True


def take_group(limit: int) -> MemoryGroup | None:
    """Return a group without processes whose memory has a limit in bytes; `None` if this process may not make one."""
    global _owner
    if _owner != os.getpid():
        _owner = os.getpid()
        _free.clear()  # those of the process that this one was forked from
        atexit.register(_remove_own, _owner)
        remove_abandoned_groups()
    # Groups are taken on several threads, so that the list may be empty although it was not a moment ago.
    with contextlib.suppress(IndexError):
        while True:
            group = _free.pop()
            if group.limit(limit):
                return group
            group.remove()
    made = _made()
    if made is not None and not made.limit(limit):
        made.remove()
        return None
    return made


def remove_abandoned_groups() -> None:
    """Remove the groups of processes that are gone."""
    for folder in _places():
        for path in folder.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # still locked, another user's, or with a process that is about to end
                descriptor = _locked(path)
                try:
                    path.rmdir()
                finally:
                    os.close(descriptor)


def _places() -> Iterator[Path]:
    """Yield the folder in which this process may make groups: of the first version its own, of the second the one above."""
    own = cgroup.folder_of(os.getpid(), "memory")
    if own is not None and (own / FILES[0][0]).exists():
        yield own
    elif own is not None:
        # In the second version a group that has processes may have no groups with limits below it.
        yield own if own == cgroup.ROOT else own.parent


def _made() -> MemoryGroup | None:
    for place in _places():
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            if any((folder / name).exists() for name, _ in FILES):
                return MemoryGroup(folder, _locked(folder))
            folder.rmdir()  # without the controller of memory
    return None


def _locked(folder: Path) -> int:
    """Lock a group as long as this process lives; `OSError` if another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_own(owner: int) -> None:
    if os.getpid() == owner:
        while _free:
            _free.pop().remove()
