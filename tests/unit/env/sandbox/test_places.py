"""Places of sandboxes: how many start, and how many run at a time."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.env.sandbox.places import starting
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import SandboxChoice, SandboxSpec, use_choice
from agentrl.env.timing import Stopwatch, use_stopwatch

pytestmark = pytest.mark.anyio

NONE = SandboxSpec(kind="none")


class Meter:
    """The largest number of things that went on at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def during(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1


async def test_so_many_sandboxes_run_at_a_time() -> None:
    meter, watch = Meter(), Stopwatch()

    async def episode() -> None:
        use_choice(SandboxChoice(kind="none", max_running=2))
        use_stopwatch(watch)
        async with Sandbox(NONE):
            await meter.during()

    await asyncio.gather(*(episode() for _ in range(7)))
    assert meter.most == 2
    waits = [span.seconds for span in watch.take() if span.name == "tool:sandbox wait"]
    assert len(waits) == 7
    assert max(waits) > 0.05


async def test_an_episode_with_a_sandbox_gets_another_without_a_wait() -> None:
    meter = Meter()

    async def episode() -> None:
        use_choice(SandboxChoice(kind="none", max_running=1))
        for _ in range(2):
            async with Sandbox(NONE), Sandbox(NONE):
                await meter.during()

    async with asyncio.timeout(10):
        await asyncio.gather(*(episode() for _ in range(3)))
    assert meter.most == 1


async def test_a_sandbox_that_cannot_be_opened_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no disk")

    async def episode() -> None:
        use_choice(SandboxChoice(kind="none", max_running=1))
        async with Sandbox(NONE):
            pass

    monkeypatch.setattr("agentrl.env.sandbox.in_folder.make_folder", fail)
    for _ in range(3):
        with pytest.raises(OSError, match="no disk"):
            await asyncio.wait_for(episode(), 5)
    waiting = asyncio.create_task(episode())
    await asyncio.sleep(0)
    waiting.cancel()
    monkeypatch.undo()
    await asyncio.wait_for(episode(), 5)


async def test_places_to_start_are_apart_from_those_to_run() -> None:
    meter = Meter()

    async def start() -> None:
        use_choice(SandboxChoice(max_starting=3, max_running=1))
        async with starting():
            await meter.during()

    await asyncio.gather(*(start() for _ in range(9)))
    assert meter.most == 3
