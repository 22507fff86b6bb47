"""Linux calls that keep track of a process and all its descendants, also detached ones."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from resource import getpagesize

_SET_DEATH_SIGNAL, _SET_NAME, _SET_SUBREAPER = 1, 15, 36
_PAGE = getpagesize()
_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One line of the system's table of processes."""

    parent: int
    state: str
    resident: int  # bytes


def become(name: str, *, death_signal: int) -> None:
    """Name the calling process, adopt what its descendants leave behind, and be sent `death_signal` when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_NAME, name.encode(), 0, 0, 0)
    libc.prctl(_SET_DEATH_SIGNAL, death_signal, 0, 0, 0)
    if libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def has_children() -> bool:
    """Return True if the calling process has children. A process that adopts orphans and has no children has no descendants."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def processes() -> dict[int, ProcessInfo]:
    """Every process that is visible, by its id."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()  # the name before may hold anything
                table[int(name)] = ProcessInfo(int(fields[1]), fields[0].decode(), int(fields[21]) * _PAGE)
    return table


def families(table: Mapping[int, ProcessInfo], roots: Collection[int]) -> dict[int, list[int]]:
    """The processes that descend from each of `roots`, itself included, those that have ended and are not collected left out."""
    found: dict[int, list[int]] = {root: [] for root in roots}
    owner: dict[int, int | None] = {}
    for pid, info in table.items():
        root = _root(pid, table, found, owner)
        if root is not None and info.state not in "ZX":
            found[root].append(pid)
    return found


def _root(pid: int, table: Mapping[int, ProcessInfo], roots: Collection[int], owner: dict[int, int | None]) -> int | None:
    path = []
    while pid not in owner and pid not in roots:
        path.append(pid)
        info = table.get(pid)
        if info is None or len(path) > len(table):
            break
        pid = info.parent
    root = owner.get(pid, pid if pid in roots else None)
    owner.update(dict.fromkeys(path, root))
    return root


def kill_families(roots: Collection[int]) -> None:
    """Kill processes and their descendants. All are stopped before any is killed, so that none can start another meanwhile."""
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        fresh = {pid for family in families(processes(), roots).values() for pid in family} - stopped
        if not fresh:
            break
        send(fresh, signal.SIGSTOP)
        stopped |= fresh
    send(stopped, signal.SIGKILL)


def kill_marked(mark: str) -> int:
    """Kill every process whose environment holds `mark`, in case the process in charge of them is gone; return their number."""
    wanted = mark.encode()
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        found = {pid for pid in processes() if pid != os.getpid() and _holds(pid, wanted)} - killed
        if not found:
            break
        send(found, signal.SIGKILL)
        killed |= found
    return len(killed)


def _holds(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal; processes that are gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
