"""A server for an ASGI application on loopback, inside the event loop of a run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from agentrl.core.process import LOOPBACK, own_address

if TYPE_CHECKING:
    import uvicorn

Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

EVERYWHERE = "0.0.0.0"
BODY_TIMEOUT_S = 60.0
"""Seconds in which a body must have arrived."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
IDLE_S = 30.0
"""Seconds without a byte after which a connection whose request is not complete is closed, and one whose peer is gone counts as closed."""


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


async def read_body(receive: Receive, limit: int) -> bytes | bytearray:
    """Return the body of a request; it grows as it arrives, so that no large one is copied at its end.

    Raises:
        ApiError: If it is larger than `limit` bytes, or does not arrive in time.
        ClientLeftError: If the client leaves before its end.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                async with asyncio.timeout(IDLE_S):
                    message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                body += message.get("body", b"")
                if len(body) > limit:
                    raise ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
                if not message.get("more_body"):
                    return body
    except TimeoutError:
        problem = f"the body did not arrive within {BODY_TIMEOUT_S:g} s, or nothing of it for {IDLE_S:g} s"
        raise ApiError(408, problem, code="request_timeout") from None


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object that a body is, or raise `ApiError`."""
    try:
        # Some clients put a byte order mark before their JSON.
        value = json.loads(body.decode("utf-8-sig"))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address to listen at, and what others are told of it.

    Attributes:
        host: Address or name; ``0.0.0.0`` is every address of this machine.
        ports: Ports to try, in order; 0 is a free one.
        url: Address that others are told, with the fields ``{host}`` and ``{port}``; empty: that of the server itself.
        certificate: File with a certificate and its private key, with which the server speaks HTTPS; empty: it speaks HTTP.
    """

    host: str = LOOPBACK
    ports: Sequence[int] = (0,)
    url: str = ""
    certificate: str = ""

    def told(self, port: int) -> str:
        """Return the address that others are told."""
        url = self.url or f"{'https' if self.certificate else 'http'}://{{host}}:{{port}}"
        return url.format(host=own_address() if self.host == EVERYWHERE else self.host, port=port).rstrip("/")

    def listen(self) -> socket.socket:
        """Return a socket that listens at the first port that is free; `OSError` if none is."""
        for place, port in enumerate(self.ports):
            # asyncio switches Nagle's algorithm off, which delays each answer by 40 ms, only where the protocol is named.
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self.host, port))
                listener.listen(BACKLOG)  # until then another process may bind the same port
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE or place + 1 == len(self.ports):
                    raise
            else:
                _notice_lost_peers(listener)
                return listener
        raise ValueError("there is no port to listen at")


def _notice_lost_peers(listener: socket.socket) -> None:
    """Let the system close the connections of a listener whose peers have been gone for `IDLE_S` seconds without a word."""
    # Connections that are accepted inherit these options from their listener.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": IDLE_S / 2, "TCP_KEEPINTVL": IDLE_S / 6, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * IDLE_S}
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # systems differ in those that they have
            listener.setsockopt(socket.IPPROTO_TCP, option, max(1, int(value)))


class LoopbackServer:
    """Serves an application on a port of 127.0.0.1, unless another address is given.

    Its loop consumes connections, waits for them, and is unblocked by `close`. Signals stay the run's.
    """

    def __init__(self, app: App, *, port: int = 0, name: str, host: str = LOOPBACK, address: Address | None = None) -> None:
        self._app, self._name = app, name
        self._address = address or Address(host=host, ports=(port,))
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._root = ""

    async def start(self) -> str:
        """Listen, unless it does already; return the address that others are told. `OSError` if the port is taken."""
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

        listener = self._address.listen()
        options: dict[str, Any] = {
            "interface": "asgi3",
            "lifespan": "off",
            "ws": "none",
            "access_log": False,
            # With a configuration of its own uvicorn would change the logging of the whole process.
            "log_config": None,
            "server_header": False,
            "http": _impatient_protocol(),
            "ssl_certfile": self._address.certificate or None,
        }
        config = uvicorn.Config(self._app, timeout_keep_alive=75, timeout_graceful_shutdown=1, backlog=BACKLOG, **options)

        started = asyncio.Event()

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                started.set()

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        self._server = Server(config)
        self._root = self._address.told(listener.getsockname()[1])
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name=self._name)
        await started.wait()


@cache
def _impatient_protocol() -> type[Any]:
    """Uvicorn's protocol, with an end for connections on which a request begins and its headers do not arrive."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def _watch(self) -> None:
            is_waiting = self.cycle is None or self.cycle.response_complete
            if is_waiting and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.transport.close)
            elif not is_waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._timer is not None:
                self._timer.cancel()

    return Impatient
