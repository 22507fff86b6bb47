"""Ends the process that the checks of the tests are forked from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.check.forks import end_server


@pytest.fixture(scope="package", autouse=True)
def _server_ends() -> Iterator[None]:
    yield
    end_server()
