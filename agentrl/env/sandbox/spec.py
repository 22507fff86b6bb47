"""The form of a sandbox, the outcome of a program in it, and the kind that a run asks for."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentrl.core.errors import SandboxError
from agentrl.env.isolation.system import ProcessLimits

Kind: TypeAlias = Literal["local", "none"]
Ended: TypeAlias = Literal["exit", "timeout", "output", "memory", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The limits of a sandbox, and what its programs may see.

    Attributes:
        kind: ``local`` (bubblewrap) or ``none`` (a process with limits and no wall); `None`: that of ``--sandbox``.
        memory_mib: Memory of each process, and of all processes of a program together, MiB.
        cpu_s: CPU seconds of each process.
        processes: Processes and threads at once.
        open_files: Open files and sockets of each process.
        file_mib: Size of a file that is written, MiB.
        disk_mib: Size of the working folder, and of ``/tmp``, MiB.
        network: True: the programs reach the network, also this machine's own addresses.
        read: Files and folders of this machine that programs may read, besides the system's and Python's.
    """

    kind: Kind | None = None
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
            memory_mib=self.memory_mib,
            cpu_s=self.cpu_s,
            file_mib=self.file_mib,
            processes=self.processes,
            open_files=self.open_files,
        )


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
        read: Files and folders that the programs of all may read.
    """

    kind: Kind = "local"
    read: tuple[str, ...] = ()


DEFAULT_CHOICE = SandboxChoice()
_CHOICE: ContextVar[SandboxChoice] = ContextVar("sandbox", default=DEFAULT_CHOICE)


def use_choice(choice: SandboxChoice) -> None:
    """Apply settings to the sandboxes of this context and of those that are copied from it."""
    _CHOICE.set(choice)


def current_choice() -> SandboxChoice:
    """Return the settings that apply here."""
    return _CHOICE.get()
