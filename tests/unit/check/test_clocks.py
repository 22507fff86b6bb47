"""A machine that is busy with other work, and calls that hold the event loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from agentrl.check.probe import UserCall, Watch, _async_call

COMPUTES_S = 0.3


@pytest.fixture
def crowded() -> Iterator[None]:
    """This process has one CPU, which two others use as well."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    while min(psutil.Process(process.pid).cpu_times().user for process in others) < 0.05:  # on a busy machine they begin late
        time.sleep(0.02)
    yield
    for process in others:
        process.kill()
        process.wait()
    os.sched_setaffinity(0, before)


def measured(seconds: float) -> UserCall:
    """The call of an async method that computes for so long."""

    async def step() -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < seconds:
            pass

    watch = Watch()
    asyncio.run(_async_call(step, "step", watch))
    return watch.calls[0]


@pytest.mark.linux  # other kernels do not tell it
@pytest.mark.usefixtures("crowded")
def test_time_without_a_cpu_is_not_the_time_of_the_call() -> None:
    call = measured(COMPUTES_S)
    assert call.seconds > 1.5 * COMPUTES_S, "the others have taken the CPU"
    assert call.computed_s >= COMPUTES_S
    assert call.longest_s < 1.3 * COMPUTES_S


def test_waiting_holds_the_loop_without_computing() -> None:
    async def step() -> None:
        time.sleep(0.1)  # noqa: ASYNC251

    watch = Watch()
    asyncio.run(_async_call(step, "step", watch))
    assert watch.calls[0].longest_s > 0.09
    assert watch.calls[0].computed_s < 0.05
