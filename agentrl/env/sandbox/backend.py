"""The kinds of sandboxes behind one face."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from agentrl.env.sandbox.spec import Command, ExecResult


class Backend(Protocol):
    """One sandbox of one kind. `open` comes first and `end` last, also after an `open` that failed."""

    python: str
    """The Python that its programs find."""

    @property
    def folder(self) -> Path:
        """The working folder, if it is one of this machine; `SandboxError` if not."""
        ...

    async def open(self) -> None:
        """Make the sandbox; `SandboxError` if that is not possible."""
        ...

    async def exec(self, command: Command) -> ExecResult:
        """Run a program to its end, and end all that it started."""
        ...

    async def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file."""
        ...

    async def write(self, name: str, data: bytes) -> None:
        """Write a file and the folders above it."""
        ...

    async def copy_in(self, source: Path, name: str) -> None:
        """Replace a file or folder of the sandbox by one of this machine."""
        ...

    async def copy_out(self, name: str, target: Path) -> None:
        """Make a folder of this machine with the content of one of the sandbox."""
        ...

    async def end(self) -> None:
        """End what runs, and remove all."""
        ...
