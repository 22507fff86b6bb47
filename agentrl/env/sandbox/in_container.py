"""Sandboxes that are containers of podman or docker.

A container lives as long as its sandbox, so programs find what those before them changed in it. Its first process is idle; each program is
another one, whose end is awaited by a call of podman or docker. What a program leaves running is ended by stopping the container, which is
started again for the next program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentrl.core.errors import SandboxError
from agentrl.env.isolation.launcher import MIB
from agentrl.env.sandbox import local
from agentrl.env.sandbox.cgroup import num_killed_of_machine
from agentrl.env.sandbox.container import Container, Form
from agentrl.env.sandbox.engine import Engine, find_engine
from agentrl.env.sandbox.folders import own_root
from agentrl.env.sandbox.images import ready_image
from agentrl.env.sandbox.in_folder import FolderSandbox
from agentrl.env.sandbox.places import starting
from agentrl.env.sandbox.program import SHOWN, SIGNALLED, START_S, WATCH_S, Output, Program, finish
from agentrl.env.sandbox.relay import relayed, split_address
from agentrl.env.sandbox.spec import Command, Ended, ExecResult, SandboxSpec
from agentrl.env.sandbox.watched import begin_watch, end_watch
from agentrl.env.timing import timed

BEGIN = 'printf "%s\\n" "$0"; exec "$@" 2>&1'
"""Commands of the shell that becomes a program, after it has said that it begins."""
LOOKS = 4
"""Looks at memory for one at the disk, as a container may have many files."""
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Words in the names of variables whose values are not written on command lines, which others can read."""


