"""The forms in which a client and a server of sandboxes speak of programs, files and limits; docs/sandbox_server.md describes them."""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
import tarfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl.env.isolation.launcher import MIB
from agentrl.env.sandbox.spec import Command, ExecResult, SandboxSpec

ROOT = "/v1/sandboxes"
WAIT_S = 10.0
"""Seconds that a server waits for the end of an opening or of a program before it says that it goes on."""
LEASE_S = 60.0
"""Seconds without a request about a sandbox after which it is removed."""
MAX_BODY = 64 * MIB
HERE = ("kind", "read")
"""Fields of a spec that a server decides for itself."""


def pack(data: bytes) -> str:
    """Return bytes as text."""
    return base64.b64encode(data).decode("ascii")


def unpack(text: Any) -> bytes:
    """Return the bytes of a text; `ValueError` if it has none."""
    if not isinstance(text, str):
        raise ValueError("is no text in base64")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"is no text in base64: {error}") from error


def pack_folder(folder: Path) -> str:
    """Return a file, or a folder with all that is in it, as an archive in base64."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname="copy")
    return pack(buffer.getvalue())


def unpack_folder(text: Any, target: Path) -> Path:
    """Unpack an archive of `pack_folder` below a folder, and return the path of its content; `ValueError` if it is none."""
    try:
        with tarfile.open(fileobj=io.BytesIO(unpack(text))) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(target, filter="data")  # no names or links that lead outside, no devices, no owners
            else:  # Python before 3.11.4
                archive.extractall(target, [_plain(member) for member in archive])
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"is no archive: {error}") from error
    return target / "copy"


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a file or a folder of an archive as one of this user; `ValueError` for a link, a device, or a name that leads outside."""
    path = PurePosixPath(member.name)
    if not (member.isreg() or member.isdir()) or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"holds {member.name!r}, which is neither a file nor a folder below it; links need Python 3.11.4 or later")
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    member.mode &= 0o755
    return member


def spec_fields(spec: SandboxSpec) -> dict[str, Any]:
    """Return the fields of a spec that a server is told."""
    return {name: value for name, value in asdict(spec).items() if name not in HERE}


def read_spec(values: Any) -> SandboxSpec:
    """Return the spec that a client asks for; `ValueError` if it is none."""
    return SandboxSpec(**_checked(values, SandboxSpec, HERE))


def command_fields(command: Command) -> dict[str, Any]:
    """Return a program as JSON has it."""
    # JSON has no infinite number.
    limit = None if math.isinf(command.timeout_s) else command.timeout_s
    return {**asdict(command), "timeout_s": limit, "stdin": pack(command.stdin), "words": list(command.words)} | {
        "read": None,
        "connect": None,
    }


def read_command(values: Any) -> Command:
    """Return the program that a client asks for; `ValueError` if it is none."""
    if not isinstance(values, Mapping):
        raise ValueError("is no object")
    given = {name: value for name, value in values.items() if name not in ("read", "connect")}
    limit, stdin, words = given.pop("timeout_s", None), unpack(given.pop("stdin", "")), given.pop("words", [])
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ValueError("words: must be a list of texts, the program first")
    if not isinstance(given.get("env", {}), Mapping) or not all(isinstance(value, str) for value in given.get("env", {}).values()):
        raise ValueError("env: must be an object of texts")
    if limit is not None and not isinstance(limit, int | float):
        raise ValueError("timeout_s: must be a number or null")
    checked = _checked({name: value for name, value in given.items() if name != "env"}, Command, ())
    return Command(words=tuple(words), stdin=stdin, timeout_s=math.inf if limit is None else limit, env=given.get("env", {}), **checked)


def result_fields(result: ExecResult) -> dict[str, Any]:
    """Return an outcome as JSON has it."""
    return asdict(result)


def _checked(values: Any, form: type[Any], without: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a dataclass with plain values; `ValueError` for names or types that it does not have."""
    if not isinstance(values, Mapping):
        raise ValueError("is no object")
    defaults = {field.name: field.default for field in fields(form) if field.name not in without}
    for name, value in values.items():
        if name not in defaults:
            raise ValueError(f"there is no field {name!r}; there are {', '.join(defaults)}")
        kind = type(defaults[name])
        if not isinstance(value, (int, float) if kind is float else kind) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(f"{name}: must be of the type {kind.__name__}")
    return dict(values)
