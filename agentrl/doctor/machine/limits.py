"""Limits of the system that runs meet: memory, shared memory, open files, processes, disks, clocks and ports."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil

from agentrl.core.disk import size_text
from agentrl.core.operating_system import CGROUP, SHARED_MEMORY, clock_is_kept, on_linux, usable_cores
from agentrl.core.paths import cache_folder
from agentrl.core.process import LOOPBACK, own_address
from agentrl.doctor.machine.findings import Finding, Level, judged

PART = "limits"
GIB = 2**30
OPEN_FILES, PROCESSES = 4096, 1024
"""Fewest open files and processes with which hundreds of episodes, their connections and Ray get along."""
SHARED_GIB, MEMORY_GIB = 1.0, 4.0
DISK_GIB, FULL_GIB = 10.0, 1.0
"""Free space below which a folder is a warning, and wrong."""
SKEW_S = 2.0
"""Seconds between two clocks from which times of records, deadlines and tokens are not what they seem."""
ANSWER_S = 3.0
BUSY = 1.5
"""Programs per core that want to run, from which measured times say little about the machine."""


def limits() -> Iterator[Finding]:
    """Look at everything that the system limits."""
    yield processors()
    yield load()
    yield memory()
    if on_linux():
        yield shared_memory()
    yield open_files()
    yield processes()
    for name, folder in used_folders():
        yield disk(name, folder)
    yield file_clock(Path.cwd())
    yield clock_source()
    yield listening(LOOPBACK, "ports of loopback")
    yield listening(own_address(), "ports of this machine's address")


def used_folders() -> Iterator[tuple[str, Path]]:
    """Yield the folders that runs write to, one per file system."""
    seen: set[int] = set()
    for name, folder in (("disk of runs", Path.cwd()), ("temporary files", Path(tempfile.gettempdir())), ("cache", cache_folder())):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        device = there.stat().st_dev
        if device not in seen:
            seen.add(device)
            yield name, there


def processors() -> Finding:
    """Cores that this process may use, by its affinity and the limit of its container."""
    usable, present = usable_cores(), os.cpu_count() or 1
    quota = _quota(CGROUP)
    cores = min(float(usable), quota) if quota else float(usable)
    found = f"{cores:g} of {present} cores"
    remedy = "Give the container whole cores (docker run --cpus), or set OMP_NUM_THREADS to the cores that it has."
    return judged(PART, "processors", found, warning=cores < 2, remedy=remedy)


def _quota(cgroup: Path) -> float:
    """Return the cores that a container may use; 0 without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return 0.0 if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        return 0.0


def load() -> Finding:
    """Programs that want to run at the same time, over the last minute."""
    wanted, present = os.getloadavg()[0], os.cpu_count() or 1
    remedy = "End other programs first: rates are too low meanwhile, and trials may not end within their time."
    return judged(PART, "load", f"{wanted:.1f} on {present} cores", warning=wanted > BUSY * present, remedy=remedy)


