"""The one way to run a program that is not trusted: in a sandbox, with limits, and with nothing left of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from agentrl.env.sandbox.files import MAX_FILE
from agentrl.env.sandbox.in_container import ContainerSandbox
from agentrl.env.sandbox.places import RunningPlace
from agentrl.env.sandbox.processes import ProcessSandbox
from agentrl.env.sandbox.program import finish
from agentrl.env.sandbox.spec import MAX_OUTPUT, Command, ExecResult, Keep, Kind, SandboxSpec, current_choice
from agentrl.env.timing import timed


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


class Sandbox:
    """A folder, and programs that run in it one after another; every program's processes end with it.

    The programs see the folder under its own name, an empty ``/tmp``, the system's and Python's files, no network, and no process but
    their own. In a container they see the files of its image in place of the system's, and what the programs before them changed there.
    With ``--sandbox none`` they see all that the user sees. What must not be reached by the programs, such as hidden tests, is written
    after they have run, or stays outside; a score is best computed in a second sandbox.

    Example:
        >>> async def answer(code: str) -> str:
        ...     async with Sandbox(SandboxSpec(memory_mib=256)) as sandbox:
        ...         await sandbox.write("answer.py", code)
        ...         return (await sandbox.exec(sandbox.python, "answer.py", timeout_s=5.0)).output

    Args:
        spec: Limits, and what programs may see.
    """

    def __init__(self, spec: SandboxSpec | None = None) -> None:
        asked, choice = spec or SandboxSpec(), current_choice()
        self.kind: Kind = asked.kind or choice.kind
        self.spec = replace(asked, kind=self.kind, image=asked.image or choice.image, read=(*asked.read, *choice.read))
        self._backend = _backend(self.spec)
        self._place = RunningPlace()

    async def __aenter__(self) -> Sandbox:
        """Wait for a place, and make the folder; `SandboxError` if this machine cannot hold such a sandbox."""
        await self._place.take()
        try:
            with timed("sandbox open"):
                await self._backend.open()
        except BaseException:
            await finish(self._end())
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End what runs, and remove the folder."""
        with timed("sandbox end"):
            await finish(self._end())

    async def _end(self) -> None:
        try:
            await self._backend.end()
        finally:
            self._place.give_back()

    @property
    def folder(self) -> Path:
        """The folder, which has this name inside and outside; `SandboxError` for a remote sandbox, whose folder is elsewhere."""
        return self._backend.folder

    @property
    def python(self) -> str:
        """The Python that programs find: this one, or ``python3`` of a container's image, or that of a server."""
        return self._backend.python

    async def read(self, name: str, limit: int = MAX_FILE) -> bytes:
        """Return the content of a file, named relative to the folder, or in a container also absolute; no link leads outside.

        Raises:
            FileNotFoundError: If there is none.
            SandboxError: If it is no plain file of the sandbox, or has more than `limit` bytes.
        """
        return await self._backend.read(name, limit)

    async def write(self, name: str, data: bytes | str) -> None:
        """Write a file and the folders above it, named as for `read`; raises as it does."""
        await self._backend.write(name, data.encode(errors="replace") if isinstance(data, str) else data)

    async def copy_in(self, source: Path, name: str) -> None:
        """Replace a file or folder of the sandbox, named as for `read`, by one of this machine; raises as `read` does."""
        await self._backend.copy_in(source, name)

    async def copy_out(self, name: str, target: Path) -> None:
        """Make the folder `target` of this machine with the plain files of a folder of the sandbox; raises as `read` does."""
        await self._backend.copy_out(name, target)

    async def exec(
        self,
        *words: str,
        timeout_s: float = 60.0,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: Path | str = "",
        read: Sequence[str] = (),
        network: bool | str | None = None,
        output: int = MAX_OUTPUT,
        keep: Keep = "first",
    ) -> ExecResult:
        """Run a program to its end, and end all that it started.

        Args:
            words: The program and its arguments.
            timeout_s: Time limit from the beginning of the program; infinite for none.
            stdin: Standard input.
            env: Environment variables besides ``PATH`` and ``HOME``.
            cwd: Working folder, relative to that of the sandbox unless it is absolute.
            read: Files and folders that this program may read, besides those of the spec.
            network: True or False in place of the spec's; or ``HOST:PORT``, the only address that the program reaches, where it finds it
                as ``127.0.0.1:PORT``.
            output: Bytes of output that are kept.
            keep: ``first`` ends the program at more output than that; ``last`` keeps its end.

        Raises:
            SandboxError: If the sandbox did not start; a program that is not there, or words that no system takes, are an outcome.
        """
        if problem := _refused_words(words):
            return ExecResult(code=NOT_EXECUTED, output=f"{words[0][:80]!a}: {problem}")
        return await self._backend.exec(
            Command(
                words=words,
                timeout_s=timeout_s,
                stdin=stdin,
                env=dict(env or {}),
                cwd=str(cwd),
                read=(*self.spec.read, *read),
                network=self.spec.network if network is None else network is True,
                connect=network if isinstance(network, str) else "",
                output=output,
                keep=keep,
            )
        )


NOT_EXECUTED = 126
"""Exit code of a command that a shell finds and cannot run."""
MAX_WORD, MAX_WORDS = 128 * 1024 - 1, 1024 * 1024
"""Bytes of one argument on Linux at most, and of all of them, for which there is room in any case."""


def _refused_words(words: Sequence[str]) -> str:
    """Return why no system starts a program with these words, in the words of a shell; empty if one does. A model may have written them."""
    try:
        sizes = [len(word.encode()) for word in words]
    except UnicodeEncodeError:
        return "Invalid or incomplete multibyte or wide character"
    if any("\0" in word for word in words):
        return "Argument with a null byte"
    return "Argument list too long" if max(sizes) > MAX_WORD or sum(sizes) > MAX_WORDS else ""


def _backend(spec: SandboxSpec) -> Backend:
    if spec.kind == "remote":
        from agentrl.env.sandbox.remote import RemoteSandbox  # which loads a client for HTTP

        return RemoteSandbox(spec)
    return ContainerSandbox(spec) if spec.kind == "container" else ProcessSandbox(spec)
