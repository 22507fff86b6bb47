"""The rollout worker's end of the socket to an episode's process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, cast

from agentrl.env.isolation.wire import HEADER, MAX_ANSWER, framed

DRAIN_S = 0.2


class Link(asyncio.Protocol):
    """Frames, one answer to a call. What arrives is not trusted: one that is too long ends the link, one to an old call is dropped."""

    def __init__(self, answer: asyncio.Future[bytes | None]) -> None:
        self._answer, self._number = answer, 0
        self._buffer = bytearray()
        self.refused = ""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio calls it."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """As asyncio calls it."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            size, number = HEADER.unpack_from(self._buffer)
            if size > MAX_ANSWER:
                self.refused = f"its process sent {size} bytes, more than {MAX_ANSWER}; it was killed"
                self.abort()
                return
            if len(self._buffer) < HEADER.size + size:
                return
            body = bytes(self._buffer[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            if number == self._number and not self._answer.done():
                self._answer.set_result(body)

    def connection_lost(self, error: Exception | None) -> None:
        """As asyncio calls it."""
        self._transport = None
        if not self._answer.done():
            self._answer.set_result(None)

    def call(self, body: bytes) -> asyncio.Future[bytes | None]:
        """Send a call; the future's result is the answer, or `None` if the connection is lost."""
        self._answer = asyncio.get_running_loop().create_future()
        self._number += 1
        if self._transport is None:
            self._answer.set_result(None)
        else:
            self.send(body)
        return self._answer

    def send(self, body: bytes) -> None:
        """Send something that is not answered."""
        if self._transport is not None:
            self._transport.write(framed(body, self._number))

    def abort(self) -> None:
        """Close at once; what waits for an answer gets `None`."""
        if self._transport is not None:
            self._transport.abort()


class EpisodeHandle:
    """A process that plays an episode, or waits for one.

    Attributes:
        number: Its name towards the zygote.
        died: Set when the process has ended, to the reason.
    """

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._connection: socket.socket | None = connection
        self._link: Link | None = None

    async def call(self, body: bytes, timeout_s: float) -> bytes | None:
        """Send a call and wait for the answer; `None` if the process ends before.

        Raises:
            TimeoutError: If there is no answer in time.
        """
        link = await self._open()
        answer = link.call(body)
        either: set[asyncio.Future[Any]] = {answer, self.died}
        done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise TimeoutError
        if not answer.done():  # it may have answered before it ended
            await asyncio.wait({answer}, timeout=DRAIN_S)
        return answer.result() if answer.done() else None

    def send(self, body: bytes) -> None:
        """Send something that is not answered."""
        if self._link is not None:
            self._link.send(body)

    async def reason(self, timeout_s: float) -> str:
        """Why it has ended; it may take a moment until that is known."""
        if self._link is not None and self._link.refused:
            return self._link.refused
        await asyncio.wait({self.died}, timeout=timeout_s)
        return self.died.result() if self.died.done() else "its process closed the connection; it was killed"

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.abort()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _open(self) -> Link:
        if self._link is None:
            assert self._connection is not None
            connection, self._connection = self._connection, None
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            unanswered: asyncio.Future[bytes | None] = loop.create_future()
            unanswered.set_result(None)
            _, self._link = await loop.create_connection(lambda: Link(unanswered), sock=connection)
        return self._link


def settle(future: asyncio.Future[str], reason: str) -> None:
    """Set a reason, unless there is one."""
    with contextlib.suppress(asyncio.InvalidStateError):
        future.set_result(reason)
