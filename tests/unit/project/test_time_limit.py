"""``--stop-after``: what has not begun in time is skipped and said to be."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


def test_tests_that_would_begin_too_late_are_skipped(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    pytester.makeconftest("pytest_plugins = ['tests.time_limit']")
    pytester.makepyfile("import time\ndef test_slow(): time.sleep(1.1)\ndef test_late(): assert False")
    result = pytester.runpytest_subprocess("-rs", "--stop-after=1")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*no time is left: --stop-after=1*"])
