"""Counters of the system: processes of a container, and those that it ended for want of memory, in a container or on the machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def folder_of(pid: int, controller: str) -> Path | None:
    """Return the control group of a process, in the second version of them or the first; `None` if it cannot be read."""
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines()]
        # A machine may have both versions, and a controller belongs to one of them: the first is looked at before the second.
        for _, controllers, path in sorted(lines, key=lambda line: not line[1]):
            root = ROOT / controller if controller in controllers.split(",") else ROOT
            folder = root / path.lstrip("/")
            if (controllers == "" or root != ROOT) and (folder / "cgroup.procs").is_file():
                return folder
    return None


def num_processes(group: Path) -> int | None:
    """Return the number of processes of a group and those below; `None` if they cannot be read."""
    try:
        return sum(len(file.read_text(encoding="ascii").split()) for file in group.rglob("cgroup.procs"))
    except OSError:
        return None


def num_killed(group: Path) -> int:
    """Return the number of processes that the system has ended because the group was out of memory."""
    return _counted(group / "memory.events") or _counted(group / "memory.oom_control")


def num_killed_of_machine() -> int:
    """Return the number of processes that the system has ended since its start because it, or a control group, was out of memory."""
    return _counted(Path("/proc/vmstat"))


def _counted(file: Path) -> int:
    with contextlib.suppress(OSError):
        words = dict(line.split() for line in file.read_text(encoding="ascii").splitlines())
        return int(words.get("oom_kill", 0))
    return 0
