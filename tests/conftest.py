"""Fixtures every test may use."""

import pytest

pytest_plugins = ["tests.leftovers", "tests.faults.report"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
