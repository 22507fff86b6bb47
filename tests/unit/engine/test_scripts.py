"""Scripts without a main guard: processes that an engine spawns do not run them again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing
import sys

print("the script runs", flush=True)
from agentrl.core.process import without_main

if {guarded}:
    build = without_main
else:
    from contextlib import nullcontext as build

with build():
    worker = multiprocessing.get_context("spawn").Process(target=print, args=("the process works",))
    worker.start()
worker.join()
sys.exit(worker.exitcode)
"""


def run(folder: Path, *, guarded: bool) -> tuple[int, list[str]]:
    (folder / "script.py").write_text(SCRIPT.format(guarded=guarded), encoding="utf-8")
    found = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    return found.returncode, found.stdout.splitlines()


@pytest.mark.slow
def test_a_spawned_process_does_not_run_the_script_again(tmp_path: Path) -> None:
    assert run(tmp_path, guarded=True) == (0, ["the script runs", "the process works"])
    code, lines = run(tmp_path, guarded=False)
    assert (code, lines.count("the script runs")) == (1, 2)  # what happens without
