"""Standard streams that are closed when a command starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ENV = str(Path(__file__).parents[3] / "envs" / "calculator.py")
TOLD = "agentrl: standard output = 'closed': has no place for what the command writes. Redirect it instead: > /dev/null.\n"


def shell(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(f"{sys.executable} -m agentrl {words}", shell=True, capture_output=True, text=True, timeout=100, check=False)


def test_closed_output_is_named() -> None:
    done = shell("--help >&-")
    assert (done.returncode, done.stderr) == (2, TOLD)


def test_closed_input_and_errors_are_those_of_the_null_device() -> None:
    done = shell(f"play {ENV} <&-")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "The input ended before the episode did.")
    done = shell("trian 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
