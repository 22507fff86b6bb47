"""Calls of the operating system: limits and environment of an episode's process, and all its descendants, also detached ones.

Some of it is Linux only: where it is missing, processes have fewer limits, and those that lost their parents are adopted by the system.

Run as ``python -I -S system.py LIMITS OWNER TELL PORT PROGRAM ARGUMENT...``, with limits in JSON, it limits its process and becomes the
program, so that between fork and program no code of a busy process runs; therefore it needs nothing but the standard library.
Run as ``... guard OWNER WAIT PROGRAM ARGUMENT...`` it stands over a program that makes containers, and as ``... listen PID PORT TELL``
it listens in one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

MIB = 2**20
LINUX = os.environ.get("AGENTRL_ASSUME_SYSTEM", sys.platform) == "linux"

PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TERM", "TMPDIR", "XDG_*_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "CUDA_VISIBLE_DEVICES"),
    *("OMP_*", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_*", "TOKENIZERS_PARALLELISM"),
    *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "AGENTRL_TEST_*"),
)
"""Environment variables that are passed on; everything else may be a secret."""


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
    return {"PYTHONHASHSEED": "0", **variables}


def apply(limits: ProcessLimits) -> None:
    """Limit the calling process, and with it what it will start."""
    _limit(resource.RLIMIT_CORE, 0)
    limit_memory(limits.memory_mib)
    _limit(resource.RLIMIT_FSIZE, limits.file_mib * MIB)
    _limit(resource.RLIMIT_NOFILE, limits.open_files)


def limit_memory(mib: int) -> None:
    """Limit what the calling process takes from now on. Data counts, not address space, much of which is only reserved."""
    if LINUX:
        with open("/proc/self/statm", encoding="ascii") as file:
            data = int(file.read().split()[5]) * _PAGE
        _limit(resource.RLIMIT_DATA, data + mib * MIB)


def begin_cpu_time(cpu_s: float) -> None:
    """Let the calling process use so much CPU time from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + cpu_s) + 1, hard))


def describe_end(code: int, limits: ProcessLimits) -> str:
    """Return the reason for a process's end from its exit code; a negative code is the number of a signal."""
    if code >= 0:
        return f"its process exited with code {code}"
    if -code == signal.SIGXCPU:
        return f"it used more than {limits.cpu_s:g} s of CPU time (--env-cpu-s), and its process was ended"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"


def named_limit(problem: str, limits: ProcessLimits) -> str:
    """The flag behind an exception that a limit causes, in brackets; nothing for any other."""
    for sign, flag, value in (
        ("raised MemoryError", "--env-memory-mib", limits.memory_mib),
        (f"[Errno {errno.EFBIG}]", "--env-file-mib", limits.file_mib),
        (f"[Errno {errno.EMFILE}]", "--env-open-files", limits.open_files),
    ):
        if sign in problem:
            return f" ({flag} {value})"
    return ""


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NAME, _SET_SUBREAPER = 1, 4, 15, 36
GUARD, LISTEN = "guard", "listen"
LOOPBACK = "127.0.0.1"
ABORT_AGAIN_S = 0.1
_PAGE = resource.getpagesize()
_ROUNDS = 200


class ProcessInfo(NamedTuple):
    """One line of the system's table of processes."""

    parent: int
    state: str
    resident: int  # bytes


def become(name: str, *, death_signal: int) -> None:
    """Name the calling process, adopt what its descendants leave behind, and be sent `death_signal` when its parent ends."""
    if LINUX:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_SET_NAME, name.encode(), 0, 0, 0)
        libc.prctl(_SET_DEATH_SIGNAL, death_signal, 0, 0, 0)
        adopt_orphans()


