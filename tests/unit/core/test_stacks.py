"""What a process says it is doing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from agentrl.core.process import describe_process


async def inner(never: asyncio.Event) -> None:
    await never.wait()


async def numbers(never: asyncio.Event) -> AsyncIterator[int]:
    await inner(never)
    yield 1


async def outer(never: asyncio.Event) -> None:
    async for _ in numbers(never):
        pass


def test_tasks_are_shown_with_everything_they_await_and_equal_ones_once() -> None:
    async def main() -> str:
        never = asyncio.Event()
        tasks = [asyncio.create_task(outer(never), name=f"episode {number}") for number in range(20)]
        await asyncio.sleep(0)
        told = await asyncio.to_thread(describe_process, [asyncio.get_running_loop()])
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return told

    told = asyncio.run(main())
    tasks = told[told.index("20 tasks: episode 0, episode 1, episode 10") :]
    assert "and 12 more" in tasks
    assert tasks.count("in inner") == 1
    places = [tasks.index(f"in {name}") for name in ("outer", "inner", "Event.wait")]
    assert places == sorted(places)
    assert "await never.wait()" in tasks


def test_threads_are_shown_by_name_and_a_closed_loop_is_left_out() -> None:
    held, done = threading.Event(), asyncio.new_event_loop()
    done.close()

    def wait_for_the_gate() -> None:
        held.wait()

    thread = threading.Thread(target=wait_for_the_gate, name="gate keeper")
    thread.start()
    try:
        told = describe_process([done])
    finally:
        held.set()
        thread.join()
    assert "thread gate keeper" in told
    assert "wait_for_the_gate" in told
    assert "thread MainThread" in told
