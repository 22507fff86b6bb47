"""A pytest plugin: results of tests in a file, one JSON line each, so that a session that was ended can be continued.

``--results FILE`` adds them to the file, and leaves out the tests that passed or were skipped there before.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SUITES = ("planted", "browser", "clients", "real_model", "faults", "slow")
"""Marks of the tests that `make test` leaves out; a test with several of them belongs to the first."""
LIMITS_S = {"planted": 3600, "browser": 300, "clients": 200, "real_model": 1800, "faults": 1200, "slow": 1200}
"""Longest time of a test of each suite that has no limit of its own."""

MARKED_FILES = pytest.StashKey[set[str]]()
"""Collected files that have tests of `SUITES`."""


@dataclass(frozen=True, slots=True)
class Result:
    """One test: its name, its suite, "passed", "failed" or "skipped", the seconds of it and its fixtures, and why it was skipped."""

    id: str
    suite: str
    outcome: str
    seconds: float
    reason: str = ""


def suite_of(marks: Iterable[str]) -> str:
    """Return the suite of a test with these marks."""
    found = set(marks)
    return next((suite for suite in SUITES if suite in found), "test")


def read(path: Path) -> dict[str, Result]:
    """Return the last result of each test in a file; a line that was not written whole is passed over."""
    found: dict[str, Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            result = Result(**json.loads(line))
        except (TypeError, ValueError):
            continue
        found[result.id] = result
    return found


def table(results: Iterable[Result]) -> Iterator[str]:
    """Return the lines of a table: suite, passed, failed, skipped, minutes."""
    suites: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        suites[result.suite].append(result)
    yield f"{'suite':<12}{'passed':>8}{'failed':>8}{'skipped':>9}{'minutes':>9}"
    every = [result for rows in suites.values() for result in rows]
    for name in ("test", *reversed(SUITES), "all"):
        rows = every if name == "all" else suites[name]
        counts = [sum(row.outcome == outcome for row in rows) for outcome in ("passed", "failed", "skipped")]
        yield f"{name:<12}{counts[0]:>8}{counts[1]:>8}{counts[2]:>9}{sum(row.seconds for row in rows) / 60:>9.1f}"


class Recorder:
    """Writes each result when the test has ended.

    Args:
        path: The file, which may hold results of an earlier session.
        writes: False in a worker that shares the tests with others: it leaves out the same tests, and the one that distributes them writes.
    """

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path, self._writes = path, writes
        if writes and path.exists() and not path.read_bytes().endswith(b"\n"):
            with path.open("a") as file:
                file.write("\n")  # or the first line of now would be lost with the last of then
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._worst: dict[str, pytest.TestReport] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has passed or could not run before."""
        done = {name for name, result in read(self._path).items() if result.outcome != "failed"}
        again = [item for item in items if item.nodeid in done]
        if again:
            items[:] = [item for item in items if item.nodeid not in done]
            config.hook.pytest_deselected(items=again)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the result after the last of the three phases."""
        if not self._writes:
            return
        name = report.nodeid
        self._seconds[name] += report.duration
        if name not in self._worst or report.outcome != "passed":
            self._worst[name] = report
        if report.when == "teardown":
            self._write(self._worst.pop(name), report.keywords)

    def _write(self, worst: pytest.TestReport, keywords: Mapping[str, Any]) -> None:
        reason = str(worst.longrepr[2]) if worst.skipped and isinstance(worst.longrepr, tuple) else ""
        seconds = round(self._seconds.pop(worst.nodeid), 2)
        line = {"id": worst.nodeid, "suite": suite_of(keywords), "outcome": worst.outcome, "seconds": seconds, "reason": reason}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--results``."""
    parser.addoption("--results", metavar="FILE", help="write a line for each test to FILE, and leave out those that it says passed")


def pytest_configure(config: pytest.Config) -> None:
    """Record if that is asked for."""
    if path := config.getoption("--results"):
        config.pluginmanager.register(Recorder(Path(path), writes=not hasattr(config, "workerinput")), "results")


@pytest.hookimpl(tryfirst=True)  # before any is left out by its marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test of a suite that has no limit of its own that of the suite."""
    marked = config.stash.setdefault(MARKED_FILES, set())
    for item in items:
        suite = suite_of(mark.name for mark in item.iter_markers())
        if suite == "test":
            continue
        marked.add(item.nodeid.partition("::")[0])
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMITS_S[suite]))
