"""Processes that user code started and did not end: found, ended, and named for people."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterable

import psutil

from agentrl.env.isolation import launcher, system

_log = logging.getLogger(__name__)

MARK = "AGENTRL_LOCAL_RUN"
"""Environment variable that programs inherit which a run in this process starts."""
HELPERS = (
    *("multiprocessing.resource_tracker", "multiprocessing.forkserver", "ray::", "site-packages/ray/"),
    *("agentrl/cluster/reaper.py", "agentrl/env/sandbox/reaper.py", "torch/_inductor/compile_worker"),
)
"""Parts of the command lines of processes that end by themselves, when what they look after has ended."""
SHARED = ("catatonit",)
"""Parts of the command lines of processes that are not the command's alone: podman has one for all containers of a user."""
SHOWN, WIDTH = 4, 60


class Leftovers:
    """Processes that are started from now on; in a program of the user's, those that its main thread starts are its own."""

    def __init__(self) -> None:
        self._before = family(os.getpid())
        self._spares_main = threading.current_thread() is not threading.main_thread()
        os.environ[MARK] = uuid.uuid4().hex

    def end(self) -> None:
        """Kill those that still run, and warn of them; nothing is found a second time.

        A process that lost its parents is found if it runs a program of its own, which has the mark.
        """
        mark = os.environ.pop(MARK, "")
        if mark:
            own = family(os.getpid())
            spared = self._before | (family(*launcher.children(os.getpid())) if self._spares_main else set())
            end_processes((own - spared) | orphans(f"{MARK}={mark}"))


def orphans(mark: str) -> set[int]:
    """Return the processes that inherited a mark, ``NAME=value``, and do not descend from the calling process."""
    return system.marked(mark) - family(os.getpid())


def end_processes(pids: Iterable[int]) -> None:
    """Kill processes that user code left behind and what they started, and warn of them."""
    # Read before they are killed: a process that is gone shows no command line.
    lines = command_lines(pids)
    system.kill_families(lines)
    if lines:
        count = f"{len(lines)} process{'es' * (len(lines) > 1)}"
        _log.warning("ended %s that the environment had left behind: %s; `agentrl check` finds out where", count, listed(lines.values()))


def family(*roots: int) -> set[int]:
    """Return some processes and all that descend from them, without the calling one."""
    members = system.families(system.processes(), roots)
    return {pid for found in members.values() for pid in found} - {os.getpid()}


def command_lines(pids: Iterable[int]) -> dict[int, str]:
    """Return the command line of each process, without those that end by themselves or are shared."""
    lines = {pid: command_line(pid) for pid in pids}
    return {pid: line for pid, line in lines.items() if not is_helper(line) and not any(name in line for name in SHARED)}


def is_helper(line: str) -> bool:
    """Return True for the command line of a process that ends by itself."""
    return any(name in line for name in HELPERS)


def command_line(pid: int) -> str:
    """Return the words of a process; of one that shows none, as a thread of the kernel or one that is gone, its id."""
    with contextlib.suppress(psutil.Error, OSError):
        return " ".join(psutil.Process(pid).cmdline()).strip() or f"process {pid}"
    return f"process {pid}"


def listed(lines: Iterable[str]) -> str:
    """Return command lines for a message, equal ones once with their number."""
    counts = Counter(line if len(line) <= WIDTH else line[: WIDTH - 3] + "..." for line in lines)
    shown = [f"`{line}`" + (f" ({count} of them)" if count > 1 else "") for line, count in counts.most_common(SHOWN)]
    others = sum(counts.values()) - sum(count for _, count in counts.most_common(SHOWN))
    return ", ".join([*shown, *([f"{others} more"] if others else [])])
