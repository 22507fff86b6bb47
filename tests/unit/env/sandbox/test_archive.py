"""Files of containers come and go as archives, in which a program may have put anything."""

from __future__ import annotations

import io
import tarfile

import pytest

from agentrl.core.errors import SandboxError
from agentrl.env.sandbox.container import archived, file_in


def archive_of(member: tarfile.TarInfo, data: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_a_file_comes_back_as_it_was() -> None:
    data = archived("a/b", b"123")
    assert file_in(data, "a/b", 3) == b"123"
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert [(member.name, member.mode, member.uid) for member in archive] == [("a/b", 0o644, 0)]


def test_a_link_or_nothing_is_no_plain_file() -> None:
    link = tarfile.TarInfo("b")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    for data in (archive_of(link), archive_of(tarfile.TarInfo("b"))[:0] + b"\0" * 10240):
        with pytest.raises(SandboxError, match="'b' of a sandbox is no plain file"):
            file_in(data, "b", 100)


def test_a_large_file_is_refused_although_its_archive_is_cut_off() -> None:
    data = archived("b", b"x" * 3000)
    with pytest.raises(SandboxError, match="'b' holds more than 2999 bytes"):
        file_in(data[:1024], "b", 2999)
    assert len(file_in(data, "b", 3000)) == 3000
