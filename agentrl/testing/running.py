"""Running a check to its end, from a test with or without an event loop, and its words for what is violated."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LIMIT_S = 120.0
"""Seconds of a whole check."""


def finish(check: Coroutine[Any, Any, None], name: str) -> None:
    """Run a check in an event loop of its own, on a thread of its own, because this thread may have one.

    Raises:
        AssertionError: If something is violated, something else is raised, or the check does not end.
    """

    async def within_limit() -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                await check
        except TimeoutError:
            raise AssertionError(f"{name} does not end: a call of it took longer than {LIMIT_S:g} s") from None
        except Exception as error:
            raise AssertionError(f"{name} raised {type(error).__name__} where nothing was wrong: {error}") from error

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentrl-testing") as thread:
        thread.submit(asyncio.run, within_limit()).result()


def require(holds: bool, words: str) -> None:
    """Raise the words unless something holds; a plain ``assert`` would be lost under ``python -O``.

    Raises:
        AssertionError: If it does not hold.
    """
    if not holds:
        raise AssertionError(words)
