"""A server for an ASGI application on loopback, inside the event loop of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from agentrl.core.process import LOOPBACK

if TYPE_CHECKING:
    import uvicorn

Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


BODY_TIMEOUT_S = 60.0


class ApiError(Exception):
    """A request that is refused; each application words it in its own form.

    Args:
        status: Status code of HTTP.
        message: Problem and remedy, for people.
        field: Name of the field at fault, ``messages[2].content``; empty if it is none.
        code: Machine-readable reason, as ``context_length_exceeded``.
        limits: Tokens of the prompt and of the context, if the prompt is too long.
    """

    def __init__(self, status: int, message: str, field: str = "", code: str = "", limits: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code, self.limits = status, message, field, code, limits

    @property
    def reason(self) -> str:
        """Status and code, for records."""
        return f"{self.status} {self.code}".strip()


class ClientLeftError(ConnectionError):
    """The client closed the connection before it had the answer."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: If it is larger than `limit` bytes, or does not arrive in time.
        ClientLeftError: If the client leaves before its end.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="request_timeout") from None


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is, or raise `ApiError`."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return value


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
