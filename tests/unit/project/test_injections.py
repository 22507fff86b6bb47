"""The faults that `make test-faults` injects find the methods that they change."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.support import INJECT

OPENED = """
import importlib, sitecustomize
for name, methods in sitecustomize.DOORS.items():
    module = importlib.import_module(name)
    for owner, method in methods:
        changed = vars(getattr(module, owner))[method]
        assert changed.__wrapped__.__name__ == method, changed
        print(owner, method)
"""


def with_faults(code: str) -> subprocess.CompletedProcess[str]:
    """The end of a program that would be disturbed if it were a run."""
    path = os.pathsep.join(filter(None, (str(INJECT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "AGENTRL_TEST_FAULTS": "half_load=3"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=100)


def test_every_method_that_a_fault_changes_is_there_with_its_parameters() -> None:
    done = with_faults(OPENED)
    assert done.returncode == 0, done.stderr
    changed = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert {("VllmEngine", "_load_weights"), ("VllmEngine", "_sample"), ("LearnerRank", "train")} <= changed


@pytest.mark.parametrize(
    "door",
    [
        "('VllmEngine', '_renamed'): sitecustomize.sample",
        "('Renamed', '_sample'): sitecustomize.sample",
        "('VllmEngine', '_sample'): sitecustomize.save_checkpoint",
        "('VllmEngine', 'generate'): sitecustomize.sample",
    ],
)
def test_a_method_that_is_not_there_ends_the_run_and_is_named(door: str) -> None:
    done = with_faults(
        f"import sitecustomize\nsitecustomize.DOORS['agentrl.engine.vllm_engine'] = {{{door}}}\nimport agentrl.engine.vllm_engine"
    )
    assert done.returncode == 1
    assert "TypeError: agentrl.engine.vllm_engine." in done.stderr
    assert "sitecustomize.py" in done.stderr
