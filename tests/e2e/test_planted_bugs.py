"""Every bug of tests/mutants.toml is noticed by its tests, a part at a time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.runs import ROOT

PARTS = 16


@pytest.mark.planted
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_no_planted_bug_survives(part: int) -> None:
    command = [sys.executable, "-m", "tests.mutants", "--part", f"{part}/{PARTS}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" caught, 0 survived\n")
