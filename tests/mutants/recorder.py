"""Records, for each test, the lines that it executes of the files in which bugs are planted, and its seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Generator
from typing import Any

import pytest
from coverage import Coverage


class Recorder:
    """A pytest plugin that records who executes a line and for how long: a test, or a fixture that several tests share.

    Args:
        folder: The folder of the project.
        files: The files in it whose lines are recorded.
    """

    def __init__(self, folder: str, files: Collection[str]) -> None:
        self._folder = folder
        self._coverage = trace(folder, files)
        self._owner, self._since = "", time.monotonic()
        self._seconds: dict[str, float] = {}
        self._fixtures: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = self._switch(item.nodeid)
        try:
            return (yield)
        finally:
            self._switch(before)
            self._fixtures[item.nodeid] = [_name(fixture) for fixture in getattr(item, "fixturenames", ())]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._switch(_name(fixturedef.argname))
        try:
            return (yield)
        finally:
            self._switch(before)

    def result(self) -> dict[str, Any]:
        """End the recording.

        Returns:
            ``seconds`` of each test and shared fixture, ``fixtures`` of each test, and for each file in ``lines`` the tests and
            fixtures by the number of a line.
        """
        self._switch("")
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {os.path.relpath(file, self._folder): data.contexts_by_lineno(file) for file in data.measured_files()}
        fixtures = {test: [name for name in names if name in self._seconds] for test, names in self._fixtures.items()}
        return {"seconds": self._seconds, "fixtures": fixtures, "lines": lines}

    def _switch(self, owner: str) -> str:
        now, before = time.monotonic(), self._owner
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._owner, self._since = owner, now
        self._coverage.switch_context(owner)
        return before


def trace(folder: str, files: Collection[str]) -> Coverage:
    """Return a recorder of the lines of these files of a folder that has begun."""
    paths = [os.path.join(folder, file) for file in files]
    recorder = Coverage(data_file=None, include=paths, config_file=False, messages=False)
    recorder.set_option("run:core", "ctrace")  # sys.monitoring, the default of newer Pythons, reports a line to one context alone
    recorder.start()
    return recorder


def _name(fixture: str) -> str:
    return f"fixture {fixture}"
