"""Directories and files that are complete under their name, or not there; and directories that are gone when their owner is.

A directory is filled under a temporary name beside its own; `commit_directory` flushes every file, lists them with size
and hash in ``manifest.json``, and renames. Whatever interrupts this, the name leads to the whole or to nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from agentrl.core.disk import write_problem
from agentrl.core.errors import CheckpointError
from agentrl.core.manifest import MANIFEST, FileEntry, differing_files, flush_files, manifest_text, read_manifest, sync

TEMPORARY = ".partial"


def temporary_name(target: Path) -> Path:
    """Return the name of `target` while it is being filled."""
    return target.with_name(f".{target.name}{TEMPORARY}")


def temporary_directory(target: Path) -> Path:
    """Make an empty directory beside `target`, to be filled and then given to `commit_directory`.

    What an interrupted run left there is removed first, so one process at a time may write into a parent directory.

    Raises:
        CheckpointError: If it cannot be made.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".*{TEMPORARY}"):
            if left.is_dir():  # the files are those of `complete_file`, which writes over what is left of them
                shutil.rmtree(left)
        temporary = temporary_name(target)
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {write_problem(error, target)}") from error
    return temporary


def commit_directory(temporary: Path, target: Path, flushed: Mapping[str, FileEntry] | None = None) -> None:
    """Give a filled temporary directory its name; when this returns it survives a crash of the machine.

    The files in `flushed` have been flushed and hashed by who wrote them.

    Raises:
        CheckpointError: If a file cannot be flushed, or `target` exists.
    """
    if target.exists():
        raise CheckpointError(f"{target} cannot be written: {target} exists")
    replace_directory(temporary, target, flushed)


def replace_directory(temporary: Path, target: Path, flushed: Mapping[str, FileEntry] | None = None) -> None:
    """As `commit_directory`, but `target` may exist; what comes between the two renames is mended by `recover_directory`.

    Raises:
        CheckpointError: If a file cannot be flushed; what was there before is intact.
    """
    try:
        _flush_and_list(temporary, flushed or {})
        swap_directory(temporary, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {write_problem(error, target)}") from error


def swap_directory(temporary: Path, target: Path) -> None:
    """Put `temporary` in the place of `target`, which may exist."""
    old = target.with_name(f".{target.name}.old{TEMPORARY}")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a process that was killed before it could
        target.rename(old)
    temporary.rename(target)
    # A rename survives a crash of the machine only once the directory that holds the name is flushed.
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_directory(target: Path) -> None:
    """Restore `target` from the newer complete directory, if `replace_directory` was cut off between its two renames."""
    if target.exists():
        return
    for left in (temporary_name(target), target.with_name(f".{target.name}.old{TEMPORARY}")):
        with contextlib.suppress(CheckpointError, OSError):
            check_directory(left)
            left.rename(target)
            return


def _flush_and_list(directory: Path, flushed: Mapping[str, FileEntry]) -> None:
    """Flush every file that is not flushed yet, and list all in the manifest."""
    names = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    entries = {**flushed, **flush_files(directory, names - flushed.keys() - {MANIFEST})}
    (directory / MANIFEST).write_text(manifest_text(entries), encoding="utf-8")
    sync(directory / MANIFEST)
    for folder in (*(path for path in directory.rglob("*") if path.is_dir()), directory):
        sync(folder)


def remove_directory(target: Path) -> None:
    """Remove a directory so that at no time a part of it has its name; an error is left to the next `temporary_directory`."""
    doomed = target.with_name(f".{target.name}.old{TEMPORARY}")
    try:
        target.rename(doomed)
    except OSError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def check_directory(path: Path, hashed: Callable[[str], bool] = lambda name: True) -> None:
    """Compare a directory with its manifest: the sizes of all files, and the hashes of those whose name `hashed` wants.

    Raises:
        CheckpointError: If a file is missing, differs, or the manifest cannot be read; the message names the file.
    """
    files = read_manifest(path)
    wrong = [name for name, entry in files.items() if not (path / name).is_file() or (path / name).stat().st_size != entry["size"]]
    wrong = wrong or differing_files({name: entry for name, entry in files.items() if hashed(name)}, path)
    if wrong:
        raise CheckpointError(f"{path / wrong[0]} is not what {MANIFEST} says: it was cut off or changed")


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`, renamed to `path` on success and removed on failure."""
    # Beside it, because a file can be renamed within its file system only.
    partial = temporary_name(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file of text, whole or not at all."""
    with complete_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def owned_directory(root: Path) -> tuple[Path, int]:
    """Make a directory under `root` that is this process's as long as it lives.

    Returns:
        The directory, readable by this user alone, and the open lock that says so; the system releases it with the process.
    """
    directory = Path(tempfile.mkdtemp(prefix=_owned_prefix(), dir=root))
    unlocked = directory / "unlocked"
    lock = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # It gets its name once it is locked, because `remove_abandoned` removes a directory whose lock it can take.
    unlocked.rename(directory / "lock")
    return directory, lock


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory for temporary files, and remove it in the end; after kill -9 of this process the next call of another does so."""
    root = Path(tempfile.gettempdir())
    remove_abandoned(root)
    directory, lock = owned_directory(root)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def remove_abandoned(root: Path) -> None:
    """Remove the owned directories under `root` whose owner is gone."""
    for directory in root.glob(f"{_owned_prefix()}*"):
        with contextlib.suppress(OSError):
            # Not through a link: in a folder for temporary files another user may have made a directory of this name.
            lock = os.open(directory / "lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _owned_prefix() -> str:
    return f"agentrl-{os.getuid()}-"
