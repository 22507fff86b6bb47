"""A test session of a copy of the project that has collected its tests, each order being carried out in a fork of it.

This saves the imports and the collection, which take longer than most tests. A planted bug is put into the functions in memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Channel, kill_group
from tests.mutants.fresh import FirstFailure, enter, load_quick_hypothesis, options, with_limit
from tests.mutants.recorder import Recorder, trace
from tests.mutants.swap import Functions, NotSwappable, functions_of, swap

NOT_SWAPPED = 7
"""Exit code if a bug cannot be put into the functions in memory; no exit code of pytest."""


def main(settings: str) -> int:
    """Collect the tests of a copy, and serve."""
    wanted = json.loads(Path(settings).read_text())
    enter(wanted["copy"])
    load_quick_hypothesis()
    plugin = Session(Channel(), wanted["copy"], wanted["files"], Path(wanted["imported"]))
    with open(wanted["log"], "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return int(pytest.main([*options(wanted["copy"]), *wanted["tests"]], plugins=[plugin]))


class Session:
    """A pytest plugin that carries out orders in place of running the tests that were collected."""

    def __init__(self, channel: Channel, copy: str, files: Sequence[str], imported: Path) -> None:
        self._channel, self._copy = channel, copy
        self._files = files
        self._imported = imported
        self._coverage = trace(copy, files)
        self._functions: Functions = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # pytest then tells which files could not be collected
        self._coverage.stop()
        data = self._coverage.get_data()
        self._imported.write_text(json.dumps({os.path.relpath(file, self._copy): data.lines(file) for file in data.measured_files()}))
        self._functions = functions_of({os.path.join(self._copy, file) for file in self._files})
        self._channel.serve(lambda order: self._work(session, order), after=kill_group)
        return True

    def _work(self, session: pytest.Session, order: dict[str, Any]) -> int:
        plugins, items = session.config.pluginmanager, {item.nodeid: item for item in session.items}
        plugins.unregister(self)
        plugins.register(FirstFailure(order["failed"]))
        if "record" in order:
            session.items[:] = [item for test, item in items.items() if test.partition("::")[0] == order["record"]]
            recorder = Recorder(self._copy, self._files)
            plugins.register(recorder)
            code = _run(session)
            Path(order["result"]).write_text(json.dumps(recorder.result()))
        elif "text" in order and not self._swapped(order["file"], order["text"]):
            code = NOT_SWAPPED
        else:
            session.items[:] = [with_limit(items[test], limit_s) for test, limit_s in order["picked"].items()]
            code = _run(session)
        sys.stdout.flush()
        os._exit(code)

    def _swapped(self, file: str, text: str) -> bool:
        path = os.path.join(self._copy, file)
        try:
            swap(self._functions, path, text, Path(path).read_text(encoding="utf-8"))
        except NotSwappable:
            return False
        return True


def _run(session: pytest.Session) -> int:
    try:
        session.config.hook.pytest_runtestloop(session=session)
    except session.Failed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    else:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
    session.config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
    return int(session.exitstatus)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