def memory(cgroup: Path = CGROUP) -> Finding:
    """Memory that is free, within the limit of the container."""
    machine = psutil.virtual_memory()
    free, total = float(machine.available), float(machine.total)
    with contextlib.suppress(OSError, ValueError):
        limit, held = (float((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        # Pages of files that nobody uses count as held, and the kernel gives them back when memory is needed.
        cached = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)
        free, total = min(free, limit - held + (float(cached[1]) if cached else 0.0)), min(total, limit)
    remedy = "End other programs, or give the container more (docker run --memory)."
    found = f"{size_text(free)} of {size_text(total)} free"
    return judged(PART, "memory", found, wrong=free < GIB, warning=free < MEMORY_GIB * GIB, remedy=remedy)


def shared_memory(root: Path = SHARED_MEMORY) -> Finding:
    """Memory for files that processes share: weights on their way, Ray's objects, NCCL."""
    remedy = "Give the container some: docker run --shm-size 16g, or --ipc host; in a pod, an emptyDir of medium Memory."
    return _room("shared memory", root, wrong_below=2**26, warning_below=SHARED_GIB * GIB, remedy=remedy)


def open_files() -> Finding:
    """Files and connections that a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding(part=PART, name="open files", found="no limit")
    if hard == resource.RLIM_INFINITY or hard > soft:
        remedy = f"Before the run: ulimit -n {65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)}."
    else:
        remedy = "Raise the limit of the container (docker run --ulimit nofile=65536) or of the service."
    return judged(PART, "open files", f"{soft:,}", wrong=soft < 1024, warning=soft < OPEN_FILES, remedy=remedy)


def processes(cgroup: Path = CGROUP) -> Finding:
    """Processes and threads that this user or container may start."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    allowed = [] if soft == resource.RLIM_INFINITY else [soft]
    with contextlib.suppress(OSError, ValueError):
        allowed.append(int((cgroup / "pids.max").read_text()))
    fewest = min(allowed, default=0)
    remedy = "Raise ulimit -u, or the limit of the container (docker run --pids-limit)."
    found = f"{fewest:,}" if allowed else "no limit"
    return judged(PART, "processes", found, warning=bool(allowed) and fewest < PROCESSES, remedy=remedy)


def disk(name: str, folder: Path) -> Finding:
    """Room for checkpoints, records and temporary files."""
    remedy = "Make room there, or write elsewhere: --run-dir for runs, TMPDIR for temporary files, AGENTRL_CACHE for the cache."
    return _room(name, folder, wrong_below=FULL_GIB * GIB, warning_below=DISK_GIB * GIB, remedy=remedy)


def _room(name: str, folder: Path, *, wrong_below: float, warning_below: float, remedy: str) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
        # Free space says nothing about quotas and mounts that can only be read, so a page is written.
        with _file_in(folder):
            pass
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror or error}"
        return Finding(part=PART, name=name, level=Level.WRONG, found=found, remedy=remedy)
    found = f"{size_text(usage.free)} of {size_text(usage.total)} free at {folder}"
    return judged(PART, name, found, wrong=usage.free < wrong_below, warning=usage.free < warning_below, remedy=remedy)


@contextlib.contextmanager
def _file_in(folder: Path) -> Iterator[IO[bytes]]:
    """A file with a page of bytes, which is gone after the block."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".agentrl-doctor-") as file:
        file.write(b"x" * 4096)
        file.flush()
        yield file


def file_clock(folder: Path, now: Callable[[], float] = time.time) -> Finding:
    """Time of a new file, against that of this machine; a server of files has a clock of its own."""
    remedy = "Set the clock, or start its service: timedatectl set-ntp true, or chronyd; the file server's too."
    before = now()
    try:
        with _file_in(folder) as file:
            written = os.fstat(file.fileno()).st_mtime
    except OSError as error:
        return Finding(part=PART, name="clock of files", level=Level.UNTRIED, found=f"{folder} cannot be written: {error}")
    skew = written - min(max(written, before), now())
    # Times of files are those of the last tick of the clock, so a few milliseconds early.
    return judged(PART, "clock of files", f"{skew:+.1f} s from this machine's", wrong=abs(skew) > SKEW_S, remedy=remedy)


def clock_source(newest: float | None = None, now: Callable[[], float] = time.time) -> Finding:
    """The date, which cannot be before that of agentrl's own files, and the kernel's opinion of its clock."""
    remedy = "Set the clock, or start its service: timedatectl set-ntp true, or chronyd."
    if newest is None:
        newest = max(path.stat().st_mtime for path in Path(__file__).parent.glob("*.py"))
    behind = newest - now()
    if behind > SKEW_S:
        found = f"{behind:,.0f} s before the date of agentrl's own files"
        return Finding(part=PART, name="clock", level=Level.WRONG, found=found, remedy=remedy)
    states = {True: "synchronised", False: "not synchronised by the kernel", None: "after the date of agentrl's own files"}
    return Finding(part=PART, name="clock", found=states[clock_is_kept()])


def listening(address: str, name: str) -> Finding:
    """A port that listens at an address and is connected to, as processes of a run do."""
    remedy = (
        "Allow connections from this machine to itself in its firewall, and give its host name the right address; "
        "with several networks name one by NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."
    )
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(ANSWER_S)
            port = server.getsockname()[1]
            with socket.create_connection((address, port), timeout=ANSWER_S) as client:
                other, _ = server.accept()
                with other:
                    client.sendall(b"agentrl")
                    other.settimeout(ANSWER_S)
                    heard = other.recv(7)
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(part=PART, name=name, level=Level.WRONG, found=f"no connection to {address}: {reason}", remedy=remedy)
    return judged(PART, name, f"a connection to {address} works", wrong=heard != b"agentrl", remedy=remedy)
