"""Files of a directory at an address: any file system that fsspec knows (``s3://``, ``gs://``, ``file://``, a mounted folder).

Every operation is tried again after a growing random pause, because object stores refuse requests now and then.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.core.manifest import MANIFEST, FileEntry, differing_files, parse_manifest, sync

T = TypeVar("T")

ATTEMPTS = 5
PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Before attempt n + 1 there is a random pause of up to ``PAUSE_S * 2**(n - 1)``, at most `MAX_PAUSE_S`."""
PROBE = "agentrl-probe"
"""Name of a file that is written to learn whether an address can be written to, and removed."""


def is_address(text: str) -> bool:
    """Return true for an address with a protocol, such as ``s3://bucket/folder``."""
    return "://" in text


def absolute(address: str) -> str:
    """Return the address without a slash at its end; a path of this machine is made absolute, so that other processes find it."""
    return address.rstrip("/") if is_address(address) else os.path.abspath(os.path.expanduser(address))


def check_address(flag: str, address: str) -> None:
    """Check that this Python has what the address needs; nothing is opened.

    Raises:
        ConfigError: If the protocol is unknown, or its package is not installed.
    """
    from fsspec.core import split_protocol
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(split_protocol(address)[0])
    except ValueError:
        raise ConfigError(flag, address, "is of a protocol that fsspec does not know", "Use s3://, gs://, az:// or a path.") from None
    except ImportError as error:
        raise ConfigError(flag, address, f"needs a package: {error}", "Install it on every machine, or use a mounted folder.") from error


def check_reachable(flag: str, address: str) -> None:
    """Write a small file to the address and remove it.

    Raises:
        ConfigError: If it cannot be written.
    """
    try:
        put_text(address, PROBE, "")
        _removed(address, PROBE)
    except CheckpointError as error:
        raise ConfigError(
            flag, address, f"cannot be used: {error}", "Mend the address or its credentials, or leave the flag out."
        ) from error


def put_files(files: Mapping[str, FileEntry], folder: str | Path, address: str) -> int:
    """Copy files of a folder to an address, and return their bytes.

    Raises:
        CheckpointError: If one cannot be copied after all attempts.
    """
    for name, entry in files.items():
        _tried(partial(_put, Path(folder) / name, address, name, entry["size"]), f"{name} cannot be copied to {address}")
    return sum(entry["size"] for entry in files.values())


def get_files(files: Mapping[str, FileEntry], address: str, folder: str | Path) -> None:
    """Copy files from an address into a folder, flush them, and compare them with their entries.

    Raises:
        CheckpointError: If one cannot be copied, or is not what its entry says.
    """
    for name in files:
        _tried(partial(_get, address, name, Path(folder) / name), f"{name} cannot be read from {address}")
    if wrong := differing_files(files, folder):
        remedy = "remove this folder there to go on from the one before"
        raise CheckpointError(f"{address}/{wrong[0]} is not what {MANIFEST} says: it was cut off or changed; {remedy}")


def put_text(address: str, name: str, text: str) -> None:
    """Write a small file.

    Raises:
        CheckpointError: If it cannot be written.
    """

    def work() -> None:
        system, root = _open(address)
        system.makedirs(root, exist_ok=True)
        system.pipe_file(f"{root}/{name}", text.encode())

    _tried(work, f"{name} cannot be written to {address}")


def get_text(address: str, name: str) -> str | None:
    """Return the text of a small file; `None` if there is none.

    Raises:
        CheckpointError: If it cannot be read.
    """

    def work() -> str | None:
        system, root = _open(address)
        try:
            content: bytes = system.cat_file(f"{root}/{name}")
        except FileNotFoundError:
            return None
        return content.decode(errors="replace")

    return _tried(work, f"{name} cannot be read from {address}")


def manifest_at(address: str) -> dict[str, FileEntry] | None:
    """Return the manifest of the directory at an address; `None` if it has none, or a part of one, and so is not complete.

    Raises:
        CheckpointError: If the address cannot be read.
    """
    text = get_text(address, MANIFEST)
    try:
        return None if text is None else parse_manifest(text)
    except ValueError:
        return None


def names_at(address: str, prefix: str) -> list[str]:
    """Return the names of what is at an address and begins with `prefix`, the last in the alphabet first.

    Raises:
        CheckpointError: If the address cannot be read; a folder that is not there is empty.
    """

    def work() -> list[str]:
        system, root = _open(address)
        # fsspec remembers listings, and other processes write to this address too.
        system.invalidate_cache()
        try:
            found = system.ls(root, detail=False)
        except FileNotFoundError:
            return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
        return sorted((name for name in names if name.startswith(prefix)), reverse=True)

    return _tried(work, f"{address} cannot be read")


def remove_at(address: str) -> None:
    """Remove a directory, its manifest first, so that what is left of it at any time is not taken for complete.

    Raises:
        CheckpointError: If it cannot be removed.
    """

    def work() -> None:
        system, root = _open(address)
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(f"{root}/{MANIFEST}")
        system.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            system.rm(root, recursive=True)

    _tried(work, f"{address} cannot be removed")


def _put(path: Path, address: str, name: str, size: int) -> None:
    system, root = _open(address)
    system.put_file(str(path), f"{root}/{name}")
    system.invalidate_cache()
    there = system.info(f"{root}/{name}")["size"]
    if there != size:
        raise OSError(f"{there} of {size} bytes arrived")


def _get(address: str, name: str, path: Path) -> None:
    system, root = _open(address)
    path.parent.mkdir(parents=True, exist_ok=True)
    system.get_file(f"{root}/{name}", str(path))
    sync(path)


def _removed(address: str, name: str) -> None:
    system, root = _open(address)
    with contextlib.suppress(Exception):  # some accounts may write and not remove
        system.rm_file(f"{root}/{name}")


def _open(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the folder within it."""
    from fsspec.core import split_protocol, url_to_fs

    # Object stores have no folders that would have to be made first; a path of this machine has.
    local = split_protocol(address)[0] in (None, "file", "local")
    system, root = url_to_fs(address, **({"auto_mkdir": True} if local else {}))
    return system, str(root).rstrip("/")


def _tried(work: Callable[[], T], problem: str) -> T:
    """Call `work` until it succeeds, at most `ATTEMPTS` times."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return work()
        except Exception as error:  # the file systems of others raise errors of any type
            if attempt == ATTEMPTS:
                raise CheckpointError(f"{problem}: {type(error).__name__}: {error}") from error
            time.sleep(random.uniform(0.0, min(MAX_PAUSE_S, PAUSE_S * 2 ** (attempt - 1))))
    raise AssertionError("there is at least one attempt")
