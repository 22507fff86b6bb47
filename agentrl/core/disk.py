"""Full file systems: recognised by how libraries report them, and named with what is free and what is needed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

MIB = 2**20
FULL = (errno.ENOSPC, errno.EDQUOT)
LITTLE = MIB
"""Bytes left on a file system from which a write of unknown size that failed is put down to them."""


def write_problem(error: BaseException, path: Path, needed: int = 0) -> str:
    """Return why a file or directory could not be written: the error, or the file system that is full with its figures.

    Args:
        error: The error of the write; torch reports a full disk as a position in the file.
        path: What was to be written, whether it is there or not.
        needed: Bytes of the whole, 0 if unknown.
    """
    said = str(error)
    place = _existing(path)
    free = shutil.disk_usage(place).free
    full = getattr(error, "errno", None) in FULL or os.strerror(errno.ENOSPC) in said or free < max(needed, LITTLE)
    return f"{full_text(place, needed)} ({said})" if full else said


def full_text(path: Path, needed: int = 0) -> str:
    """Return which file system lacks room, and how much."""
    place = _existing(path)
    usage = shutil.disk_usage(place)
    wanted = f", and {size_text(needed)} are needed" if needed else ""
    return f"the file system at {mount_point(place)} is full: {size_text(usage.free)} of {size_text(usage.total)} are free{wanted}"


def mount_point(path: Path) -> Path:
    """Return the directory at which the file system of a path begins."""
    path = _existing(path).resolve()
    return next(place for place in (path, *path.parents) if place.is_mount())


def free_bytes(path: Path) -> int:
    """Return the bytes that are free where a path is, or will be."""
    return shutil.disk_usage(_existing(path)).free


def directory_bytes(path: Path) -> int:
    """Return the bytes of all files below a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def size_text(size: float) -> str:
    """Return bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / MIB:.1f} MiB"


def _existing(path: Path) -> Path:
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
