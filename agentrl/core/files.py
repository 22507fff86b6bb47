"""Directories that are complete under their name, or not there.

A directory is filled under a temporary name beside its own; `commit_directory` flushes every file, lists them with size
and hash in ``manifest.json``, and renames. Whatever interrupts this, the name leads to the whole or to nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from agentrl.core.errors import CheckpointError

MANIFEST = "manifest.json"
TEMPORARY = ".partial"


def temporary_directory(target: Path) -> Path:
    """Make an empty directory beside `target`, to be filled and then given to `commit_directory`.

    What an interrupted run left there is removed first, so one process at a time may write into a parent directory.

    Raises:
        CheckpointError: If it cannot be made.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".*{TEMPORARY}"):
            shutil.rmtree(left)
        temporary = target.with_name(f".{target.name}{TEMPORARY}")
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    return temporary


def commit_directory(temporary: Path, target: Path) -> None:
    """Give a filled temporary directory its name; when this returns it survives a crash of the machine.

    Raises:
        CheckpointError: If a file cannot be flushed, or `target` exists.
    """
    try:
        if target.exists():
            raise FileExistsError(f"{target} exists")
        files = {path.relative_to(temporary).as_posix(): _seal(path) for path in _files(temporary)}
        manifest = temporary / MANIFEST
        manifest.write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
        _seal(manifest)
        for directory in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            _sync_directory(directory)
        temporary.rename(target)
        _sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def remove_directory(target: Path) -> None:
    """Remove a directory so that at no time a part of it has its name; an error is left to the next `temporary_directory`."""
    doomed = target.with_name(f".{target.name}.old{TEMPORARY}")
    try:
        target.rename(doomed)
    except OSError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def check_directory(path: Path) -> None:
    """Compare a directory with its manifest, hashes included.

    Raises:
        CheckpointError: If a file is missing, differs, or the manifest cannot be read; the message names the file.
    """
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            if (path / name).stat().st_size != expected["size"] or _sha256(path / name) != expected["sha256"]:
                raise CheckpointError(f"{path / name} is not what {MANIFEST} says: it was cut off or changed")
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not complete: {type(error).__name__}: {error}") from error


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _seal(path: Path) -> dict[str, int | str]:
    """Flush a file to disk; its size and hash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    return {"size": size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
