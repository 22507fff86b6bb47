"""Single files as tar archives, the form in which podman and docker take and give them."""

from __future__ import annotations

import io
import tarfile

from agentrl.core.errors import SandboxError
from agentrl.env.sandbox.files import too_large

MARGIN = 64 * 1024
"""Bytes that an archive of one file has besides the file's."""


def of_file(name: str, data: bytes) -> bytes:
    """Return an archive with one file, which root owns and everyone may read."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), 0o644
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def only_file(data: bytes, name: str, limit: int) -> bytes:
    """Return the content of the file in an archive, which may be cut off.

    Raises:
        SandboxError: If it is no plain file, or too large.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
            member = archive.next()
            if member is None or not member.isreg():
                raise SandboxError(f"{name!r} of a sandbox is no plain file")
            if member.size > limit:
                raise too_large(name, limit)
            file = archive.extractfile(member)
            assert file is not None
            return file.read()
    except tarfile.TarError as error:
        raise SandboxError(f"{name!r} of a sandbox cannot be read: {error}") from error
