"""Sizes and hashes of the files of a directory: computed and compared in threads, and shared out among processes.

A file of up to `PART` bytes has the SHA-256 of its content. A larger one has the SHA-256 of its parts' SHA-256 digests, one after the
other, so that several threads hash one file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.errors import CheckpointError

MANIFEST = "manifest.json"
PART = 64 * 2**20
"""Bytes of a part of a large file."""
BLOCK = 2**20
"""Bytes that a thread reads at once."""
MAX_THREADS = 8

FileEntry: TypeAlias = dict[str, Any]
"""A file in a manifest: ``size``; ``sha256``, or ``sha256_of_parts`` and ``part_bytes``; ``rank``, if a rank of the learner wrote it."""


def flush_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Flush files of a folder to disk, and return the entry of each.

    Raises:
        OSError: If one cannot be read or flushed.
    """
    names = sorted(names)
    entries: dict[str, FileEntry] = {}
    for name in names:
        size = (folder / name).stat().st_size
        entries[name] = {"size": size, **({"part_bytes": PART} if size > PART else {})}
    with _threads() as pool:
        for _ in pool.map(sync, [folder / name for name in names]):
            pass
        for name, digest in _digests(folder, entries, pool).items():
            entries[name]["sha256_of_parts" if "part_bytes" in entries[name] else "sha256"] = digest
    return entries


def differing_files(files: Mapping[str, FileEntry], folder: str | Path) -> list[str]:
    """Return the names of the files in `folder` that are missing or are not what their entries say.

    Raises:
        CheckpointError: If the entries are of another form.
    """
    folder = Path(folder)
    try:
        wrong = [name for name, entry in files.items() if _size(folder / name) != entry["size"]]
        same_size = {name: entry for name, entry in files.items() if name not in wrong}
        with _threads() as pool:
            found = _digests(folder, same_size, pool)
        wrong += [
            name for name, entry in same_size.items() if found[name] != entry["sha256_of_parts" if "part_bytes" in entry else "sha256"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is not complete: {MANIFEST} is of another form: {type(error).__name__}: {error}") from error
    return sorted(wrong)


def read_manifest(path: Path) -> dict[str, FileEntry]:
    """Return the entries of a directory's manifest.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        return parse_manifest(path.joinpath(MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not complete: {type(error).__name__}: {error}") from error


def parse_manifest(text: str) -> dict[str, FileEntry]:
    """Return the entries of a manifest.

    Raises:
        ValueError: If it is no manifest, or a part of one.
    """
    content = json.loads(text)
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(entry, dict) and "size" in entry for entry in files.values()):
        raise ValueError(f"{MANIFEST} lists no files")
    return files


def manifest_text(files: Mapping[str, FileEntry]) -> str:
    """Return the manifest with these entries."""
    return json.dumps({"files": dict(sorted(files.items()))}, indent=2) + "\n"


def shares(files: Mapping[str, FileEntry], count: int) -> list[dict[str, FileEntry]]:
    """Divide files among `count` ranks: each gets what it wrote, or, if there were other ranks then, about as many bytes as the others."""
    parts: list[dict[str, FileEntry]] = [{} for _ in range(count)]
    by_writer = {entry.get("rank") for entry in files.values()} == set(range(count))
    load = [0] * count
    for name, entry in sorted(files.items(), key=lambda item: (-item[1]["size"], item[0])):
        rank = entry["rank"] if by_writer else load.index(min(load))
        parts[rank][name] = entry
        load[rank] += entry["size"]
    return parts


def sync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="hash")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _digests(folder: Path, entries: Mapping[str, FileEntry], pool: ThreadPoolExecutor) -> dict[str, str]:
    """Return the hash of each file, in the form that its entry asks for; empty for one that cannot be read."""
    parts: dict[str, list[Future[bytes]]] = {}
    for name, entry in entries.items():
        length = int(entry.get("part_bytes", max(1, entry["size"])))
        # An empty file has one part too, so that it has a hash.
        parts[name] = [pool.submit(_digest, folder / name, start, length) for start in range(0, max(1, entry["size"]), length)]
    found: dict[str, str] = {}
    for name, futures in parts.items():
        digests = [future.result() for future in futures]
        whole = hashlib.sha256(b"".join(digests)) if "part_bytes" in entries[name] else None
        found[name] = "" if b"" in digests else digests[0].hex() if whole is None else whole.hexdigest()
    return found


def _digest(path: Path, start: int, length: int) -> bytes:
    """Return the SHA-256 of a part of a file; empty if it cannot be read."""
    digest, buffer = hashlib.sha256(), bytearray(BLOCK)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while length > 0 and (count := file.readinto(memoryview(buffer)[: min(BLOCK, length)])):
                digest.update(memoryview(buffer)[:count])
                length -= count
    except OSError:
        return b""
    return digest.digest()
