"""The command line of podman or docker, with which containers and images are made."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.errors import SandboxError
from agentrl.core.sandboxes import CONTAINERS, CONTAINERS_REMEDY
from agentrl.env.sandbox import local, reaper
from agentrl.env.sandbox.folders import is_abandoned, own_root
from agentrl.env.sandbox.program import SHOWN

RUNTIMES = ("crun", "runc")
"""Runtimes of podman that are tried after its own choice: some do not work with the control groups of some systems."""
CONTROLLERS = ("memory", "pids")
"""Control groups by which containers are limited."""
CONTROL_GROUPS = "{{.Host.CgroupsVersion}} {{.Host.CgroupControllers}}"
MAX_PROCESSES = 2**14
"""Processes of a user in a container; those of the container are limited by its control group."""
MAX_ANSWER = 2**20
CHUNK = 65536
REST_S = 0.2
"""Seconds in which the rest of the output of a call that has ended is read."""
CALL_S = 120.0
"""Seconds for a call of podman or docker that moves no image."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a call of podman or docker."""

    code: int
    output: bytes
    error: str

    @property
    def text(self) -> str:
        """The output without blanks around it."""
        return self.output.decode(errors="replace").strip()

    def check(self, doing: str) -> Answer:
        """Return this answer; `SandboxError` if the call failed."""
        if self.code:
            raise SandboxError(f"{doing}: {self.error.strip()[-SHOWN:] or f'exit code {self.code}'}")
        return self


@dataclass(frozen=True, slots=True)
class Engine:
    """Podman or docker.

    Attributes:
        program: Words that begin each call.
    """

    program: tuple[str, ...]

    @property
    def is_podman(self) -> bool:
        """True for podman, whose containers are children of nobody; docker has a daemon."""
        return Path(self.program[0]).name == "podman"

    async def call(self, *words: str, stdin: bytes = b"", timeout_s: float = CALL_S, limit: int = MAX_ANSWER) -> Answer:
        """Call it, and return how that ended, with at most `limit` bytes; it is ended itself after the time limit.

        If the caller is cancelled it goes on: ended midway, it would leave a container that it no longer knows.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *self.program,
                *words,
                cwd=own_root(),  # where conmon, podman's monitor, notes that memory ran out
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A Ctrl-C in the terminal would end the call midway.
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"{self.program[0]} does not start: {error}") from error
        try:
            async with asyncio.timeout(timeout_s):
                output, message = await _communicate(process, stdin, limit)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise SandboxError(f"{self.program[0]} {words[0]} did not end within {timeout_s:g} s") from None
        code = 0 if len(output) > limit else process.returncode or 0  # ended here, as it has said enough
        return Answer(code, output, message.decode(errors="replace"))


async def _communicate(process: asyncio.subprocess.Process, stdin: bytes, limit: int) -> tuple[bytes, bytes]:
    """Return a program's output and messages when it has ended, or when there is too much output.

    The end of its output is not waited for: under uvloop, on which a user may run, what podman starts inherits the other end.
    """
    assert process.stdin is not None
    output, message = bytearray(), bytearray()
    reading = {asyncio.create_task(_read(process, process.stdout, output, limit))}
    reading.add(asyncio.create_task(_read(process, process.stderr, message, MAX_ANSWER)))
    with contextlib.suppress(ConnectionError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()
    await process.wait()
    await asyncio.wait(reading, timeout=REST_S)
    for task in reading:
        task.cancel()
    return bytes(output), bytes(message)


async def _read(process: asyncio.subprocess.Process, stream: asyncio.StreamReader | None, into: bytearray, limit: int) -> None:
    """Add what a program writes; end the program if that is more than the limit, and read the rest all the same, up to its end."""
    assert stream is not None
    while chunk := await stream.read(CHUNK):
        if len(into) > limit:
            continue
        into += chunk
        if len(into) > limit:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def find_engine() -> Engine:
    """Return podman or docker, tried once in this process.

    Raises:
        SandboxError: If neither is there, or it does not work.
    """
    return _found(os.getpid())


@functools.cache
def _found(_pid: int) -> Engine:
    path = next(filter(None, map(shutil.which, CONTAINERS)), None)
    if path is None:
        raise SandboxError(f"--sandbox container needs podman or docker. {CONTAINERS_REMEDY}.")
    engine = Engine((path,))
    engine = _limiting(_with_runtime(engine)) if engine.is_podman else _with_daemon(engine)
    remove_abandoned_containers(engine)
    return engine


def _limiting(engine: Engine) -> Engine:
    """Return podman if it limits containers: without root it ignores limits for which it is given no control groups."""
    if os.geteuid():
        version, _, listed = reaper.call(engine.program, "info", "--format", CONTROL_GROUPS).partition(" ")
        if missing := [name for name in CONTROLLERS if name not in listed.strip(" []\n").split()]:
            problem = (
                f"podman without root has no control groups ({version}) for {' and '.join(missing)} here, and would ignore these limits"
            )
            remedy = "Delegate the controllers memory and pids of control groups v2 to this user, run as root, or choose --sandbox local"
            raise SandboxError(f"{problem}. {remedy}.")
    return engine


def _with_runtime(engine: Engine) -> Engine:
    """Run a program of this machine in a container without an image, with one runtime after another."""
    message = ""
    for words in ((), *(("--runtime", name) for name in RUNTIMES if shutil.which(name))):
        with tempfile.TemporaryDirectory(dir=own_root()) as root:
            shown = [word for path in local.SYSTEM if os.path.isdir(path) for word in ("--volume", f"{path}:{path}:ro")]
            probe = ("run", "--rm", "--network", "none", *process_limits(64), *shown, "--rootfs", root, "/bin/true")
            problem = _try(*engine.program, *words, *probe)
        if problem is None:
            return Engine((*engine.program, *words))
        message = message or problem
    raise SandboxError(f"{engine.program[0]} does not work on this machine: {message}. {CONTAINERS_REMEDY}.")


def _with_daemon(engine: Engine) -> Engine:
    if (problem := _try(*engine.program, "info")) is not None:
        raise SandboxError(f"{engine.program[0]} does not work on this machine: {problem}. {CONTAINERS_REMEDY}.")
    return engine


def _try(*words: str) -> str | None:
    """Return the message of a program that fails, `None` if it does not."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip()[-SHOWN:] or f"exit code {done.returncode}") if done.returncode else None


def process_limits(open_files: int) -> tuple[str, ...]:
    """Return options with which containers start also where a process may not raise its own limits, as the defaults of podman would."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    processes = MAX_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, MAX_PROCESSES)
    return "--ulimit", f"nofile={open_files}:{open_files}", "--ulimit", f"nproc={processes}:{processes}", "--ulimit", "core=0:0"


def owner_label() -> str:
    """Return the name of this process as an owner of containers: its machine, and its folder of sandboxes."""
    return f"{socket.gethostname()}:{own_root()}"


def remove_abandoned_containers(engine: Engine) -> None:
    """Remove the containers of processes of this machine that are gone."""
    for owner in reaper.owners(engine.program):
        host, _, root = owner.partition(":")
        if host == socket.gethostname() and is_abandoned(Path(root)):
            reaper.remove_containers(engine.program, owner)
