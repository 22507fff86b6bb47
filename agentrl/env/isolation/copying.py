"""Copies of a live process of an episode: what they need to be exact, and how they are made.

A fork copies memory, and with it every object, generator of random numbers and position of the program. What lies outside of memory is
not copied but shared, so a process that holds such a thing is refused, with the thing's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NoReturn

from agentrl.core.errors import EnvError
from agentrl.env.isolation import launcher, system

THREADS = "agentrl-env"
"""Name of the threads on which plain ``def`` methods run; between two calls they wait."""
WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class Holdings:
    """Resources of a process outside of its memory."""

    descriptors: frozenset[int]
    shared: frozenset[str]  # memory that it shares with others and may change, by address

    def and_open(self, descriptors: Collection[int]) -> Holdings:
        """The same with further descriptors."""
        return Holdings(self.descriptors | set(descriptors), self.shared)

    @classmethod
    def of_this_process(cls) -> Holdings:
        """Resources of the calling process now."""
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            shared = {line.split()[0] for line in file if line.split()[1].startswith("rw") and line.split()[1].endswith("s")}
        return cls(frozenset(_descriptors()), frozenset(shared))


def check_copy(where: str, before: Holdings, loop: asyncio.AbstractEventLoop, tasks: Collection[asyncio.Task[object]]) -> None:
    """Refuse to copy the calling process if the copy would differ from it.

    Args:
        where: Begins the message.
        before: What the process held before user code ran in it.
        loop: The loop that user code runs on, which does not run now.
        tasks: Tasks on that loop that are not the user's.

    Raises:
        EnvError: If it holds something that a fork does not copy.
    """
    held = Holdings.of_this_process()
    found = [name for fd in sorted(held.descriptors - before.descriptors) if (name := _uncopied(fd))]
    found += ["memory that is shared with other processes"] if held.shared - before.shared else []
    own = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and thread.name != THREADS]
    found += [f"the thread {own[0].name}"] if own else []
    if "torch" in sys.modules and len(os.listdir("/proc/self/task")) > threading.active_count():
        found.append("threads of torch")
    found += ["a program or process that it started"] if system.has_children() else []
    left = [task for task in asyncio.all_tasks(loop) if task not in tasks]
    found += [f"the task {left[0].get_name()}"] if left else []
    if found:
        raise EnvError(f"{where}: it holds {', '.join(found[:3])}, which a copy would share or lose; close it within reset or step")


def spawn(play: Callable[[], NoReturn]) -> int:
    """Start a copy of the calling process as a child of the process that adopts orphans, which calls `play`; returns its id.

    The process between the two ends at once. Python gives a forked process other random numbers; the copy keeps those of the original.
    """
    numbers, (read, write) = random.getstate(), os.pipe()
    # The system gives the copy, an orphan, to the nearest process above that adopts them, which is to be the fork server.
    launcher.adopt_orphans(False)  # nor does it have any: it has no children
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which wait
        between = os.fork()
    if between == 0:
        _begin(play, numbers, read, write)
    os.close(write)
    with open(read, "rb") as told:
        pid = told.read()
    os.waitpid(between, 0)
    launcher.adopt_orphans()
    return int(pid)


def _begin(play: Callable[[], NoReturn], numbers: tuple[object, ...], read: int, write: int) -> NoReturn:
    """Be the process between, which starts the copy, or the copy itself."""
    try:
        os.close(read)
        parent = os.getpid()
        if pid := os.fork():
            os.write(write, b"%d" % pid)
            os._exit(0)
        os.close(write)
        # Until the process between is gone: the death signal that is set next would otherwise be sent when that one ends.
        while os.getppid() == parent:
            time.sleep(WAIT_S)
        random.setstate(numbers)
        play()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def places() -> dict[int, int]:
    """Return where each open file is read next; to be asked for before there are copies, as the original soon reads on."""
    return {number: os.lseek(number, 0, os.SEEK_CUR) for number in _descriptors() if stat.S_ISREG(os.fstat(number).st_mode)}


def let_go(before: Holdings, after: Holdings, keep: int, read: Mapping[int, int]) -> None:
    """In a copy: close what the original talks through, and open its files anew, at the same places.

    The numbers stay in use, so that nothing that closes itself later closes something else.

    Args:
        before: What the original was started with.
        after: What it held before user code ran in it: also sockets, and what its event loop waits with.
        keep: Descriptor that the copy talks through.
        read: `places` of the original.
    """
    with open(os.devnull, "rb+", buffering=0) as nothing:
        for descriptor in after.descriptors - before.descriptors - {keep}:
            with contextlib.suppress(OSError):
                os.dup2(nothing.fileno(), descriptor)
    for descriptor in read.keys() - after.descriptors:
        inherited = os.get_inheritable(descriptor)
        # `os.dup` would give a descriptor that shares its place in the file with the original.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(own, read[descriptor], os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=inherited)
        os.close(own)


def _descriptors() -> list[int]:
    """Open descriptors of the calling process."""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]


def _is_open(descriptor: int) -> bool:
    """Return True unless the descriptor was that of the listing itself."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _uncopied(descriptor: int) -> str:
    """Name of what a descriptor stands for if a copy would not have one of its own; empty if it would."""
    try:
        mode, flags, name = os.fstat(descriptor).st_mode, fcntl.fcntl(descriptor, fcntl.F_GETFL), os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
    if stat.S_ISREG(mode):
        return "" if flags & os.O_ACCMODE == os.O_RDONLY else f"{name}, open for writing"
    if stat.S_ISCHR(mode) or stat.S_ISDIR(mode):
        return ""
    return f"a {'socket' if stat.S_ISSOCK(mode) else 'pipe'}" if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) else name
