"""``make install`` says which part of how many is under way, and fails when pip does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STUB = r"""#!/bin/sh
echo "$*" >> asked.txt
case "$*" in
  *cpu.txt*)
    sed -n 's/^\([A-Za-z0-9_.-]*\)==.*/Collecting \1\n  Downloading \1.whl/p' $(echo "$*" | grep -o 'requirements/[a-z]*.txt')
    echo "Installing collected packages: everything"
    exit ${PIP_EXIT:-0};;
esac
"""
"""A Python whose pip names each package as pip does, and installs nothing."""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def install(folder: Path, pip_exit: int, machine: str = "Linux x86_64") -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    python = folder / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB)
    python.chmod(0o755)
    words = ["make", "install", "VENV=env", f"MACHINE={machine}"]
    return subprocess.run(words, cwd=folder, env={**os.environ, "PIP_EXIT": str(pip_exit)}, capture_output=True, text=True, check=False)


def test_progress_is_shown_part_by_part(tmp_path: Path) -> None:
    done = install(tmp_path, 0)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    total = next(line for line in lines if line.startswith("2 of 4:")).split()[3]
    assert [line[:6] for line in lines if " of 4:" in line] == [f"{part} of 4" for part in (1, 2, 3, 4)]
    counts = [line for line in lines if line.endswith(f" of {total}")]
    assert counts[0] == f"20 of {total}"
    assert counts[-1] == f"{total} of {total}"
    assert "all there; installing" in lines
    assert (tmp_path / "env" / ".installed").exists()


def test_a_failure_of_pip_ends_it(tmp_path: Path) -> None:
    done = install(tmp_path, 1)
    assert done.returncode == 2
    assert "3 of 4" not in done.stdout
    assert not (tmp_path / "env" / ".installed").exists()


@pytest.mark.parametrize("machine", ["Linux aarch64", "Darwin arm64"])
def test_on_arm_torch_is_another_and_there_is_no_vllm(machine: str, tmp_path: Path) -> None:
    done = install(tmp_path, 0, machine)
    assert done.returncode == 0, done.stderr
    asked = re.findall(r"requirements/([\w-]+)\.txt", (tmp_path / "asked.txt").read_text())
    assert asked == ["build", "torch-arm64", "cpu", "dev", "compiled"]


def test_on_linux_x86_64_there_is_vllm(tmp_path: Path) -> None:
    install(tmp_path, 0)
    asked = re.findall(r"requirements/([\w-]+)\.txt", (tmp_path / "asked.txt").read_text())
    assert asked == ["build", "torch", "cpu", "dev", "vllm", "compiled"]


def test_another_machine_is_refused_by_name(tmp_path: Path) -> None:
    done = install(tmp_path, 0, "Linux riscv64")
    assert done.returncode == 2
    assert "are for Linux on x86-64 and aarch64 and macOS on arm64, this is Linux riscv64." in done.stderr
