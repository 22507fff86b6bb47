"""Requests for another number of engines, as files in the run directory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.api.scaling import ANSWER, REQUEST, answer_requests, request_engines
from agentrl.core.errors import ConfigError


class Pool:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def scale(self, number: int, *, grows: bool = False) -> str:
        self.asked.append(number)
        if number > 4:
            raise ConfigError("--num-engines", number, "is too many", "Ask for fewer.")
        return f"engines: 1 to {number}"


def ask(run_dir: Path, pool: Any, *numbers: int) -> list[str]:
    async def both() -> list[str]:
        answering = asyncio.ensure_future(answer_requests(run_dir, pool))
        await asyncio.sleep(0.05)
        try:
            return [await asyncio.to_thread(request_engines, run_dir, number, 20.0) for number in numbers]
        finally:
            answering.cancel()

    return asyncio.run(both())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_run_answers_each_request_once(run_dir: Path) -> None:
    pool = Pool()
    (run_dir / REQUEST).write_text('{"id": "old", "num_engines": 9}')  # left by a run that was killed
    assert ask(run_dir, pool, 2, 3) == ["engines: 1 to 2", "engines: 1 to 3"]
    assert pool.asked == [2, 3]
    assert not (run_dir / REQUEST).exists()
    assert not (run_dir / ANSWER).exists()


def test_a_refusal_arrives_with_its_remedy(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"--num-engines = 5: is too many\. Ask for fewer\."):
        ask(run_dir, Pool(), 5)


def test_a_run_that_is_over_does_not_answer(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no run answered within 0 s"):
        request_engines(run_dir, 2, 0.2)
    assert not (run_dir / REQUEST).exists()


@pytest.mark.parametrize(("number", "problem"), [(0, "one engine at least"), (2, "is no run directory")])
def test_requests_that_make_no_sense_are_refused_at_once(tmp_path: Path, number: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        request_engines(tmp_path, number)
