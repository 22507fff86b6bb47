"""Sandboxes of processes of this machine: behind the wall of bubblewrap, or with limits only."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from dataclasses import asdict, replace

from agentrl.core.errors import SandboxError
from agentrl.env.isolation import launcher, system
from agentrl.env.isolation.launcher import MIB
from agentrl.env.sandbox import local
from agentrl.env.sandbox.cgroup import num_killed_of_machine
from agentrl.env.sandbox.folders import owner_pipe
from agentrl.env.sandbox.in_folder import FolderSandbox
from agentrl.env.sandbox.memory_group import MemoryGroup, take_group
from agentrl.env.sandbox.places import starting
from agentrl.env.sandbox.program import END_S, SHOWN, SIGNALLED, START_S, WATCH_S, Output, Program, finish, resident
from agentrl.env.sandbox.relay import receive_listener, relayed, split_address
from agentrl.env.sandbox.spec import Command, Ended, ExecResult
from agentrl.env.timing import timed

MARK = "AGENTRL_SANDBOX"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_MIB = 64
"""Memory of the processes that hold a program, and of what every program begins with."""


class ProcessSandbox(FolderSandbox):
    """A folder, and programs that are started anew each time, with ``--sandbox local`` behind the wall."""

    python = sys.executable

    _group: MemoryGroup | None = None

    async def open(self) -> None:
        """Make the folder; `SandboxError` if this machine cannot hold the wall."""
        if self.spec.kind == "local":
            await asyncio.to_thread(local.check_local)
            self.user = local.new_user()
            self._group = await asyncio.to_thread(take_group, (self.spec.memory_mib + BASE_MIB) * MIB)
        await super().open()

    async def end(self) -> None:
        """End what runs, and remove the folder."""
        group, self._group = self._group, None
        try:
            await super().end()
        finally:
            if group is not None:
                group.give_back()

    async def exec(self, command: Command) -> ExecResult:
        """Run a program to its end, and end all that it started."""
        program: Program | None = None
        num_killed, num_in_group = num_killed_of_machine(), self._num_killed
        try:
            with timed("sandbox start"):
                async with starting():
                    process, told = await self._start(command)
                    program = Program(
                        process, Output(command.output, command.keep), lambda: self._kill(process), lambda: self._watch(process)
                    )
                    self.programs.add(program)
                    is_begun, listener = await _begins(told)
            with timed("sandbox exec"):
                async with relayed(listener, command.connect):
                    result = await program.run(command if is_begun else replace(command, timeout_s=0.0))
        finally:
            if program is not None:
                await finish(program.end())
                self.programs.discard(program)
        if not is_begun:
            raise SandboxError(f"a sandbox did not start {command.words[0]}: {result.output.strip()[-SHOWN:] or 'no message'}")
        if self.spec.kind == "local" and SIGNALLED < result.code <= SIGNALLED + 64:
            result = replace(result, code=SIGNALLED - result.code)
        if result.ended == "exit" and self._num_killed > num_in_group:  # the system was faster than the watch
            result = replace(result, ended="memory")
        return await self.judged(result, num_killed)

    @property
    def _num_killed(self) -> int:
        return self._group.num_killed if self._group is not None else 0

    async def _start(self, command: Command) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Start a program; a socket tells when it begins."""
        await self.give()
        walled, owner, where = self.spec.kind == "local", owner_pipe(), str(self.folder / command.cwd)
        variables = {"PATH": PATH, "HOME": str(self.folder), **command.env}
        # Behind the wall the folder that it names is not there.
        if walled and "TMPDIR" in variables:
            variables["TMPDIR"] = "/tmp"
        spec = replace(self.spec, read=command.read, network=command.network)
        told, tell = socket.socketpair()
        port = split_address(command.connect)[1] if command.connect and walled else 0
        limits, wall = launcher.limits_as_word(asdict(spec.limits())), local.wall(spec, self.user, self.folder, where) if walled else []
        try:
            process = await asyncio.create_subprocess_exec(
                *(self._group.entering(wall) if self._group is not None else wall),
                *(sys.executable, "-I", "-S", launcher.__file__, limits, str(owner), str(tell.fileno()), str(port), *command.words),
                cwd=self.folder if walled else where,
                env=variables if walled else {**variables, MARK: str(self.folder)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(owner, tell.fileno()) if walled else (tell.fileno(),),
            )
        except OSError as error:
            told.close()
            raise SandboxError(f"a sandbox could not start {command.words[0]}: {error}") from error
        finally:
            tell.close()
        return process, told

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        if self.spec.kind == "none":
            await asyncio.to_thread(_end_unwalled, process.pid, str(self.folder))
        while process.returncode is None:  # the first process in the wall takes all others with it, before it is gone itself
            launcher.send(launcher.children(process.pid) or [process.pid], signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()

    async def _watch(self, process: asyncio.subprocess.Process) -> Ended:
        while True:
            await asyncio.sleep(WATCH_S)
            if resident(process.pid) > (self.spec.memory_mib + BASE_MIB) * MIB:
                return "memory"
            if await asyncio.to_thread(self.written) > self.spec.disk_mib * MIB:
                return "disk"


async def _begins(told: socket.socket) -> tuple[bool, socket.socket | None]:
    """Return True once a program begins, False if it never does, and the socket on which one listens for it."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(told, readable.set)
    try:
        async with asyncio.timeout(START_S):
            await readable.wait()
        word, listener = receive_listener(told)
    except (TimeoutError, ConnectionError):
        return False, None
    finally:
        loop.remove_reader(told)
        told.close()
    return bool(word), listener


def _end_unwalled(pid: int, mark: str) -> None:
    """Kill a program, all that descends from it, and what has left its family but not its environment."""
    system.kill_families([pid])
    system.kill_marked(f"{MARK}={mark}")
