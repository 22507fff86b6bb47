"""A thread beside the event loop for what takes long, as with a tokenizer, which no two threads may use at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")

SHORT = 16_384
"""Characters that are rendered and made tokens within a few milliseconds."""


class Lane:
    """Runs work one piece after another: short work on the event loop if nothing else runs, everything else on a thread.

    Work up to `short` characters is short.
    """

    def __init__(self, short: int = SHORT) -> None:
        self._short = short
        self._under_way: list[Future[Any]] = []

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentrl-lane")

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Return what `work` returns; `size` is the number of characters that it goes through."""
        self._under_way = [future for future in self._under_way if not future.done()]
        if size <= self._short and not self._under_way:
            return work()
        future = self._executor.submit(work)
        self._under_way.append(future)  # until it is done, also if nobody waits for it any more
        return await asyncio.wrap_future(future)


class Turns:
    """Lets tasks go on one in each round of the event loop, so that many that become ready at once do not keep the others waiting."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def take(self) -> None:
        """Wait for the turn of this task; unblocked by the next rounds of the event loop."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._pass_on, loop)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                loop.call_soon(self._pass_on, loop)
                return
        self._is_taken = False
