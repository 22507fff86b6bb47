"""Every family of models is certified again, and docs/models.md says what is found."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.runs import ROOT

PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_the_page_says_what_certify_finds(part: int) -> None:
    command = [sys.executable, "-m", "tests.model_matrix", "--check", f"{part}/{PARTS}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" names, 0 differ\n")
