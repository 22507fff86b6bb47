"""One container of podman or docker: how it is made, stopped and removed, its files, and its use of memory and disk."""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import socket
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.errors import SandboxError
from agentrl.env.isolation.launcher import MIB
from agentrl.env.sandbox import cgroup, reaper
from agentrl.env.sandbox.engine import Answer, Engine, owner_label, process_limits
from agentrl.env.sandbox.files import copy_out_beneath, too_large
from agentrl.env.sandbox.folders import own_root
from agentrl.env.sandbox.relay import listen_in
from agentrl.env.sandbox.spec import SandboxSpec, current_choice
from agentrl.env.sandbox.trees import size

MARGIN = 64 * 1024
"""Bytes that an archive of one file has besides the file's."""


def archived(name: str, data: bytes) -> bytes:
    """Return an archive with one file, which root owns and everyone may read."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), 0o644
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def file_in(data: bytes, name: str, limit: int) -> bytes:
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


IDLE = "sleep 2147483647 & wait"
"""Commands of the first process, a shell, which also collects orphans that have ended."""
NUM_IDLE = 2
STATE = '{{.State.Pid}} {{with .GraphDriver}}{{index .Data "UpperDir"}}{{end}}'
REPLACE = 'rm -rf -- "$1" && mkdir -p -- "$2"'

HOME_OF_ROOT = Path("/root")
"""Folder of images that nobody but root may enter, and in which a trainer that is root may have programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The options of a container that stay as they are for its whole life.

    Attributes:
        image: Name of an image that is there.
        folder: Working folder, of this machine and of the container.
        spec: Limits.
        user: User and group of the programs; `None`: as the image says, which is root for most.
        read: Files and folders of this machine that are there to be read.
        network: True for the network of this machine, False for none.
    """

    image: str
    folder: Path
    spec: SandboxSpec
    user: tuple[int, int] | None
    read: tuple[str, ...]
    network: bool

    @property
    def needs_home_of_root(self) -> bool:
        """True if programs of another user are to find files of this machine there."""
        return self.user is not None and any(HOME_OF_ROOT in path.parents for path in (self.folder, *map(Path, self.read)))

    def words(self, engine: Engine, name: str) -> list[str]:
        """Return the words after ``podman`` or ``docker`` that make the container, with an idle first process."""
        spec = self.spec
        # Never pulled here: `ready_image` has pulled or built it, under a lock and with a time limit of its own.
        words = ["run", "--detach", "--name", name, "--pull", "never", "--log-driver", "none"]
        words += ["--label", f"{reaper.OWNER}={owner_label()}", "--label", f"{reaper.RUN}={current_choice().run}"]
        words += ["--network", "host"] if self.network else ["--network", "none", "--hostname", "sandbox"]
        # Memory with swap is as much as memory alone: there is no swap.
        words += ["--memory", f"{spec.memory_mib}m", "--memory-swap", f"{spec.memory_mib}m", "--pids-limit", str(spec.processes + NUM_IDLE)]
        words += [
            *process_limits(spec.open_files),
            "--ulimit",
            f"fsize={spec.file_mib * MIB}",
            "--ulimit",
            f"cpu={max(1, round(spec.cpu_s))}",
        ]
        # The first process is idle and has nothing to save, so to ask it to end would only take time after each program.
        words += ["--oom-score-adj", "1000", "--stop-signal", "SIGKILL", "--stop-timeout", "0"]
        # The folder is one of this machine, without a label of containers, and SELinux would keep programs out of it.
        words += ["--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
        if self.user is not None:
            words += ["--cap-drop", "ALL", "--user", f"{self.user[0]}:{self.user[1]}"]
            words += ["--userns", "keep-id"] if engine.is_podman and os.geteuid() else []
        words += ["--volume", f"{self.folder}:{self.folder}", "--workdir", str(self.folder)]
        words += [word for path in self.read for word in ("--volume", f"{path}:{path}:ro")]
        return [*words, "--entrypoint", "sh", self.image, "-c", IDLE]


class Container:
    """A container that is there; `make` makes one.

    Attributes:
        form: Its options.
        name: Its name.
    """

    def __init__(self, engine: Engine, form: Form, name: str) -> None:
        self.form, self.name = form, name
        self._engine = engine
        self._is_stopped = False
        self._pid = 0  # its first process
        self._changes = ""  # folder of its changes to the image, empty if unknown
        self._processes: Path | None = None  # control groups of its processes and of its memory, if they can be read
        self._memory: Path | None = None

    @classmethod
    async def make(cls, engine: Engine, form: Form) -> Container:
        """Make a container and start it; `SandboxError` if that fails."""
        container = cls(engine, form, f"agentrl-{secrets.token_hex(8)}")
        answer = await engine.call(*form.words(engine, container.name))
        # A container that did not start may be there all the same.
        if answer.code:
            await container.remove()
        answer.check(f"a container of {form.image} did not start")
        if form.needs_home_of_root:
            opened = await engine.call("exec", "--user", "0:0", container.name, "chmod", "755", str(HOME_OF_ROOT))
            opened.check(f"{HOME_OF_ROOT} of {form.image} could not be opened")
        await container._look()
        return container

    async def start(self) -> None:
        """Start the container again if it was stopped."""
        if self._is_stopped:
            (await self._engine.call("start", self.name)).check("a container did not start again")
            await self._look()
            self._is_stopped = False

    async def stop(self) -> None:
        """Kill all processes; the files stay."""
        self._is_stopped = True
        (await self._engine.call("stop", self.name)).check("a container did not stop")

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on loopback within the container."""
        return await listen_in(self._pid, port)

    async def remove(self) -> None:
        """Remove the container, also if it runs or is not there."""
        await self._engine.call("rm", "--force", "--volumes", self.name)

    async def _look(self) -> None:
        answer = (await self._engine.call("inspect", "--format", STATE, self.name)).check("a container is gone")
        pid, _, self._changes = answer.text.partition(" ")
        self._pid = int(pid)
        self._processes, self._memory = cgroup.folder_of(self._pid, "pids"), cgroup.folder_of(self._pid, "memory")

    @property
    def is_idle(self) -> bool:
        """True if nothing runs but the idle processes; False also if that cannot be seen."""
        number = cgroup.num_processes(self._processes) if self._processes else None
        return number is not None and 0 < number <= NUM_IDLE

    @property
    def num_killed(self) -> int:
        """Processes that the system ended since the container started because the memory was used up."""
        return cgroup.num_killed(self._memory) if self._memory else 0

    def changed(self) -> int:
        """Return the bytes of the changes to the image, as far as they can be seen."""
        return size(Path(self._changes)) if self._changes else 0

    async def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file; raises as `Sandbox.read`."""
        answer = await self._engine.call("cp", f"{self.name}:{name}", "-", limit=limit + MARGIN)
        return file_in(_found(answer, name).output, name, limit)

    async def write(self, name: str, data: bytes) -> None:
        """Write a file as root."""
        answer = await self._engine.call("cp", "-", f"{self.name}:/", stdin=archived(name.lstrip("/"), data))
        answer.check(f"{name!r} of a sandbox cannot be written")

    async def copy_in(self, source: Path, name: str) -> None:
        """Replace a file or folder as root."""
        words = ("exec", "--user", "0:0", self.name, "sh", "-c", REPLACE, "sh", name, os.path.dirname(name.rstrip("/")))
        (await self._engine.call(*words)).check(f"{name!r} of a sandbox cannot be replaced")
        answer = await self._engine.call("cp", await asyncio.to_thread(_whole, source), f"{self.name}:{name}")
        answer.check(f"{name!r} of a sandbox cannot be written")

    async def copy_out(self, name: str, target: Path, limit: int) -> None:
        """Make a folder of this machine with the plain files of one of the container, which have `limit` bytes together at most."""
        with tempfile.TemporaryDirectory(dir=own_root()) as scratch:
            # Into a scratch folder first: podman copies links and devices too, which `copy_out_beneath` leaves out.
            _found(await self._engine.call("cp", f"{self.name}:{name}/.", f"{scratch}/copy"), name)
            await asyncio.to_thread(copy_out_beneath, Path(scratch), "copy", target, limit)


def _whole(source: Path) -> str:
    # Without the dot, a folder that is there already would get the copy as one more folder in it.
    return f"{source.absolute()}/." if source.is_dir() else str(source.absolute())


def _found(answer: Answer, name: str) -> Answer:
    if answer.code and any(words in answer.error.lower() for words in ("could not be found", "could not find", "no such container:path")):
        raise FileNotFoundError(f"there is no {name} in the sandbox")
    return answer.check(f"{name!r} of a sandbox cannot be read")
