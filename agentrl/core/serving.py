"""A server for an ASGI application on loopback, inside the event loop of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import uvicorn

Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


LOOPBACK = "127.0.0.1"


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """Return the body of a request; `None` if it is larger than `limit` bytes.

    Raises:
        ConnectionError: If the client leaves before its end.
    """
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left before the end of its request")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


async def send_json(send: Send, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
    """Send a whole answer; the body is empty for `None`."""
    body = b"" if value is None else json.dumps(value).encode()
    more = [(name.encode(), text.encode()) for name, text in (headers or {}).items()]
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


class LoopbackServer:
    """Serves an application on a port of 127.0.0.1, unless another address is given; port 0 is a free one.

    Its loop consumes connections, waits for them, and is unblocked by `close`. Signals stay the run's.
    """

    def __init__(self, app: App, *, port: int = 0, name: str, host: str = LOOPBACK) -> None:
        self._app, self._port, self._name, self._host = app, port, name, host
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._root = ""

    async def start(self) -> str:
        """Listen, unless it does already; return the address. `OSError` if the port is taken."""
        async with self._starting:
            if self._task is None:
                await self._start()
        return self._root

    async def close(self) -> None:
        """End the server; safe to call twice."""
        task, server = self._task, self._server
        self._task = self._server = None
        if task is not None and server is not None:
            server.should_exit = True
            await asyncio.wait({task})

    async def _start(self) -> None:
        import uvicorn

        # asyncio switches Nagle's algorithm off, which delays each answer by 40 ms, only where the protocol is named.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, self._port))
        except OSError:
            listener.close()
            raise
        options: dict[str, Any] = {
            "interface": "asgi3",
            "lifespan": "off",
            "ws": "none",
            "access_log": False,
            "log_config": None,
            "server_header": False,
        }
        config = uvicorn.Config(self._app, timeout_keep_alive=75, timeout_graceful_shutdown=1, backlog=2048, **options)

        started = asyncio.Event()

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                started.set()

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        self._server = Server(config)
        self._root = f"http://{self._host}:{listener.getsockname()[1]}"
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name=self._name)
        await started.wait()