class ContainerSandbox(FolderSandbox):
    """A container with the working folder in it, under the same name inside and outside.

    The container is made when it is first needed. A program that may read other files, or has another network, than the one before runs in
    a new container of the same image, with the same working folder.

    Args:
        spec: Form of the sandbox.
    """

    python = "python3"

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._engine, self._image, self._is_watched = Engine(()), "", False
        self._one = asyncio.Lock()  # programs run one after another, as the end of one is the end of all processes
        self._made: asyncio.Task[Container] | None = None
        self._form: Form | None = None  # of the container that was made last

    async def open(self) -> None:
        """Find or make the image, and make the folder; `SandboxError` if this machine cannot hold containers."""
        self._engine = await asyncio.to_thread(find_engine)
        await super().open()
        await asyncio.to_thread(begin_watch, self._engine)
        self._is_watched = True
        self._image = await ready_image(self._engine, self.spec.image, self.spec.build_timeout_s)
        if not self.spec.root and not os.geteuid():
            self.user = local.new_user() or local.USER

    async def exec(self, command: Command) -> ExecResult:
        """Run a program to its end, and end all that it started; programs that are asked for meanwhile wait."""
        program: Program | None = None
        num_killed = num_killed_of_machine()
        async with self._one:
            try:
                with timed("sandbox start"):
                    async with starting():
                        await self.give()
                        container = await self._ready(command.network, command.read)
                        listener = await container.listen(split_address(command.connect)[1]) if command.connect else None
                        process, output = await self._start(container, command)
                        run = _Run(container, process, self.written)
                        program = Program(process, output, run.kill, run.watch)
                        self.programs.add(program)
                        is_begun = await program.begins(START_S)
                with timed("sandbox exec"):
                    async with relayed(listener, command.connect):
                        # A program that has not begun is ended at once, on the usual way, which keeps what it printed.
                        result = await program.run(command if is_begun else replace(command, timeout_s=0.0))
            finally:
                if program is not None:
                    await finish(program.end())
                    self.programs.discard(program)
        if not is_begun:
            raise SandboxError(f"a container did not start {command.words[0]}: {result.output.strip()[-SHOWN:] or 'no message'}")
        if SIGNALLED < result.code <= SIGNALLED + 64:
            result = replace(result, code=SIGNALLED - result.code)
        if result.ended == "exit" and run.is_out_of_memory:  # the system was faster than the watch
            result = replace(result, ended="memory")
        return await self.judged(result, num_killed)

    async def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file of the folder, or with an absolute name of the container."""
        return await ((await self._there()).read(name, limit) if name.startswith("/") else super().read(name, limit))

    async def write(self, name: str, data: bytes) -> None:
        """Write a file of the folder, or with an absolute name of the container."""
        await ((await self._there()).write(name, data) if name.startswith("/") else super().write(name, data))

    async def copy_in(self, source: Path, name: str) -> None:
        """Replace a file or folder of the sandbox by one of this machine."""
        await ((await self._there()).copy_in(source, name) if name.startswith("/") else super().copy_in(source, name))

    async def copy_out(self, name: str, target: Path) -> None:
        """Make a folder of this machine with the plain files of one of the sandbox."""
        if name.startswith("/"):
            await (await self._there()).copy_out(name, target, self.spec.disk_mib * MIB)
        else:
            await super().copy_out(name, target)

    def written(self) -> int:
        """Return the bytes of the working folder and of the container's changes to its image."""
        made = self._made
        return super().written() + (made.result().changed() if made is not None and made.done() else 0)

    async def end(self) -> None:
        """End what runs, and remove container and folder."""
        await self._remove()
        if self._is_watched:
            self._is_watched = False
            await asyncio.to_thread(end_watch)
        await super().end()

    async def _there(self) -> Container:
        """Return the container for its files; one that has to be made waits for a place to start, as for a program."""
        async with starting():
            return await self._ready()

    async def _ready(self, network: bool | None = None, read: tuple[str, ...] | None = None) -> Container:
        """Return the container, which runs; it is a new one if the one that is there has another network or other files."""
        network = network if network is not None else self._form.network if self._form else self.spec.network
        read = tuple(filter(os.path.exists, read)) if read is not None else self._form.read if self._form else self.spec.read
        form = Form(image=self._image, folder=self.folder, spec=self.spec, user=self._users(), read=read, network=network)
        if form != self._form:
            await self._remove()
            self._form, self._made = form, asyncio.create_task(Container.make(self._engine, form))
        assert self._made is not None
        container = await asyncio.shield(self._made)  # if nobody waits any more, the end of the sandbox does
        await container.start()
        return container

    def _users(self) -> tuple[int, int] | None:
        if self.spec.root:
            return None
        return (self.user, self.user) if self.user is not None else (os.geteuid(), os.getegid())

    async def _remove(self) -> None:
        made, self._made, self._form = self._made, None, None
        if made is not None:
            with contextlib.suppress(SandboxError):
                await (await made).remove()

    async def _start(self, container: Container, command: Command) -> tuple[asyncio.subprocess.Process, Output]:
        mark = secrets.token_hex(16)
        variables = {**({} if self.spec.root else {"HOME": str(self.folder)}), **command.env}
        hidden = {name: value for name, value in variables.items() if any(word in name.upper() for word in SECRETS)}
        given = [word for name, value in variables.items() for word in ("--env", name if name in hidden else f"{name}={value}")]
        process = await asyncio.create_subprocess_exec(
            *(*self._engine.program, "exec", "--interactive", "--workdir", str(self.folder / command.cwd), *given),
            *(container.name, "sh", "-c", BEGIN, mark, *command.words),
            cwd=own_root(),
            env={**os.environ, **hidden},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return process, Output(command.output, command.keep, f"{mark}\n".encode())


class _Run:
    """One program in a container."""

    def __init__(self, container: Container, process: asyncio.subprocess.Process, written: Callable[[], int]) -> None:
        self._container, self._process, self._written = container, process, written
        self._num_killed = container.num_killed
        self.is_out_of_memory = False

    async def kill(self) -> None:
        """End all processes of the container but the idle ones."""
        # Before the container stops, since its counters end with it.
        self._look()
        if self._process.returncode is None or not self._container.is_idle:
            await self._container.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._process.wait()
            return
        self._process.kill()

    async def watch(self) -> Ended:
        """Return when memory or disk are used up."""
        while True:
            for _ in range(LOOKS):
                if self._look():
                    return "memory"
                await asyncio.sleep(WATCH_S)
            if await asyncio.to_thread(self._written) > self._container.form.spec.disk_mib * MIB:
                return "disk"

    def _look(self) -> bool:
        self.is_out_of_memory |= self._container.num_killed > self._num_killed
        return self.is_out_of_memory
