"""A WebSocket to an untrusted server: one JSON answer per question, with a deadline and a size limit."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import anyio

from agentrl.core.errors import RemoteError
from agentrl.env.remote.http import RETRIED
from agentrl.env.remote.wire import encode_json, excerpt, parse_json

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

MAX_BYTES, MAX_DEPTH = 2**20, 64
CONNECT_S, CLOSE_S = 5.0, 2.0
TOO_LARGE, NOT_TEXT = 1009, 1007
"""Close codes that this side sends for an answer that is too large or not text."""


class JsonSocket:
    """One connection, made by `open`, without compression, redirects or proxies."""

    def __init__(self, url: str, connection: ClientConnection) -> None:
        self._url, self._connection = url, connection

    @classmethod
    async def open(cls, url: str) -> JsonSocket:
        """Connect to a ``ws`` or ``wss`` address; `RemoteError` if that fails or takes too long."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidStatus

        class ConnectOnce(connect):
            def process_redirect(self, exc: Exception) -> Exception:
                return exc

        try:
            connection = await ConnectOnce(
                url,
                compression=None,
                proxy=None,
                open_timeout=CONNECT_S,
                close_timeout=CLOSE_S,
                ping_interval=None,
                max_size=MAX_BYTES,
                max_queue=4,
            )
        except TimeoutError:
            raise RemoteError(f"{url}: no connection within {CONNECT_S:g} s") from None
        except InvalidStatus as error:
            status = error.response.status_code
            text = excerpt((error.response.body or b"").decode("utf-8", "replace"))
            reason = "redirects are not followed; give the final address" if 300 <= status < 400 else text
            raise RemoteError(f"{url}: answered {status}: {reason}", infrastructure=status in RETRIED) from error
        except InvalidHandshake as error:
            raise RemoteError(
                f"{url}: is no WebSocket: {excerpt(str(error))}", infrastructure=isinstance(error.__cause__, EOFError)
            ) from error
        except OSError as error:
            raise RemoteError(f"{url}: {type(error).__name__}: {error}") from error
        return cls(url, connection)

    async def ask(self, question: Any, timeout_s: float) -> Any:
        """Send `question` and return the answer; after a `RemoteError` the connection cannot be used any more."""
        content = encode_json(question).decode()
        try:
            with anyio.fail_after(timeout_s):
                answer = await self._exchange(content)
        except TimeoutError:
            raise RemoteError(f"{self._url}: no answer within {timeout_s:g} s") from None
        if not isinstance(answer, str):
            raise RemoteError(f"{self._url}: answered in bytes, not in text", infrastructure=False)
        return parse_json(answer, self._url, MAX_DEPTH)

    async def _exchange(self, content: str) -> str | bytes:
        from websockets.exceptions import ConnectionClosed

        try:
            with contextlib.suppress(ConnectionClosed):  # a server that closed may have said why before
                await self._connection.send(content)
            return await self._connection.recv()
        except ConnectionClosed as error:
            code = error.sent.code if error.sent is not None else None
            if code == TOO_LARGE:
                raise RemoteError(f"{self._url}: the answer is larger than {MAX_BYTES} bytes", infrastructure=False) from None
            raise RemoteError(f"{self._url}: the connection was closed: {excerpt(str(error))}", infrastructure=code != NOT_TEXT) from error

    async def close(self, goodbye: Any = None) -> None:
        """Send `goodbye` if there is one, and end the connection within a few seconds; never raises."""
        from websockets.exceptions import ConnectionClosed

        try:
            with contextlib.suppress(ConnectionClosed, OSError), anyio.move_on_after(CLOSE_S):
                if goodbye is not None:
                    await self._connection.send(encode_json(goodbye).decode())
                await self._connection.close()
        finally:
            self._connection.transport.abort()
            await asyncio.sleep(0)
