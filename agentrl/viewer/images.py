"""Images of recorded episodes, from data URLs or from the files that a record names."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from agentrl.inspect.episode import find_records, images_of
from agentrl.inspect.reader import RunReader

MAX_BYTES = 20 * 2**20
SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF87a": "image/gif", b"GIF89a": "image/gif"}


def image_kind(data: bytes) -> str | None:
    """Return the media type of an image by its first bytes; `None` if a browser should not be given it as an image."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in SIGNATURES.items() if data.startswith(start)), None)


def episode_image(run: RunReader, episode: str, number: int, attempt: int | None = None) -> tuple[bytes, str] | None:
    """Return image `number` of an episode with its media type; `None` if there is none, or it is something else than an image.

    The images are those of the task and then those of observations, as `agentrl.inspect.episode.images_of` counts them.
    """
    images = images_of(find_records(run, episode, attempt))
    if not 0 <= number < len(images):
        return None
    data = _bytes(images[number].source, run)
    kind = image_kind(data)
    return (data, kind) if kind is not None else None


def _bytes(image: Any, run: RunReader) -> bytes:
    if not isinstance(image, str):
        return b""
    if image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            return b""
    if not run.settings:  # a file of another system, which may name any file of this machine
        return b""
    try:
        path = _confined(image, run)
        return path.read_bytes() if path is not None and path.is_file() and path.stat().st_size <= MAX_BYTES else b""
    except (OSError, ValueError, RuntimeError):  # resolving a circle of links is a RuntimeError
        return b""


def _confined(image: str, run: RunReader) -> Path | None:
    """Return the file of an image, links followed, if it is below the run's directory or the folder that the run was started in.

    A run directory may come from somebody else, and must not show other files of whoever looks at it.
    """
    launches = run.launches
    began = Path(str(launches[-1].get("folder") or run.path) if launches else run.path).resolve()
    # A run that was started in the root folder would allow every file.
    allowed = [run.path.resolve(), *([began] if began != Path(began.anchor) else [])]
    path = (began / image).resolve()
    return path if any(path.is_relative_to(folder) for folder in allowed) else None
