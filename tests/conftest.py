"""Fixtures every test may use."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from agentrl.engine.settings import without_gc
from tests.forks import end_all

# One thread for arithmetic, as engines and learners have on a CPU: what is tested to the last bit is tested for that.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.machines", "tests.signals", "tests.leftovers", "tests.time_limit", "tests.results", "tests.faults.report"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _forks_end() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model that reads images, with random weights."""
    from examples.vision_model.model import save_new_model

    return str(save_new_model(tmp_path_factory.mktemp("vision") / "model", layers=2))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Test files import PyTorch and much else, which later garbage collections need not look at again and again."""
    with without_gc():
        return (yield)
