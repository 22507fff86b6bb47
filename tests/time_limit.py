"""A pytest plugin for test sessions that have to end in time: ``--stop-after SECONDS`` begins no test later than that."""

from __future__ import annotations

import time

import pytest

_BEGIN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stop-after", metavar="SECONDS", type=float, help="skip what has not begun SECONDS after the session did")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.getoption("--stop-after")
    if limit_s is not None and time.monotonic() - _BEGIN > limit_s:
        pytest.skip(f"no time is left: --stop-after={limit_s:g}")
