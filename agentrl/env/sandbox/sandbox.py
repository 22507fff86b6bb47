"""The one way to run a program that is not trusted: in a sandbox, with limits, and with nothing left of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Literal
from weakref import WeakKeyDictionary

from agentrl.core.errors import SandboxError
from agentrl.env.isolation import system
from agentrl.env.isolation.system import MIB
from agentrl.env.sandbox import local
from agentrl.env.sandbox.files import MAX_FILE, read_beneath, write_beneath
from agentrl.env.sandbox.folders import make_folder, owner_pipe, remove_folder
from agentrl.env.sandbox.spec import Ended, ExecResult, Kind, SandboxSpec, current_choice
from agentrl.env.timing import timed

MARK = "AGENTRL_SANDBOX"
MAX_OUTPUT = 64 * 1024
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WATCH_S = 0.25
"""Seconds between two looks at the memory and the disk that a program uses."""
END_S = 5.0
START_S = 60.0
"""Seconds in which a program begins, or its sandbox has failed."""
MAX_STARTING = 2 * (os.cpu_count() or 1)
"""Programs of one event loop that start at a time; those that run are not counted."""
SHOWN = 500
_SIGNALLED = 128
_STARTING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class Sandbox:
    """A folder, and programs that run in it one after another; every program's processes end with it.

    The programs see the folder under its own name, an empty ``/tmp``, the system's and Python's files, no network, and no process but
    their own; with ``--sandbox none`` they see all that the user sees. What must not be reached by the programs, such as hidden tests,
    is written into the folder after they have run, or stays outside; a score is best computed in a second sandbox.

    Example:
        >>> async def answer(code: str) -> str:
        ...     async with Sandbox(SandboxSpec(memory_mib=256)) as sandbox:
        ...         sandbox.write("answer.py", code)
        ...         return (await sandbox.exec("python3", "answer.py", timeout_s=5.0)).output

    Args:
        spec: Limits, and what programs may see.
    """

    def __init__(self, spec: SandboxSpec | None = None) -> None:
        asked, choice = spec or SandboxSpec(), current_choice()
        self.kind: Kind = asked.kind or choice.kind
        self.spec = replace(asked, kind=self.kind, read=(*asked.read, *choice.read))
        self._user: int | None = None
        self._folder: Path | None = None
        self._programs: set[_Program] = set()

    async def __aenter__(self) -> Sandbox:
        """Make the folder; `SandboxError` if this machine cannot hold such a sandbox."""
        with timed("sandbox open"):
            if self.kind == "local":
                await asyncio.to_thread(local.check_local)
                self._user = local.new_user()
            self._folder = await asyncio.to_thread(make_folder)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End what runs, and remove the folder."""
        with timed("sandbox end"):
            await asyncio.shield(self._end())

    @property
    def folder(self) -> Path:
        """The folder, which has this name inside and outside."""
        if self._folder is None:
            raise SandboxError("the sandbox is not open; use it as in `async with Sandbox() as sandbox:`")
        return self._folder

    def read(self, name: str, limit: int = MAX_FILE) -> bytes:
        """Return the content of a file, named relative to the folder; no link is followed.

        Raises:
            FileNotFoundError: If there is none.
            SandboxError: If it is no plain file in the folder, or has more than `limit` bytes.
        """
        return read_beneath(self.folder, name, limit)

    def write(self, name: str, data: bytes | str) -> None:
        """Write a file, named relative to the folder; raises as `read` does."""
        write_beneath(self.folder, name, data.encode(errors="replace") if isinstance(data, str) else data)

    async def exec(
        self,
        *words: str,
        timeout_s: float = 60.0,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        read: Sequence[str] = (),
        network: bool | None = None,
        output: int = MAX_OUTPUT,
        keep: Literal["first", "last"] = "first",
    ) -> ExecResult:
        """Run a program to its end, and end all that it started.

        Args:
            words: The program and its arguments.
            timeout_s: Time limit from the beginning of the program; infinite for none.
            stdin: Standard input.
            env: Environment variables besides ``PATH`` and ``HOME``.
            cwd: Working folder, by default that of the sandbox.
            read: Files and folders that this program may read, besides those of the spec.
            network: True or False in place of the spec's.
            output: Bytes of output that are kept.
            keep: ``first`` ends the program at more output than that; ``last`` keeps its end.

        Raises:
            SandboxError: If the sandbox did not start; a program that is not there is an outcome.
        """
        where = cwd or self.folder
        variables = {"PATH": PATH, "HOME": str(self.folder), **(env or {})}
        spec = replace(self.spec, read=(*self.spec.read, *read), network=self.spec.network if network is None else network)
        program: _Program | None = None
        try:
            with timed("sandbox start"):
                async with _starting():
                    process, begun = await self._start(spec, words, where, variables)
                    program = _Program(self.kind, process, _Output(output, keep), str(self.folder))
                    self._programs.add(program)
                    is_begun = await _begins(begun)
            with timed("sandbox exec"):
                result = await program.run(stdin, timeout_s if is_begun else 0.0, self.spec, self.folder)
        finally:
            if program is not None:
                await asyncio.shield(program.end())
                self._programs.discard(program)
        if not is_begun:
            raise SandboxError(f"a sandbox did not start {words[0]}: {result.output.strip()[-SHOWN:] or 'no message'}")
        return result

    async def _start(
        self, spec: SandboxSpec, words: Sequence[str], where: Path, variables: dict[str, str]
    ) -> tuple[asyncio.subprocess.Process, int]:
        """Start a program; the end of a pipe tells when it begins."""
        if self._user is not None:
            await asyncio.to_thread(_give, self.folder, self._user)
        walled, owner = self.kind == "local", owner_pipe()
        if walled and "TMPDIR" in variables:
            variables["TMPDIR"] = "/tmp"
        begun, tell = os.pipe()
        limits = json.dumps(asdict(spec.limits()))
        try:
            process = await asyncio.create_subprocess_exec(
                *(local.wall(spec, self._user, self.folder, where) if walled else ()),
                *(sys.executable, "-I", "-S", system.__file__, limits, str(owner), str(tell), *words),
                cwd=where,
                env=variables if walled else {**variables, MARK: str(self.folder)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(owner, tell) if walled else (tell,),
            )
        except OSError as error:
            os.close(begun)
            raise SandboxError(f"a sandbox could not start {words[0]}: {error}") from error
        finally:
            os.close(tell)
        return process, begun

    async def _end(self) -> None:
        await asyncio.gather(*(program.end() for program in self._programs))
        if self._folder is not None:
            folder, self._folder = self._folder, None
            await asyncio.to_thread(remove_folder, folder)


def _starting() -> asyncio.Semaphore:
    """Return the places of programs that start in the running loop; many at once would take each other's time."""
    return _STARTING.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_STARTING))


