"""Run one coroutine so that a first Ctrl-C or SIGTERM ends it in order, and a second one at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentrl.flow.state import StopRequest

T = TypeVar("T")

FORCED = 130


def run_until_signal(work: Coroutine[Any, Any, T], stop: StopRequest | None = None, stop_timeout_s: float = 0.0) -> T:
    """Run `work` to its end.

    Args:
        work: Cleans up after itself when it is cancelled.
        stop: Asked first, if `work` has something that hears it; `work` is cancelled if it has not returned in time.
        stop_timeout_s: That time.

    Returns:
        What `work` returns.

    Raises:
        KeyboardInterrupt: If a signal cancelled it; by then its own cleanup is done.
    """
    return asyncio.run(_supervised(work, stop or StopRequest(), stop_timeout_s))


async def _supervised(work: Coroutine[Any, Any, T], stop: StopRequest, stop_timeout_s: float) -> T:
    task = asyncio.ensure_future(work)
    seen: list[int] = []

    def on_signal(number: int) -> None:
        seen.append(number)
        if len(seen) > 1:
            sys.stderr.write("agentrl: forced to end\n")
            os._exit(FORCED)
        if stop.heard:
            sys.stderr.write("\nagentrl: finishing the step under way, then saving; once more to force\n")
            stop.ask()
            loop.call_later(stop_timeout_s, task.cancel)
        else:
            sys.stderr.write("\nagentrl: stopping; once more to force\n")
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if seen:
            raise KeyboardInterrupt from None
        raise
