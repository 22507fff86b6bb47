"""The program between a fork and a command: it limits its process, and becomes the command, so that no code of a busy process runs between.

Run as ``python -I -S launcher.py LIMITS OWNER TELL PORT PROGRAM ARGUMENT...``, it limits its process and becomes the program.
Run as ``... guard OWNER WAIT PROGRAM ARGUMENT...`` it stands over a program that makes containers, and as ``... listen PID PORT TELL``
it listens in one. It starts for each command of a sandbox, so it loads only modules that take no time.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import os
import resource
import sys
import time

TYPE_CHECKING = False  # as typing has it, which would be loaded for it
if TYPE_CHECKING:
    from collections.abc import Iterable

MIB = 2**20
LINUX = os.environ.get("AGENTRL_ASSUME_SYSTEM", sys.platform) == "linux"
GUARD, LISTEN = "guard", "listen"
LOOPBACK = "127.0.0.1"
ABORT_AGAIN_S = 0.1
PAGE = resource.getpagesize()
SIGKILL = 9
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NAME, _SET_SUBREAPER = 1, 4, 15, 36


def limit(kind: int, value: int) -> None:
    """Limit the calling process, and with it what it will start, in one resource."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def limit_memory(mib: int) -> None:
    """Limit what the calling process takes from now on. Data counts, not address space, much of which is only reserved."""
    if LINUX:
        with open("/proc/self/statm", encoding="ascii") as file:
            data = int(file.read().split()[5]) * PAGE
        limit(resource.RLIMIT_DATA, data + mib * MIB)


def limit_all(memory_mib: int, file_mib: int, open_files: int) -> None:
    """Limit the calling process, and with it what it will start, in memory, the size of files, and open ones; it leaves no dump."""
    limit(resource.RLIMIT_CORE, 0)
    limit_memory(memory_mib)
    limit(resource.RLIMIT_FSIZE, file_mib * MIB)
    limit(resource.RLIMIT_NOFILE, open_files)


def begin_cpu_time(cpu_s: float) -> None:
    """Let the calling process use so much CPU time from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    # Only the soft limit: a hard one could not be raised for the next episode of the process.
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + cpu_s) + 1, hard))


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


def _listed(columns: str) -> list[str]:
    """Lines of the table of processes as ``ps`` prints it, for a system that has no /proc."""
    import subprocess

    return subprocess.run(
        ["ps", "-axo", columns], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    ).stdout.splitlines()


def processes() -> dict[int, tuple[int, str, int]]:
    """Every process that is visible by its id: its parent, its state in a letter, and its resident memory in bytes."""
    if not LINUX:
        lines = (line.split() for line in _listed("pid=,ppid=,state=,rss="))
        return {int(pid): (int(parent), state[0], int(resident) * 1024) for pid, parent, state, resident in lines}
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b") ")[2].split()  # the name before may hold anything
                table[int(name)] = int(fields[1]), fields[0].decode(), int(fields[21]) * PAGE
            except (OSError, ValueError, IndexError):
                continue  # it is gone
    return table


def children(pid: int) -> list[int]:
    """The processes that the main thread of a process started and that still are; none if it is gone."""
    if not LINUX:
        return [child for child, (parent, _, _) in processes().items() if parent == pid]
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal; processes that are gone are passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def limits_as_word(limits: dict[str, float]) -> str:
    """Return the limits of `main` as one argument of this program."""
    return ",".join(f"{name}={limits[name]}" for name in ("memory_mib", "cpu_s", "file_mib", "processes", "open_files"))


def main(limits: dict[str, float], owner: int, tell: int, port: int, words: list[str]) -> None:
    """Limit the calling process and have it become a program; the first process of a sandbox starts it instead, and ends as it does.

    Args:
        limits: Limits of the program by name, those of `limits_as_word`.
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
        limit(resource.RLIMIT_NPROC, int(limits["processes"]) + 1)
    become("agentrl-command", death_signal=SIGKILL)
    limit_all(int(limits["memory_mib"]), int(limits["file_mib"]), int(limits["open_files"]))
    begin_cpu_time(limits["cpu_s"])
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # a machine without memory is to end this first, not the trainer
    except OSError:
        pass  # another system, or one that does not allow it
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
    # The system refuses to enter the user namespace that a process is in already. A foreign one comes first, as the right to enter the
    # network comes with it.
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


def _outlive(program: int, owner: int) -> None:
    """Collect orphans until the program ends, then end as it did; the system ends what is left before anyone sees the end.

    The end of the owner is seen at a pipe: its death signal is refused where the sandbox has another user.
    """
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # so that the program cannot change this process
    _thread.start_new_thread(_end_with, (owner,))
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def guard(owner: int, wait_s: float, words: list[str]) -> None:
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
    _thread.start_new_thread(_abort, (owner, wait_s))
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(os.waitstatus_to_exitcode(status) % 256)


def _abort(owner: int, wait_s: float) -> None:
    os.read(owner, 1)
    outside = os.readlink("/proc/self/ns/pid")
    for _ in range(int(wait_s / ABORT_AGAIN_S)):
        send((pid for pid in _descendants() if _namespace(pid) not in (outside, "")), SIGKILL)
        time.sleep(ABORT_AGAIN_S)
    send(_descendants(), SIGKILL)


def _descendants() -> list[int]:
    table, family = processes(), [os.getpid()]
    for pid in family:  # which grows meanwhile
        family += [child for child, (parent, _, _) in table.items() if parent == pid]
    return family[1:]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _end_with(owner: int) -> None:
    os.read(owner, 1)
    os._exit(128 + SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == GUARD:
        guard(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    elif sys.argv[1] == LISTEN:
        listen(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        given = dict(pair.split("=") for pair in sys.argv[1].split(","))
        owner, tell, port = map(int, sys.argv[2:5])
        main({name: float(value) for name, value in given.items()}, owner, tell, port, sys.argv[5:])
