"""Requests and publications kept apart, for an engine that does not say which weights sampled a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from agentrl.core.errors import TransferAbandonedError


class Gate:
    """Lets no request see two versions: a publication waits for the requests under way, and later ones wait for its end."""

    def __init__(self) -> None:
        self._under_way: set[str] = set()
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()

    @asynccontextmanager
    async def request(self, request_id: str) -> AsyncIterator[None]:
        """Hold the present version within the block, once no publication is under way."""
        # In a loop, because another publication may have closed the gate before this task runs again.
        while not self._open.is_set():
            await self._open.wait()
        self._under_way.add(request_id)
        self._empty.clear()
        try:
            yield
        finally:
            self._under_way.discard(request_id)
            if not self._under_way:
                self._empty.set()

    @asynccontextmanager
    async def publication(self, abort: Callable[[str], Awaitable[None]] | None) -> AsyncIterator[None]:
        """Publish within the block, once no request is under way; after a transfer that was given up, requests wait for the next one.

        Args:
            abort: Ends a request with what was sampled; given if the engine sleeps, and so would not finish it.
        """
        self._open.clear()
        try:
            if abort is not None:
                for request_id in sorted(self._under_way):
                    await abort(request_id)
            await self._empty.wait()
            yield
        except TransferAbandonedError:
            raise
        except BaseException:
            # Requests go on, and find out that the engine is fenced.
            self._open.set()
            raise
        self._open.set()
