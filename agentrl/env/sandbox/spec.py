"""The form of a sandbox, a program for it and its outcome, and the settings of a run for all sandboxes."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agentrl.core.errors import SandboxError
from agentrl.core.sandboxes import DEFAULT_IMAGE
from agentrl.env.isolation.system import ProcessLimits

Kind: TypeAlias = Literal["local", "container", "remote", "none"]
Ended: TypeAlias = Literal["exit", "timeout", "output", "memory", "disk"]
Keep: TypeAlias = Literal["first", "last"]

MAX_OUTPUT = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The limits of a sandbox, and what its programs may see.

    Attributes:
        kind: ``local`` (bubblewrap), ``container`` (podman or docker), ``remote`` (on a server) or ``none`` (a process with limits and no
            wall); `None`: that of ``--sandbox``.
        image: Image of a container: a name, or the path of a Containerfile or of a folder with one, which is built once; such a path
            begins with ``/`` or ``.``. Empty: that of ``--sandbox-image``.
        build_timeout_s: Seconds for pulling or building the image.
        root: True: the programs of a container are root in it, and may install packages.
        memory_mib: Memory of all processes of a program together, and outside of containers of each process, MiB.
        cpu_s: CPU seconds of each process.
        processes: Processes and threads at once.
        open_files: Open files and sockets of each process.
        file_mib: Size of a file that is written, MiB.
        disk_mib: Size of all that is written: the working folder, ``/tmp``, and the changes of a container to its image, MiB.
        network: True: the programs reach the network, also this machine's own addresses.
        read: Files and folders of this machine that programs may read, besides the system's and Python's or those of the image.
    """

    kind: Kind | None = None
    image: str = ""
    build_timeout_s: float = 1800.0
    root: bool = False
    memory_mib: int = 512
    cpu_s: float = 600.0
    processes: int = 64
    open_files: int = 256
    file_mib: int = 64
    disk_mib: int = 1024
    network: bool = False
    read: tuple[str, ...] = ()

    def limits(self) -> ProcessLimits:
        """Return the limits of one process."""
        return ProcessLimits(
            memory_mib=self.memory_mib, cpu_s=self.cpu_s, file_mib=self.file_mib, processes=self.processes, open_files=self.open_files
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program for a sandbox; the arguments of `Sandbox.exec`.

    Attributes:
        words: The program and its arguments.
        timeout_s: Time limit from the beginning of the program.
        stdin: Standard input.
        env: Environment variables that are given.
        cwd: Working folder, relative to that of the sandbox unless it is absolute.
        read: Files and folders of this machine that it may read, with those of the spec.
        network: True if it reaches the network.
        connect: ``HOST:PORT``, the only address that it reaches if it has no network, as ``127.0.0.1:PORT``; empty for none.
        output: Bytes of output that are kept.
        keep: ``first`` ends the program at more output than that; ``last`` keeps its end.
    """

    words: tuple[str, ...]
    timeout_s: float = 60.0
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    read: tuple[str, ...] = ()
    network: bool = False
    connect: str = ""
    output: int = MAX_OUTPUT
    keep: Keep = "first"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The outcome of a program.

    Attributes:
        code: Exit code; minus the number of a signal if one ended the program.
        output: Standard output and standard error in the order of writing.
        ended: ``exit`` if the program ended by itself, else the limit that ended it: ``timeout``, ``output``, ``memory`` or ``disk``.
    """

    code: int
    output: str
    ended: Ended = "exit"

    def check(self) -> ExecResult:
        """Return this outcome.

        Raises:
            SandboxError: If the program used up memory or disk, for callers to whom that is a failure and not a reward.
        """
        if self.ended in ("memory", "disk"):
            raise SandboxError(f"the program was ended because it used up the {self.ended} of its sandbox; allow more in SandboxSpec")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxChoice:
    """The settings of a run for all its sandboxes.

    Attributes:
        kind: Kind of those that do not name one.
        image: Image of containers that do not name one.
        read: Files and folders that the programs of all may read.
        run: Name of the run, which containers bear as a label.
        url: Address of the server of remote ones.
        network: Network of programs that are agents: ``endpoint`` for the model's alone, or ``all``.
        max_starting: Programs that start at a time; 0: two for each core.
        max_running: Sandboxes that are open at a time; 0: as many as are asked for.
        places: Name under which the processes of this machine share `max_running`; empty: this process has it alone.
    """

    kind: Kind = "local"
    image: str = DEFAULT_IMAGE
    read: tuple[str, ...] = ()
    run: str = ""
    url: str = ""
    network: Literal["endpoint", "all"] = "endpoint"
    max_starting: int = 0
    max_running: int = 0
    places: str = ""


@dataclass(slots=True)
class Episode:
    """The sandboxes that an episode has open."""

    num_sandboxes: int = 0


DEFAULT_CHOICE = SandboxChoice()
_CHOICE: ContextVar[SandboxChoice] = ContextVar("sandbox", default=DEFAULT_CHOICE)


_EPISODE: ContextVar[Episode | None] = ContextVar("episode", default=None)


def use_choice(choice: SandboxChoice) -> None:
    """Apply settings to the sandboxes of this context, which is that of one episode, and of those that are copied from it."""
    _CHOICE.set(choice)
    _EPISODE.set(Episode())


def current_choice() -> SandboxChoice:
    """Return the settings that apply here."""
    return _CHOICE.get()


def current_episode() -> Episode:
    """Return the episode whose code runs here; a new one outside of episodes."""
    return _EPISODE.get() or Episode()
