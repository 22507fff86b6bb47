"""Limits of an episode's process, and its environment variables."""

from __future__ import annotations

import errno
import fnmatch
import resource
import signal
from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20

KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TERM", "TMPDIR", "XDG_*_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "CUDA_VISIBLE_DEVICES"),
    *("OMP_*", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_*", "TOKENIZERS_PARALLELISM"),
    *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "AGENTRL_TEST_*"),
)
"""Environment variables that are passed on; everything else may be a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of an episode's process; passing a limit ends only that episode.

    Attributes:
        memory_mib: Memory beyond what loading the user's file took, of the process and of what it starts, MiB.
        cpu_s: CPU seconds of an episode.
        file_mib: Size of a file that is written, MiB.
        processes: Processes that it may have started and that still run.
        open_files: Open files and sockets.
        reuse: Episodes that a process plays, one after another; 1: every episode begins in the state that loading left.
        passed: Names of environment variables that are passed on besides `KEPT`.
    """

    memory_mib: int = 1024
    cpu_s: float = 600.0
    file_mib: int = 256
    processes: int = 32
    open_files: int = 512
    reuse: int = 1
    passed: tuple[str, ...] = ()


def child_environment(environment: Mapping[str, str], passed: tuple[str, ...]) -> dict[str, str]:
    """The variables of `environment` that an episode's process is given; hashes of texts are the same in every run."""
    kept = {name: value for name, value in environment.items() if name in passed or any(fnmatch.fnmatchcase(name, p) for p in KEPT)}
    return {"PYTHONHASHSEED": "0", **kept}


def apply(limits: ProcessLimits) -> None:
    """Limit the calling process, and with it what it will start. Data counts, not address space, much of which is only reserved."""
    with open("/proc/self/statm", encoding="ascii") as file:
        data = int(file.read().split()[5]) * resource.getpagesize()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_DATA, data + limits.memory_mib * MIB)
    _limit(resource.RLIMIT_FSIZE, limits.file_mib * MIB)
    _limit(resource.RLIMIT_NOFILE, limits.open_files)


def begin_cpu_time(cpu_s: float) -> None:
    """Let the calling process use so much CPU time from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + cpu_s) + 1, hard))


def describe_end(code: int, limits: ProcessLimits) -> str:
    """Return the reason for a process's end from its exit code; a negative code is the number of a signal."""
    if code >= 0:
        return f"its process exited with code {code}"
    if -code == signal.SIGXCPU:
        return f"it used more than {limits.cpu_s:g} s of CPU time (--env-cpu-s), and its process was ended"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"


def named_limit(problem: str, limits: ProcessLimits) -> str:
    """The flag behind an exception that a limit causes, in brackets; nothing for any other."""
    for sign, flag, value in (
        ("raised MemoryError", "--env-memory-mib", limits.memory_mib),
        (f"[Errno {errno.EFBIG}]", "--env-file-mib", limits.file_mib),
        (f"[Errno {errno.EMFILE}]", "--env-open-files", limits.open_files),
    ):
        if sign in problem:
            return f" ({flag} {value})"
    return ""


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
