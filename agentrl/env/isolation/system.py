"""Calls of the operating system: limits and environment of an episode's process, and all its descendants, also detached ones.

Some of it is Linux only: where it is missing, processes have fewer limits, and those that lost their parents are adopted by the system.
What a program calls that only starts another one stands in `agentrl.env.isolation.launcher`.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.env.isolation import launcher
from agentrl.env.isolation.launcher import send

PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TERM", "TMPDIR", "XDG_*_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "CUDA_VISIBLE_DEVICES"),
    *("OMP_*", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_*", "TOKENIZERS_PARALLELISM"),
    *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "AGENTRL_TEST_*"),
)
"""Environment variables that are passed on; everything else may be a secret."""
_ROUNDS = 200
_LOOKS, _LOOK_S = 10, 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of an episode's process; passing a limit ends only that episode.

    Attributes:
        memory_mib: Memory beyond what loading the user's file took, of the process and of what it starts, MiB.
        cpu_s: CPU seconds of an episode.
        file_mib: Size of a file that is written, MiB.
        processes: Processes that it may have started and that still run.
        open_files: Open files and sockets.
        reuse: Episodes that a process plays, one after another; 1: every episode begins in the state that loading left.
        passed: Names of environment variables that are passed on besides `PASSED`.
    """

    memory_mib: int = 1024
    cpu_s: float = 600.0
    file_mib: int = 256
    processes: int = 32
    open_files: int = 512
    reuse: int = 1
    passed: tuple[str, ...] = ()


def child_environment(environment: Mapping[str, str], passed: tuple[str, ...]) -> dict[str, str]:
    """The variables of `environment` that an episode's process is given; hashes of texts are the same in every run."""
    variables = {name: value for name, value in environment.items() if name in passed or any(fnmatch.fnmatchcase(name, p) for p in PASSED)}
    # A value that the user has set comes later, and holds.
    return {"PYTHONHASHSEED": "0", **variables}


def describe_end(code: int, limits: ProcessLimits) -> str:
    """Return the reason for a process's end from its exit code; a negative code is the number of a signal."""
    if code >= 0:
        return f"its process exited with code {code}"
    if -code == signal.SIGXCPU:
        return f"it used more than {limits.cpu_s:g} s of CPU time (--env-limits cpu_s), and its process was ended"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"


def named_limit(problem: str, limits: ProcessLimits) -> str:
    """The flag behind an exception that a limit causes, in brackets; nothing for any other."""
    for sign, name, value in (
        ("raised MemoryError", "memory_mib", limits.memory_mib),
        (f"[Errno {errno.EFBIG}]", "file_mib", limits.file_mib),
        (f"[Errno {errno.EMFILE}]", "open_files", limits.open_files),
    ):
        if sign in problem:
            return f" (--env-limits {name}={value})"
    return ""


class ProcessInfo(NamedTuple):
    """One line of the system's table of processes."""

    parent: int
    state: str
    resident: int  # bytes


def has_children() -> bool:
    """Return True if the calling process has children. A process that adopts orphans and has no children has no descendants."""
    try:
        # WNOWAIT leaves a child that has ended to `collect`, which wants its exit code.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def collect() -> dict[int, int]:
    """Collect the children that have ended; return exit codes by id, negative for a signal."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            ended[result[0]] = os.waitstatus_to_exitcode(result[1])
    return ended


def processes() -> dict[int, ProcessInfo]:
    """Every process that is visible, by its id."""
    return {pid: ProcessInfo(*row) for pid, row in launcher.processes().items()}


def families(table: Mapping[int, ProcessInfo], roots: Collection[int]) -> dict[int, list[int]]:
    """The processes that descend from each of `roots`, itself included, those that have ended and are not collected left out."""
    children = defaultdict(list)
    for pid, info in table.items():
        children[info.parent].append(pid)
    members = {root: [root] for root in roots}
    for family in members.values():
        for pid in family:  # which grows meanwhile
            family += children.pop(pid, ())
    return {root: [pid for pid in family if pid in table and table[pid].state not in "ZX"] for root, family in members.items()}


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
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        left = marked(mark) - killed
        if not left:
            break
        send(left, signal.SIGKILL)
        killed |= left
    return len(killed)


def marked(mark: str) -> set[int]:
    """Every process but this one whose environment holds `mark`, written as ``NAME=value``, since it began its program.

    One that is just becoming a program shows no environment for a moment, so those that show none are looked at again.
    """
    found: set[int] = set()
    unread = {pid for pid, info in processes().items() if pid != os.getpid() and info.state not in "ZX"}
    for _ in range(_LOOKS):
        shown = {pid: _environment(pid) for pid in unread}
        found |= {pid for pid, variables in shown.items() if variables and mark.encode() in variables}
        unread = {pid for pid, variables in shown.items() if variables == []}
        if not unread:
            break
        time.sleep(_LOOK_S)
    return found


def _environment(pid: int) -> list[bytes] | None:
    """The variables that a process began with, none while it becomes a program; None for one that shows nobody any."""
    if not launcher.LINUX:
        return _shown_environment(pid)
    try:
        os.readlink(f"/proc/{pid}/exe")  # a thread of the kernel has none
        with open(f"/proc/{pid}/environ", "rb") as file:
            return [variable for variable in file.read().split(b"\0") if variable]
    except OSError:
        return None


def _shown_environment(pid: int) -> list[bytes] | None:
    import psutil

    try:
        return [f"{name}={value}".encode() for name, value in psutil.Process(pid).environ().items()]
    except (psutil.Error, OSError):
        return None
