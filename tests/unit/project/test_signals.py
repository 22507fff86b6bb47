"""Tests that a script runs in its background, where SIGINT is ignored."""

import signal
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TEST = """
import os, signal, subprocess, sys

def test_a_program_can_be_interrupted():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert done.stderr.endswith("KeyboardInterrupt\\n")

def test_the_runner_still_ignores_it():
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_programs_that_tests_start_do_not_ignore_it(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    pytester.makeconftest("pytest_plugins = ['tests.signals']")
    # A worker is a program that the runner started, so SIGINT has its default there.
    pytester.makepyfile(TEST if workers == "0" else TEST.partition("def test_the_runner")[0])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = pytester.runpytest_subprocess("-n", workers)
    finally:
        signal.signal(signal.SIGINT, before)
    result.assert_outcomes(passed=2 if workers == "0" else 1)
