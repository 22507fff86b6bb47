"""The standard streams of the process, which may be closed at its start or by user code."""

from __future__ import annotations

import os
import sys

STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}
"""Names in `sys` of the standard streams, and their numbers."""


def closed_streams() -> tuple[str, ...]:
    """Return the names of the standard streams that are closed."""
    return tuple(
        name for name, number in STREAMS.items() if getattr(sys, name) is None or getattr(sys, name).closed or not _is_open(number)
    )


def open_stream(name: str, source: int) -> None:
    """Open a standard stream for what the descriptor `source` is open for; child processes inherit it."""
    number = STREAMS[name]
    os.dup2(source, number)
    os.set_inheritable(number, True)  # a descriptor that is copied to itself keeps what it was opened with
    setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
