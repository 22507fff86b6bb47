"""``make install`` says which part of how many is under way, and fails when pip does."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STUB = r"""#!/bin/sh
case "$*" in
  *cpu.txt*)
    sed -n 's/^\([A-Za-z0-9_.-]*\)==.*/Collecting \1\n  Downloading \1.whl/p' requirements/cpu.txt requirements/dev.txt
    echo "Installing collected packages: everything"
    exit ${PIP_EXIT:-0};;
esac
"""
"""A Python whose pip names each package as pip does, and installs nothing."""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def install(folder: Path, pip_exit: int) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    python = folder / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB)
    python.chmod(0o755)
    words = ["make", "install", "VENV=env"]
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
