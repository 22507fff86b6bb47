"""Run one coroutine so that Ctrl-C and SIGTERM cancel it once, let it clean up, and a second signal forces the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

FORCED = 130


def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end.

    Returns:
        What `work` returns.

    Raises:
        KeyboardInterrupt: If a signal cancelled it; by then its own cleanup is done.
    """
    return asyncio.run(_supervised(work))


async def _supervised(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    seen: list[int] = []

    def on_signal(number: int) -> None:
        seen.append(number)
        if len(seen) > 1:
            sys.stderr.write("agentrl: forced to end\n")
            os._exit(FORCED)
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
