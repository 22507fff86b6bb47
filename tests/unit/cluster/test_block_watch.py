"""User code that blocks the event loop is named by file, line and text."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl import AgentInstance, StepResult, Task
from agentrl.cluster.runtime import BlockWatch
from agentrl.env.boundary import EnvLimits, EnvSession, blocked_at
from agentrl.env.threads import Threads

pytestmark = pytest.mark.anyio


def held(seconds: float) -> None:
    time.sleep(seconds)  # where it waits


LINE = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# where it waits" in text)


class Slow(AgentInstance):
    """Its `reset` gives nobody else a turn."""

    async def reset(self, state: Any) -> None:
        held(3.0)

    async def step(self, state: Any) -> StepResult:
        return StepResult(1.0, terminated=True)


async def play(cls: type[AgentInstance]) -> None:
    session = EnvSession(cls, __file__, Threads(1), EnvLimits())
    await session.reset(Task("x"), 0)
    await session.close()


async def test_the_line_that_blocks_is_found_from_another_thread() -> None:
    loop, thread, found = asyncio.get_running_loop(), threading.get_ident(), []
    asker = threading.Thread(target=lambda: found.append(asyncio.run(blocked_at(loop, thread, 1.0))))
    asker.start()
    await play(Slow)
    await asyncio.to_thread(asker.join)
    (text,) = found
    assert f"test_block_watch.py, line {LINE}, in held (`time.sleep(seconds)  # where it waits`) blocks the event loop" in text
    assert "plain def" in text
    assert await asyncio.to_thread(lambda: asyncio.run(blocked_at(loop, thread, 30.0))) == ""


async def test_code_of_this_package_and_waiting_are_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    watch = BlockWatch(every_s=0.05, wait_s=0.2)
    try:
        held(1.0)  # not called by the boundary
        await asyncio.sleep(0.5)
    finally:
        watch.close()
    assert not caplog.records


async def test_a_run_in_one_process_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = BlockWatch(every_s=0.05, wait_s=0.2)
    try:
        await play(Slow)
    finally:
        watch.close()
    (record,) = caplog.records
    assert "in held (`time.sleep(seconds)" in record.getMessage()
    assert "Ctrl-C twice" in record.getMessage()
