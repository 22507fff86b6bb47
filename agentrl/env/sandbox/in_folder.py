"""Sandboxes whose working folder is one of this machine, under the same name inside and outside."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

from agentrl.core.errors import SandboxError
from agentrl.env.isolation.launcher import MIB
from agentrl.env.sandbox.cgroup import num_killed_of_machine
from agentrl.env.sandbox.files import copy_beneath, copy_out_beneath, read_beneath, write_beneath
from agentrl.env.sandbox.folders import make_folder
from agentrl.env.sandbox.program import Program
from agentrl.env.sandbox.spec import ExecResult, SandboxSpec
from agentrl.env.sandbox.trees import give, remove, size


class FolderSandbox:
    """The files of a sandbox, and the programs that run in it.

    Args:
        spec: Form of the sandbox.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.user: int | None = None  # owner of the folder, if it is to be another user than this process's
        self.programs: set[Program] = set()
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """The working folder."""
        if self._folder is None:
            raise SandboxError("the sandbox is not open; use it as in `async with Sandbox() as sandbox:`")
        return self._folder

    async def open(self) -> None:
        """Make the folder."""
        self._folder = await asyncio.to_thread(make_folder)

    async def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file."""
        return await asyncio.to_thread(read_beneath, self.folder, name, limit)

    async def write(self, name: str, data: bytes) -> None:
        """Write a file and the folders above it."""
        await asyncio.to_thread(write_beneath, self.folder, name, data)

    async def copy_in(self, source: Path, name: str) -> None:
        """Replace a file or folder of the sandbox by one of this machine."""
        await asyncio.to_thread(copy_beneath, self.folder, name, source)

    async def copy_out(self, name: str, target: Path) -> None:
        """Make a folder of this machine with the content of one of the sandbox."""
        await asyncio.to_thread(copy_out_beneath, self.folder, name, target, self.spec.disk_mib * MIB)

    async def give(self) -> None:
        """Make the user of the programs the owner of the folder and of all that is in it."""
        if self.user is not None:
            await asyncio.to_thread(give, self.folder, self.user)

    async def judged(self, result: ExecResult, num_killed: int) -> ExecResult:
        """Return the outcome of a program that was not ended, after a last look at its disk.

        Args:
            result: Its outcome so far.
            num_killed: `num_killed_of_machine` before it began.

        Raises:
            SandboxError: If it was not the program that failed, but the machine that ran out of memory or disk.
        """
        if result.ended != "exit":
            return result
        if await asyncio.to_thread(self.written) > self.spec.disk_mib * MIB:
            return replace(result, ended="disk")
        if result.code == -signal.SIGKILL and num_killed_of_machine() > num_killed:
            raise SandboxError("this machine ran out of memory, and the system ended a program of a sandbox; run fewer at once")
        if result.code and free_bytes(self.folder) < MIB:
            raise SandboxError(f"the disk of {self.folder} is full; make room, or set TMPDIR to a folder on a larger one")
        return result

    def written(self) -> int:
        """Return the bytes that the sandbox takes."""
        return size(self.folder)

    async def end(self) -> None:
        """End what runs, and remove the folder."""
        await asyncio.gather(*(program.end() for program in self.programs))
        if self._folder is not None:
            folder, self._folder = self._folder, None
            await asyncio.to_thread(remove, folder)


def free_bytes(folder: Path) -> int:
    """Return the bytes that may still be written."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize
