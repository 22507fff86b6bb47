"""Fingerprints of files that a run reads: the same for the same content, wherever it is and whenever it was written."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

ACCEPT = "--accept-changed-inputs"
"""Flag with which a run goes on although what it reads is not what it was."""
WHOLE_BYTES = 2**24
"""Size up to which a whole file is read."""
SAMPLES, SAMPLE_BYTES = 64, 2**16
"""Parts of a larger file that are read, evenly over it, and their size: weights that are trained further differ in all of them."""


def fingerprint_of(path: Path) -> str:
    """Return a fingerprint of a file's size and content.

    Raises:
        OSError: If it cannot be read.
    """
    size = path.stat().st_size
    digest = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            digest.update(file.read())
        else:
            for number in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def fingerprints_of(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Return the fingerprints of the files of a folder whose names fit one of the patterns, by their names."""
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path.name: fingerprint_of(path) for path in sorted(files)}
