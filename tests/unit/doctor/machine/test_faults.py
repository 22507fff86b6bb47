"""Faults of a machine, each planted as far as a test may, are named by ``agentrl doctor`` with a remedy."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.core import process
from agentrl.doctor.machine import devices, limits, packages
from agentrl.doctor.machine.findings import Finding, Level

Usage = namedtuple("Usage", "total used free")
Plant = Callable[[pytest.MonkeyPatch, Path], None]


def no_shared_memory(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(limits.shared_memory, "__defaults__", (folder / "nowhere",))


def little_shared_memory(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Docker's 64 MiB, of which some are taken."""
    room = shutil.disk_usage
    patch.setattr(shutil, "disk_usage", lambda path: Usage(2**26, 2**20, 2**26 - 2**20) if str(path) == "/dev/shm" else room(path))


def full_disk(patch: pytest.MonkeyPatch, folder: Path) -> None:
    room = shutil.disk_usage
    patch.setattr(shutil, "disk_usage", lambda path: room(path) if str(path) == "/dev/shm" else Usage(2**40, 2**40 - 2**20, 2**20))


def few_files(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(resource, "getrlimit", lambda kind: (256, 4096) if kind == resource.RLIMIT_NOFILE else (-1, -1))


def few_processes(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "pids.max").write_text("64\n", encoding="utf-8")
    patch.setattr(limits.processes, "__defaults__", (folder,))


def dead_port(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A machine whose address is not its own, as after a change of networks."""
    patch.setattr(limits, "own_address", lambda: "203.0.113.7")


def skewed_clock(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A clock an hour behind that of the file system."""
    patch.setattr(limits.file_clock, "__defaults__", (lambda: time.time() - 3600,))


def fast_clock(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A clock an hour before that of the file system."""
    patch.setattr(limits.file_clock, "__defaults__", (lambda: time.time() + 3600,))


def old_date(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(limits.clock_source, "__defaults__", (None, lambda: 0.0))


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """Metadata of an installed package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


def another_torch(patch: pytest.MonkeyPatch, folder: Path) -> None:
    wheel(folder, "vllm", "0.31.0", "torch==2.10.0", "numpy", "ray[cgraph]>=2.48; extra == 'ray'")
    patch.syspath_prepend(str(folder))


def vllm_outside_the_window(patch: pytest.MonkeyPatch, folder: Path) -> None:
    wheel(folder, "vllm", "0.14.1")
    patch.syspath_prepend(str(folder))


def cuda_without_device(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "version.py").write_text("cuda: Optional[str] = '13.0'\n", encoding="utf-8")
    find = process.importlib.util.find_spec
    origin = SimpleNamespace(origin=str(folder / "__init__.py"))
    patch.setattr("importlib.util.find_spec", lambda name, *rest: origin if name == "torch" else find(name, *rest))
    patch.setenv("CUDA_VISIBLE_DEVICES", "")


def damaged_install(patch: pytest.MonkeyPatch, folder: Path) -> None:
    wheel(folder, "agentrl", "9.9", "transformers>=99")
    patch.syspath_prepend(str(folder))


FAULTS: list[tuple[Plant, str, str, str]] = [
    (no_shared_memory, "shared memory", "nowhere cannot be written: No such file or directory", "--shm-size"),
    (little_shared_memory, "shared memory", "63.0 MiB of 64.0 MiB free at /dev/shm", "--shm-size"),
    (full_disk, "disk of runs", "1.0 MiB of 1024.0 GiB free", "--run-dir"),
    (few_files, "open files", "256", "ulimit -n 4096"),
    (dead_port, "ports of this machine's address", "no connection to 203.0.113.7", "firewall"),
    (skewed_clock, "clock of files", "+3600.0 s from this machine's", "timedatectl"),
    (fast_clock, "clock of files", "-3600.0 s from this machine's", "timedatectl"),
    (old_date, "clock", "s before the date of agentrl's own files", "timedatectl"),
    (another_torch, "vllm and torch", "vllm 0.31.0 asks for torch==2.10.0, 2.", 'pip install "torch==2.10.0"'),
    (vllm_outside_the_window, "vLLM", "vllm 0.14.1", 'pip install "vllm>=0.26,<0.34"'),
    (cuda_without_device, "GPUs", "none seen, and PyTorch is built for CUDA 13.0", "unset it"),
    (damaged_install, "agentrl and transformers", "agentrl 9.9 asks for transformers>=99", "transformers>=99"),
]


def examined(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    code = main(["doctor", "--no-trials", "--json"])
    return code, json.loads(capsys.readouterr().out)["findings"]


@pytest.mark.linux
@pytest.mark.parametrize(("plant", "name", "found", "remedy"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_wrong_and_has_a_remedy(
    *args: Any, plant: Plant, name: str, found: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plant(monkeypatch, tmp_path)
    code, findings = examined(capsys)
    (bad,) = [each for each in findings if each["name"] == name]
    assert (code, bad["level"]) == (1, "wrong")
    assert found in bad["found"]
    assert remedy in bad["remedy"]


def test_few_processes_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few_processes(monkeypatch, tmp_path)
    _, findings = examined(capsys)
    (bad,) = [each for each in findings if each["name"] == "processes"]
    assert (bad["level"], bad["found"]) == ("warning", "64")


def test_a_busy_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 1.0, 1.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    busy = limits.load()
    assert (busy.level, busy.found) == (Level.WARNING, "9.0 on 4 cores")
    monkeypatch.setattr(os, "getloadavg", lambda: (5.0, 9.0, 9.0))
    assert limits.load().level is Level.GOOD


def test_a_sound_machine_has_nothing_wrong_and_every_bad_finding_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = examined(capsys)
    assert code == 0
    assert {each["part"] for each in findings} == {"limits", "packages", "devices"}
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding(part="limits", name="memory", level=Level.WRONG)


def test_a_low_limit_of_open_files_is_that_of_the_process(tmp_path: Path) -> None:
    """Really lowered, in a process of its own."""
    command = f"ulimit -n 300; exec {sys.executable} -m agentrl doctor --no-trials"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert ran.returncode == 1
    assert "wrong limits, open files: 300" in ran.stdout
    assert "fix  " in ran.stdout


def test_a_port_that_answers_nobody_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        port = taken.getsockname()[1]
        assert main(["doctor", "--ray-address", f"127.0.0.1:{port}"]) == 2
    assert f"--ray-address = '127.0.0.1:{port}': nobody listens there" in capsys.readouterr().err


def test_a_container_is_held_to_its_own_limits(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(str(2**31), encoding="utf-8")
    (tmp_path / "memory.current").write_text(str(2**31 - 2**20), encoding="utf-8")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 0\n", encoding="utf-8")
    tight = limits.memory(tmp_path)
    assert (tight.level, tight.found) == (Level.WRONG, "1.0 MiB of 2.0 GiB free")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**31 - 2**20}\n", encoding="utf-8")
    assert limits.memory(tmp_path).found == "2.0 GiB of 2.0 GiB free"  # what is only cached can be had
    (tmp_path / "cpu.max").write_text("150000 100000\n", encoding="utf-8")
    assert limits._quota(tmp_path) == 1.5


def test_versions_that_differ_between_machines_are_named() -> None:
    machines = {"a": {"torch": "2.13.0+cu130", "ray": "2.60.0"}, "b": {"torch": "2.13.0+cpu", "ray": "2.59.0"}, "c": {"torch": "2.13.0"}}
    (differing,) = packages.differing(machines)
    assert (differing.name, differing.level) == ("ray", Level.WRONG)
    assert differing.found == "2.60.0 on a; 2.59.0 on b; missing on c"


SMI = """#!/bin/sh
case "$1" in
  --query-gpu=name*) cat <<'END'
{cards}
END
  ;;
  nvlink) cat <<'END'
{links}
END
  ;;
esac
"""
CARD = "NVIDIA H100 80GB HBM3, 580.95.05, 81559, 3, Default, Disabled, 16, 16, 0"
BAD = "NVIDIA H100 80GB HBM3, 580.95.05, 81559, 40000, Exclusive_Process, Enabled, 8, 16, 12"


def with_smi(patch: pytest.MonkeyPatch, folder: Path, cards: str, links: str = "") -> None:
    """A program that answers as ``nvidia-smi`` does on a machine with these GPUs."""
    program = folder / "nvidia-smi"
    program.write_text(SMI.format(cards=cards, links=links), encoding="utf-8")
    program.chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def looked_at(patch: pytest.MonkeyPatch, count: int, of_driver: tuple[int, int] | None = (13, 0), cuda: str = "13.0") -> dict[str, Finding]:
    patch.setattr(devices, "cuda_torch", lambda: cuda)
    patch.setattr(devices, "num_gpus", lambda asked: count)
    patch.setattr(devices, "cuda_of_driver", lambda: of_driver)
    return {finding.name: finding for finding in devices.devices()}


def test_sound_gpus_are_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_smi(
        monkeypatch,
        tmp_path,
        f"{CARD}\n{CARD}",
        "GPU 0: H100 (UUID: x)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\nGPU 1: H100\n\t Link 0: 26.5 GB/s",
    )
    found = looked_at(monkeypatch, 2)
    assert {finding.level for finding in found.values()} == {Level.GOOD}
    assert found["GPU 0"].found == "NVIDIA H100 80GB HBM3, driver 580.95.05, 0.0 of 79.6 GiB held by others"
    assert found["NVLink"].found == "26 GB/s of each GPU"


def test_bad_conditions_of_gpus_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_smi(monkeypatch, tmp_path, f"{CARD}\n{BAD}")
    found = looked_at(monkeypatch, 2, of_driver=(12, 8))
    levels = {name: str(finding.level) for name, finding in found.items() if finding.level is not Level.GOOD}
    assert levels == {
        "driver": "wrong",
        "GPU 1": "warning",
        "GPU 1, mode": "warning",
        "GPU 1, MIG": "warning",
        "GPU 1, memory errors": "wrong",
        "GPU 1, PCIe": "warning",
        "NVLink": "warning",
    }
    assert found["driver"].found == "knows CUDA 12.8, PyTorch is built for 13.0"


@pytest.mark.parametrize(
    ("of_driver", "cuda", "level"), [((13, 1), "13.0", "good"), ((13, 0), "13.2", "warning"), (None, "13.0", "not tried")]
)
def test_a_driver_is_held_to_the_cuda_of_torch(of_driver: tuple[int, int] | None, cuda: str, level: str) -> None:
    assert str(devices.driver(cuda, of_driver).level) == level


def test_a_gpu_with_a_torch_for_cpus_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = looked_at(monkeypatch, 1, cuda="")
    assert (found["GPUs"].level, found["GPUs"].found) == (Level.WRONG, "1, and PyTorch is built for CPUs")
    assert found["nvidia-smi"].level is Level.UNTRIED


def test_gpus_that_do_not_reach_each_other_are_named() -> None:
    assert devices.peers([[True, True], [True, True]]).found == "between all 2 GPUs"
    apart = devices.peers([[True, True, False], [True, True, True], [False, True, True]])
    assert (apart.level, apart.found) == (Level.WARNING, "not between 0 and 2")
