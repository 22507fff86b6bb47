"""Addresses, JSON, compressed bodies and WebSockets of untrusted servers, each within limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
import zlib
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import anyio

from agentrl.core.errors import ConfigError, RemoteError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

HTTP = ("http", "https")
RETRIED = frozenset({429, 500, 502, 503, 504})
_GZIP_OR_ZLIB = 47  # window bits that make zlib find out itself


def check_url(url: str, schemes: tuple[str, ...] = HTTP) -> str:
    """Return the address without a trailing slash; `ConfigError` if it has none of `schemes`, or a user name or password."""
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in schemes and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError("URL", url, "is not the address of a server", f"Write it as {schemes[0]}://HOST:PORT/PATH.")
    if parts.username or parts.password:
        raise ConfigError("URL", f"{parts.scheme}://...@{parts.hostname}", "holds a user name or password", "Leave it out.")
    return url.strip().rstrip("/")


def encode_json(body: Any) -> bytes:
    """Return `body` as JSON; `RemoteError` if it holds a value that JSON cannot express, such as NaN."""
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RemoteError(f"the request cannot be written as JSON: {error}", infrastructure=False) from error


def parse_json(body: bytes | str, where: str, max_depth: int) -> Any:
    """Parse JSON without NaN and infinities, nested no deeper than `max_depth`; `RemoteError` for anything else."""
    try:
        value = json.loads(body, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise RemoteError(f"{where}: the answer is nested deeper than {max_depth} levels", infrastructure=False) from None
    except ValueError as error:
        raise RemoteError(f"{where}: the answer is not JSON: {error}", infrastructure=False) from None
    # Level by level instead of by recursion, since the server chooses the depth.
    level = [value]
    for _ in range(max_depth + 1):
        level = [child for item in level if isinstance(item, list | dict) for child in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return value
    raise RemoteError(f"{where}: the answer is nested deeper than {max_depth} levels", infrastructure=False)


def retry_after_s(header: str) -> float:
    """Return the seconds that a Retry-After header, a number or a date, asks to wait; 0 for any other text."""
    if re.fullmatch(r"\d{1,9}", header.strip()):
        return float(header)
    try:
        return max(parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return 0.0


def decoder(url: str, encoding: str) -> Callable[[bytes, int], bytes]:
    """Return a function that decompresses a piece of a body to at most a given number of bytes; `RemoteError` for another encoding."""
    if encoding.strip().lower() in ("", "identity"):
        return lambda chunk, limit: chunk[:limit]
    if encoding.strip().lower() not in ("gzip", "deflate"):
        raise RemoteError(f"{url}: the answer is compressed with {encoding[:20]!r}, which was not asked for", infrastructure=False)
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)

    def decode(chunk: bytes, limit: int) -> bytes:
        try:
            return stream.decompress(chunk, limit)
        except zlib.error as error:
            raise RemoteError(f"{url}: the answer is not {encoding}: {error}", infrastructure=False) from None

    return decode


def excerpt(text: str, limit: int = 300) -> str:
    """Return the first `limit` characters of a server's text in one line, without control characters."""
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text[:limit]).split())


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    # JSON's grammar allows 1e999, which Python reads as infinity.
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


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
            # websockets would follow redirects, also to other hosts; to return the error ends that.
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
            # It only notes the end of the connection, which takes one round of the loop; the loop may be closed right after.
            self._connection.transport.abort()
            await asyncio.sleep(0)
