"""Simulated machines: cores, GPUs, memory, packages, programs and a cluster, whatever the machine that runs the tests has."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

GIB = 2**30
PAGE = 4096
SIMULATED = frozenset({"vllm", "torch", "flash_attn", "flash_attn_interface", "bitsandbytes", "mcp", "openrlhf", "liger_kernel"})
"""Packages that a simulated machine has or lacks by its own table when agentrl looks for them; others are looked for as usual."""
REAL_PROGRAMS = frozenset({"python", "python3", "sh", "bash", "node"})
"""Programs that a simulated machine has at a place of its own name."""
BASE_VARIABLES = ("LANG", "LD_LIBRARY_PATH", "SYSTEMROOT", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables of the real environment that a simulated machine keeps."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of others to join: so many machines, each with these resources."""

    machines: int = 1
    cpus: int = 16
    gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine as a run sees it.

    Attributes:
        cores: Cores that the process may use.
        gpus: GPUs that the driver lists.
        gpu_gib: Memory of each GPU, as ``nvidia-smi`` reports it.
        host_gib: CPU memory.
        disk_gib: Free room on every file system.
        packages: Packages of `SIMULATED` that are installed.
        programs: Further programs that are found.
        torch_cuda: Version of CUDA that PyTorch says it is built for; empty for a build for CPUs.
        cluster: Ray cluster that answers at ``--ray-address``; `None` if nobody listens there.
        variables: Environment variables.
    """

    cores: int = 2
    gpus: int = 0
    gpu_gib: float = 80.0
    host_gib: float = 64.0
    disk_gib: float = 1000.0
    packages: frozenset[str] = frozenset({"vllm", "torch", "mcp"})
    programs: frozenset[str] = frozenset({"bwrap"})
    torch_cuda: str = ""
    cluster: Cluster | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


CPU = Machine()
LARGE_HOST = 1024.0
"""CPU memory of a machine with GPUs of a data centre, GiB."""
WITHOUT_VLLM = frozenset({"torch", "mcp"})
MACHINES: dict[str, Machine] = {
    "cpu": CPU,
    "cpu16": Machine(cores=16),
    "bare": Machine(packages=WITHOUT_VLLM, programs=frozenset()),
    "podman": Machine(programs=frozenset({"podman"})),
    "cuda-torch": Machine(torch_cuda="12.8"),
    "qlora": Machine(packages=frozenset({"vllm", "torch", "bitsandbytes"}), gpus=1, cores=8),
    "one-thread": Machine(variables={"OMP_NUM_THREADS": "4"}),
    "key": Machine(variables={"AGENTRL_SANDBOX_KEY": "sixteen-letters-of-a-key"}),
    "full-disk": Machine(disk_gib=0.001),
    "gpu1": Machine(gpus=1, cores=8),
    "gpu1-16": Machine(gpus=1, cores=8, gpu_gib=16.0, host_gib=32.0),
    "gpu1-24": Machine(gpus=1, cores=8, gpu_gib=24.0),
    "gpu1-bare": Machine(gpus=1, cores=8, packages=WITHOUT_VLLM),
    "gpu1-flash": Machine(gpus=1, cores=8, packages=frozenset({"vllm", "torch", "flash_attn"})),
    "gpu2": Machine(gpus=2, cores=16, host_gib=256.0),
    "gpu4": Machine(gpus=4, cores=32, host_gib=512.0),
    "gpu8": Machine(gpus=8, cores=64, host_gib=LARGE_HOST),
    "gpu16": Machine(gpus=16, cores=128, host_gib=LARGE_HOST),
    "cluster-cpu": Machine(cluster=Cluster(machines=2, cpus=16)),
    "cluster-gpu": Machine(cluster=Cluster(machines=2, cpus=64, gpus=8), host_gib=LARGE_HOST),
    "cluster-4x8": Machine(cluster=Cluster(machines=4, cpus=64, gpus=8), host_gib=LARGE_HOST),
}
"""The machines of the cases, by name."""


@contextmanager
def simulated(machine: Machine, root: Path) -> Iterator[None]:
    """Let agentrl see `machine` within the block; `root` holds its home, its caches and its programs.

    The places that agentrl asks are patched, so that what it makes of the answers is its own.
    """
    programs = root / "bin"
    _write_programs(programs, machine)
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.dict(os.environ, _variables(machine, root), clear=True))
        enter(patch("agentrl.core.process.cuda_device_count", lambda: machine.gpus))
        enter(patch("torch.cuda.device_count", lambda: machine.gpus))
        enter(patch("os.sched_getaffinity", lambda pid: set(range(machine.cores)), create=True))
        enter(patch("os.cpu_count", lambda: machine.cores))
        enter(patch("os.sysconf", _sysconf(machine)))
        enter(patch("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(*_disk(machine))))  # type: ignore[attr-defined]
        enter(patch("agentrl.core.operating_system.CGROUP", root / "no-cgroup"))
        enter(patch("importlib.util.find_spec", _finder(machine, root)))
        enter(patch("shutil.which", _which(machine, programs)))
        enter(patch("huggingface_hub.constants.HF_HUB_CACHE", str(root / "hub")))
        enter(patch("huggingface_hub.constants.HF_HUB_OFFLINE", True))
        enter(patch("agentrl.core.disk.mount_point", lambda path: Path("/")))
        stack.callback(_forget)
        _forget()
        yield


def _forget() -> None:
    """Forget what was asked of another machine."""
    from agentrl.core import model_shape
    from agentrl.engine import engine_args

    model_shape.local_config.cache_clear()
    engine_args._known.cache_clear()


def _variables(machine: Machine, root: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in BASE_VARIABLES if name in os.environ}
    own = {"HOME": str(root / "home"), "PATH": f"{root / 'bin'}:/usr/bin:/bin", "TERM": "dumb", "COLUMNS": "160", "NO_COLOR": "1"}
    return {**kept, **own, **machine.variables}


def _sysconf(machine: Machine) -> Callable[[Any], int]:
    real, own = os.sysconf, {"SC_PAGE_SIZE": PAGE, "SC_PHYS_PAGES": int(machine.host_gib * GIB) // PAGE}
    return lambda name: own[name] if name in own else real(name)


def _disk(machine: Machine) -> tuple[int, int, int]:
    total, free = int(2 * machine.disk_gib * GIB), int(machine.disk_gib * GIB)
    return total, total - free, free


def _called_by_agentrl() -> bool:
    """Return True where the caller of a patched function is a module of agentrl."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("agentrl.")


