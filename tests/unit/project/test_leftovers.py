"""The test session's own check for processes left behind."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests import leftovers

pytest_plugins = ["pytester"]


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def orphan(mark: str) -> psutil.Process:
    """A process whose parent has ended."""
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9)'], stdout=-3, stderr=-3).pid)"
    environment = {**os.environ, leftovers.MARK: mark}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, start_new_session=True)
    return psutil.Process(int(done.stdout))


def test_an_orphan_is_found_by_its_mark_and_ended(mark):
    process = orphan(mark)
    assert process in set(leftovers.session_processes(mark))
    assert [line.split(":")[0] for line in leftovers.end_leftovers([process], grace_s=0.2)] == [str(process.pid)]
    assert process not in set(leftovers.session_processes(mark))


def test_a_process_that_ends_within_the_grace_is_no_leftover():
    with subprocess.Popen(["sleep", "0.3"]) as child:
        assert leftovers.end_leftovers([psutil.Process(child.pid)], grace_s=20) == []


def test_a_process_of_another_session_is_left_alone(mark):
    process = orphan("another session")
    try:
        assert process not in set(leftovers.session_processes(mark))
    finally:
        process.kill()


def test_a_session_with_a_leftover_fails_and_still_ends_with_its_summary(pytester, monkeypatch):
    pytester.makepyfile("import subprocess\ndef test_leaves_one(): subprocess.Popen(['sleep', '60'])")
    pytester.makeconftest("import tests.leftovers as plugin\nplugin.GRACE_S = 0.2\npytest_plugins = ['tests.leftovers']")
    monkeypatch.delenv(leftovers.MARK)
    monkeypatch.setenv("PYTHONPATH", str(Path(leftovers.__file__).parents[1]))
    result = pytester.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*processes left running*", "*sleep 60"])
    assert "1 passed" in result.stdout.lines[-1]
