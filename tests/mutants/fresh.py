"""Runs tests of a copy of the project in forks of a process that has the libraries loaded, but no module of the project."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.forks import kill_group, serve


class Picked:
    """A pytest plugin that runs some tests of those collected, in this order.

    Args:
        limits_s: Seconds that each may take, by its name.
    """

    def __init__(self, limits_s: Mapping[str, float]) -> None:
        self._limits_s = limits_s

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the picked tests; a test that the bug has renamed is left out."""
        by_name = {item.nodeid: item for item in items}
        items[:] = [with_limit(by_name[test], limit_s) for test, limit_s in self._limits_s.items() if test in by_name]


class FirstFailure:
    """A pytest plugin that writes the name of the first test that fails into a file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid, encoding="utf-8")


def with_limit(item: pytest.Item, limit_s: float) -> pytest.Item:
    """Return a test that fails after so many seconds."""
    item.add_marker(pytest.mark.timeout(limit_s), append=False)
    return item


def enter(copy: str) -> None:
    """Make a copy of the project the one whose modules are imported, here and in processes that are started."""
    project = os.getcwd()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("agentrl", "tests")]:
        del sys.modules[name]
    sys.path[:] = [copy, *(path for path in sys.path if os.path.abspath(path or ".") != project)]
    os.chdir(copy)
    os.environ.update(PYTHONPATH=copy, PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True


def options(copy: str) -> list[str]:
    """Return the options of pytest for a copy: nobody reads how a test failed, and nobody wants its files."""
    return ["-x", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={copy}.tmp"]


def load_quick_hypothesis() -> None:
    """Make property tests fail at the first example that fails, of the same examples each time."""
    from hypothesis import Phase, settings

    settings.register_profile("bugs", database=None, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("bugs")


def _load() -> None:
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _work(order: dict[str, Any]) -> int:
    enter(order["copy"])
    load_quick_hypothesis()
    plugins = [Picked(order["picked"]), FirstFailure(order["failed"])] if "picked" in order else []
    code = pytest.main([*options(order["copy"]), *order["tests"]], plugins=plugins)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(_load, _work, after=kill_group)