def adopt_orphans(adopted: bool = True) -> None:
    """Have the calling process be the parent of descendants that lose theirs, or no longer."""
    if not LINUX:
        raise OSError(errno.ENOSYS, "processes are not adopted on this operating system")
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_SUBREAPER, int(adopted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def has_children() -> bool:
    """Return True if the calling process has children. A process that adopts orphans and has no children has no descendants."""
    try:
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
    table: dict[int, ProcessInfo] = {}
    if not LINUX:
        for line in _listed("pid=,ppid=,state=,rss="):
            pid, parent, state, resident = line.split()
            table[int(pid)] = ProcessInfo(int(parent), state[0], int(resident) * 1024)
        return table
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()  # the name before may hold anything
                table[int(name)] = ProcessInfo(int(fields[1]), fields[0].decode(), int(fields[21]) * _PAGE)
    return table


def children(pid: int) -> list[int]:
    """The processes that a process started and that still are; none if it is gone."""
    if not LINUX:
        return [found for found, info in processes().items() if info.parent == pid]
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


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
    """Every process but this one whose environment holds `mark`, written as ``NAME=value``, since it began its program."""
    wanted = mark.encode()
    return {pid for pid, info in processes().items() if pid != os.getpid() and info.state not in "ZX" and _holds(pid, wanted)}


def _listed(columns: str) -> list[str]:
    """Lines of the table of processes as ``ps`` prints it."""
    import subprocess  # not needed on Linux, where this file runs as a program, too

    return subprocess.run(
        ["ps", "-axo", columns], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    ).stdout.splitlines()


def _holds(pid: int, mark: bytes) -> bool:
    if not LINUX:
        return _shown_environment(pid, mark)
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False


def _shown_environment(pid: int, mark: bytes) -> bool:
    import psutil

    name, _, value = mark.decode().partition("=")
    try:
        return bool(psutil.Process(pid).environ().get(name) == value)
    except (psutil.Error, OSError):
        return False


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal; processes that are gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def main(limits: ProcessLimits, owner: int, tell: int, port: int, words: list[str]) -> None:
    """Limit the calling process and have it become a program; the first process of a sandbox starts it instead, and ends as it does.

    Args:
        limits: Limits of the program.
        owner: In a sandbox the end of a pipe that closes when its owner ends.
        tell: End of a pair of sockets that is told when the program begins.
        port: Port of loopback on which a socket listens that is handed over with that word; 0: none.
        words: The program and its arguments.
    """
    if os.getpid() == 1:
        program = os.fork()
        if program:
            os.close(tell)
            _outlive(program, owner)
        os.close(owner)
        # Only here, where the user is nobody else's: the limit counts all processes of a user.
        _limit(resource.RLIMIT_NPROC, limits.processes + 1)
    become("agentrl-command", death_signal=signal.SIGKILL)
    apply(limits)
    begin_cpu_time(limits.cpu_s)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # a machine without memory is to end this first, not the trainer
    os.set_inheritable(tell, False)
    _tell(tell, port)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}")


def listen(pid: int, port: int, tell: int) -> None:
    """Hand over a socket that listens on loopback in the network of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    places = [f"/proc/{pid}/ns/{name}" for name in ("user", "net")]
    if os.readlink(places[0]) == os.readlink("/proc/self/ns/user"):
        del places[0]
    for descriptor in [os.open(place, os.O_RDONLY) for place in places]:
        if libc.setns(descriptor, 0):
            sys.exit(f"setns: {os.strerror(ctypes.get_errno())}")
    _tell(tell, port)


def _tell(tell: int, port: int) -> None:
    """Say that a program begins, and hand over what listens for it; without a port, as always, nothing is loaded for that."""
    if not port:
        os.write(tell, b"1")
        return
    import socket

    with socket.socket(fileno=os.dup(tell)) as told, socket.create_server((LOOPBACK, port)) as listener:
        socket.send_fds(told, [b"1"], [listener.fileno()])


def _outlive(program: int, owner: int) -> NoReturn:
    """Collect orphans until the program ends, then end as it did; the system ends what is left before anyone sees the end.

    The end of the owner is seen at a pipe: its death signal is refused where the sandbox has another user.
    """
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # so that the program cannot change this process
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def guard(owner: int, wait_s: float, words: list[str]) -> NoReturn:
    """Run a program that itself runs others in containers, and end as it does.

    Args:
        owner: End of a pipe. When it closes, the programs in containers are killed, again and again, so that the program fails and
            removes what it made.
        wait_s: Seconds after which it is killed itself.
        words: The program and its arguments.
    """
    become("agentrl-guard", death_signal=0)
    os.set_inheritable(owner, False)
    program = os.posix_spawnp(words[0], words, os.environ)
    threading.Thread(target=_abort, args=(owner, wait_s), daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(os.waitstatus_to_exitcode(status) % 256)


def _abort(owner: int, wait_s: float) -> None:
    os.read(owner, 1)
    outside = os.readlink("/proc/self/ns/pid")
    for _ in range(int(wait_s / ABORT_AGAIN_S)):
        send((pid for pid in _descendants() if _namespace(pid) not in (outside, "")), signal.SIGKILL)
        time.sleep(ABORT_AGAIN_S)
    send(_descendants(), signal.SIGKILL)


def _descendants() -> list[int]:
    return [pid for pid in families(processes(), [os.getpid()])[os.getpid()] if pid != os.getpid()]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _end_with(owner: int) -> NoReturn:
    os.read(owner, 1)
    os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == GUARD:
        guard(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    elif sys.argv[1] == LISTEN:
        listen(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(ProcessLimits(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