def _finder(machine: Machine, root: Path) -> Callable[..., Any]:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        if name not in SIMULATED or not _called_by_agentrl():
            return real(name, package)
        if name not in machine.packages:
            return None
        if name == "torch":
            return SimpleNamespace(name=name, origin=str(root / "torch" / "__init__.py"))
        return real(name, package) or SimpleNamespace(name=name, origin=None)

    version = root / "torch" / "version.py"
    version.parent.mkdir(parents=True, exist_ok=True)
    version.write_text(f"cuda: Optional[str] = {machine.torch_cuda or None!r}\n", encoding="utf-8")
    return find_spec


def _which(machine: Machine, programs: Path) -> Callable[..., str | None]:
    real, there = shutil.which, machine.programs | REAL_PROGRAMS

    def which(name: Any, *more: Any, **named: Any) -> str | None:
        if not _called_by_agentrl():
            return real(name, *more, **named)
        return str(programs / name) if name in there else None

    return which


def _write_programs(folder: Path, machine: Machine) -> None:
    """Write the ``nvidia-smi`` of the machine, or remove it."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.unlink(missing_ok=True)
    if machine.gpus:
        lines = "\\n".join([f"{machine.gpu_gib * 1024:.0f}"] * machine.gpus)
        program.write_text(f"#!/bin/sh\nprintf '{lines}\\n'\n", encoding="utf-8")
        program.chmod(0o755)