async def _begins(end: int) -> bool:
    """Return True once a program begins, False if it never does."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(end, readable.set)
    try:
        async with asyncio.timeout(START_S):
            await readable.wait()
        return bool(os.read(end, 1))
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(end)
        os.close(end)


class _Output:
    """Some of a program's output."""

    def __init__(self, limit: int, keep: Literal["first", "last"]) -> None:
        self._limit, self._keep = limit, keep
        self._data = bytearray()
        self.flooded = asyncio.Event()  # there is more than may be kept, and it is the first that is kept

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Keep some of the output, and read the rest too: a full pipe would hold up the end."""
        while chunk := await stream.read(65536):
            self._data += chunk
            if len(self._data) > self._limit and self._keep == "first":
                del self._data[self._limit :]
                self.flooded.set()
            elif len(self._data) > self._limit:
                del self._data[: -self._limit]

    def __str__(self) -> str:
        return self._data.decode(errors="replace")


class _Program:
    """A program that runs: its limits, and the end of its processes."""

    def __init__(self, kind: Kind, process: asyncio.subprocess.Process, output: _Output, mark: str) -> None:
        self._kind, self._process, self._output, self._mark = kind, process, output, mark

    async def run(self, stdin: bytes, timeout_s: float, spec: SandboxSpec, folder: Path) -> ExecResult:
        """Wait for the program's end or for a limit."""
        assert self._process.stdout is not None
        watching = asyncio.create_task(self._watch(spec, folder))
        exiting, flooding = asyncio.create_task(self._process.wait()), asyncio.create_task(self._output.flooded.wait())
        feeding, reading = asyncio.create_task(self._feed(stdin)), asyncio.create_task(self._output.read(self._process.stdout))
        try:
            limit = None if math.isinf(timeout_s) else timeout_s
            done, _ = await asyncio.wait({exiting, watching, flooding}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            await self.end()
            await asyncio.wait({reading}, timeout=END_S)
            code = await self._process.wait()
        finally:
            for task in (watching, exiting, flooding, feeding, reading):
                task.cancel()
        if self._output.flooded.is_set():
            ended: Ended = "output"
        elif exiting in done:
            ended = "exit"
        else:
            ended = watching.result() if watching in done else "timeout"
        is_signal = self._kind == "local" and _SIGNALLED < code <= _SIGNALLED + 64
        return ExecResult(code=_SIGNALLED - code if is_signal else code, output=str(self._output), ended=ended)

    async def end(self) -> None:
        """End the program's processes, and return when they are gone."""
        process = self._process
        if self._kind == "none":
            await asyncio.to_thread(_end_unwalled, process.pid, self._mark)
        while process.returncode is None:  # the first process in the wall takes all others with it, before it is gone itself
            system.send(system.children(process.pid) or [process.pid], signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()

    async def _feed(self, stdin: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(stdin)
            await self._process.stdin.drain()
        self._process.stdin.close()

    async def _watch(self, spec: SandboxSpec, folder: Path) -> Ended:
        while True:
            await asyncio.sleep(WATCH_S)
            if _resident(self._process.pid) > (spec.memory_mib + BASE_MIB) * MIB:
                return "memory"
            if await asyncio.to_thread(_size, folder) > spec.disk_mib * MIB:
                return "disk"


BASE_MIB = 64
"""Memory of the processes that hold a program, and of what every program begins with."""

_table: tuple[float, dict[int, system.ProcessInfo]] = (0.0, {})


def _resident(pid: int) -> int:
    """Return the memory of a process and its descendants; all sandboxes share one look at the system per `WATCH_S`."""
    global _table
    now = time.monotonic()
    if now - _table[0] > WATCH_S * 0.9:
        _table = now, system.processes()
    table = _table[1]
    return sum(table[member].resident for member in system.families(table, [pid])[pid])


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def _give(folder: Path, user: int) -> None:
    """Make a user the owner of a folder and of all that is in it."""
    for parent, folders, names in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in (*folders, *names))):
            with contextlib.suppress(OSError):
                if os.lstat(path).st_uid != user:
                    os.chown(path, user, user, follow_symlinks=False)


def _end_unwalled(pid: int, mark: str) -> None:
    """Kill a program, all that descends from it, and what has left its family but not its environment."""
    system.kill_families([pid])
    system.kill_marked(f"{MARK}={mark}")
