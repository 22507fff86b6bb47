"""Questions about processes that may end while they are asked."""

import psutil


def still_runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that nobody has collected yet has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def name_of(process: psutil.Process) -> str | None:
    """A process's name; None of one that has ended."""
    try:
        return process.name()
    except psutil.Error:
        return None
