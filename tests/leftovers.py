"""Fails a test session that leaves processes behind, and ends them.

A process belongs to the session if it descends from the test runner, or if it inherited the mark that the runner puts
into its environment; the mark finds what was orphaned, such as a Ray daemon whose driver was killed. Where several workers share
the tests (pytest-xdist), the runner that distributes them looks, after its workers have ended.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator, Iterable

import psutil
import pytest

MARK = "AGENTRL_TEST_SESSION"
GRACE_S = 10.0
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

_found: list[str] = []


def pytest_configure() -> None:
    os.environ.setdefault(MARK, uuid.uuid4().hex)


@pytest.hookimpl(wrapper=True, trylast=True)  # after the workers have been told to end, before the summary is written
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    yield
    if hasattr(session.config, "workerinput"):
        return
    _found[:] = end_leftovers(session_processes(os.environ[MARK]), grace_s=GRACE_S)
    if _found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _found:
        terminalreporter.section("processes left running", red=True)
        for line in _found:
            terminalreporter.line(line)


def end_leftovers(processes: Iterable[psutil.Process], *, grace_s: float) -> list[str]:
    """Wait for `processes` to end by themselves, then kill the rest.

    Returns:
        One line for each process that had to be killed.
    """
    _, late = psutil.wait_procs(list(processes), timeout=grace_s)
    lines = [describe(process) for process in late]
    for process in late:
        _kill(process)
    psutil.wait_procs(late, timeout=5)
    return lines


def session_processes(mark: str) -> Iterable[psutil.Process]:
    """Processes that this session started and that still run, this process and Python's own helpers excepted."""
    mine = {process.pid for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid != os.getpid() and (process.pid in mine or _has_mark(process, mark)) and _counts(process):
            yield process


def describe(process: psutil.Process) -> str:
    """Process id and command line, for people."""
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return f"{process.pid}: gone"


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def _counts(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and not any(name in command for name in HELPERS)
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return
