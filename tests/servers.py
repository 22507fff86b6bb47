"""Small HTTP servers on loopback whose every byte is scripted, honest or not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """What a client sent, and the way to answer it."""

    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def answer(self, value: Any = None, *, status: int = 200, body: bytes | None = None, **headers: str) -> None:
        content = json.dumps(value).encode() if body is None else body
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}"]
        lines += [f"{name.replace('_', '-')}: {text}" for name, text in headers.items()]
        await self.send("\r\n".join([*lines, "", ""]).encode() + content)


Handler = Callable[[Request], Awaitable[None]]


@dataclass
class Server:
    url: str
    requests: list[Request] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def serve(handler: Handler) -> AsyncIterator[Server]:
    """A server on a free port; one connection serves many requests, until the handler raises or either side closes."""
    state = Server("")
    tasks: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        state.connections += 1
        try:
            while (request := await _read(reader, writer)) is not None:
                state.requests.append(request)
                await handler(request)
        except (OSError, asyncio.CancelledError, EOFError):
            pass
        finally:
            tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(first.split()[1], headers, body, writer)
