"""Differences between operating systems. agentrl runs whole on Linux; elsewhere what has no counterpart is left out, or refused by name.

Calls that start, limit and end processes have a file of their own, `agentrl.env.isolation.system`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError

SYSTEM = os.environ.get("AGENTRL_ASSUME_SYSTEM", sys.platform)
"""Operating system, as in `sys.platform`: ``linux`` or ``darwin``. The variable is for tests of what happens on another one."""
CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")
PARENT_POLL_S = 0.5
_UNSYNCHRONISED = 5
_SET_DEATH_SIGNAL = 1


def on_linux() -> bool:
    """Return True on Linux."""
    return SYSTEM == "linux"


def require_linux(field: str, value: str, remedy: str) -> None:
    """Refuse a setting that needs Linux.

    Raises:
        ConfigError: On another operating system, with its name and the remedy.
    """
    if not on_linux():
        raise ConfigError(field, value, f"needs Linux, and this is {SYSTEM}", remedy)


def told_by_kernel(place: str) -> str:
    """Return the text of a file under ``/proc``; empty where there is none."""
    if on_linux():
        with contextlib.suppress(OSError):
            return Path("/proc", place).read_text(encoding="utf-8", errors="replace")
    return ""


def memory_root() -> Path:
    """Return a directory whose files stay in memory: shared memory if there is any, else the one for temporary files."""
    return SHARED_MEMORY if on_linux() and os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def free_bytes() -> float:
    """Return the memory that new programs can have without others losing theirs."""
    import psutil

    return float(psutil.virtual_memory().available)


def container_limit(name: str) -> float | None:
    """Return a limit of the container that this machine is, such as ``memory.max`` in bytes; `None` without one."""
    try:
        return float((CGROUP / name).read_text(encoding="ascii")) if on_linux() else None
    except (OSError, ValueError):  # "max" is no number
        return None


def usable_cores() -> int:
    """Return the cores that this process may use, by its affinity where the system has one."""
    chosen: Any = getattr(os, "sched_getaffinity", None) if on_linux() else None
    return len(chosen(0)) if chosen else os.cpu_count() or 1


def processor_name() -> str:
    """Return the processor's name, or its kind where the system does not tell."""
    model = re.search(r"^model name\s*:\s*(.+)$", told_by_kernel("cpuinfo"), re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def nvidia_devices() -> int:
    """Return the number of NVIDIA devices that the driver lists."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if on_linux() else 0


def first_outgoing_port() -> int:
    """Return the first of the ports that the system gives to outgoing connections; 0 if it does not tell."""
    words = told_by_kernel("sys/net/ipv4/ip_local_port_range").split()
    return int(words[0]) if words and words[0].isdigit() else 0


def descriptors_folder() -> Path:
    """Return the folder that lists the open files of the calling process."""
    return Path("/proc/self/fd" if on_linux() else "/dev/fd")


def open_paths(pid: int) -> list[str]:
    """Return the paths of the files that a process has open.

    Raises:
        OSError: If they cannot be looked at.
    """
    if on_linux():
        return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    import psutil

    return [file.path for file in psutil.Process(pid).open_files()]


def peak_memory_gib() -> float:
    """Return the most memory that this process has had in RAM, GiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, on macOS in bytes
    return most / (2**20 if on_linux() else 2**30)


def held_alone_bytes() -> int:
    """Return the memory that this process holds alone, once the free part of it is given back; elsewhere than on Linux what is in RAM."""
    import psutil

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if on_linux() else None
    if trim is not None:
        trim(0)
    private = re.search(r"^Anonymous:\s*(\d+) kB", told_by_kernel("self/smaps_rollup"), re.MULTILINE)
    return int(private[1]) * 2**10 if private else int(psutil.Process().memory_info().rss)


def waited_for_cpu_s() -> float:
    """Return the seconds that this thread was ready to run and had no CPU; 0.0 where the kernel does not tell."""
    words = told_by_kernel("thread-self/schedstat").split()
    return int(words[1]) / 1e9 if len(words) > 1 else 0.0


def clock_is_kept() -> bool | None:
    """Return True if the kernel's clock follows a time server; `None` where it cannot be asked."""
    if not on_linux():
        return None
    try:
        library: Any = ctypes.CDLL(None, use_errno=True)
        state = library.adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != _UNSYNCHRONISED)


def end_with_parent(parent: int, *, started_by_thread: bool = False) -> None:
    """Have the calling process end when its parent does, however that comes: killed at once on Linux, elsewhere within half a second.

    Args:
        parent: Process id that the parent had when it started this process; if it has ended by now, so does this process.
        started_by_thread: True if a thread of the parent started this process that may end before it. Linux takes the end of that thread
            for the parent's, so then it is done as elsewhere.
    """
    if on_linux() and not started_by_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_outlive, args=(parent,), name="agentrl-parent", daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _outlive(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
