"""A JSON client for servers that are not trusted: every call ends in time, and every answer is small, shallow and finite."""

from __future__ import annotations

import json
import math
import random
import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, NoReturn
from urllib.parse import urlsplit

import anyio
import httpx

from agentrl.core.errors import ConfigError, RemoteError

RETRIED = frozenset({429, 500, 502, 503, 504})
EXCERPT = 300
_GZIP_OR_ZLIB = 47  # window bits that make zlib find out itself


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a call may cost; seconds and bytes.

    Attributes:
        timeout_s: The whole call, further attempts and waits between them included.
        attempt_timeout_s: One attempt, from connecting to the last byte.
        connect_timeout_s: Connecting.
        attempts: Attempts at most.
        backoff_s: Before attempt n + 1 the client waits a random time up to this times 2^(n-1) (full jitter;
            https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter).
        max_backoff_s: Bound of that time.
        max_bytes: Size of an answer after decompression.
        max_depth: Levels of nesting in an answer.
        connections: Connections at a time.
    """

    timeout_s: float = 45.0
    attempt_timeout_s: float = 20.0
    connect_timeout_s: float = 5.0
    attempts: int = 5
    backoff_s: float = 0.25
    max_backoff_s: float = 8.0
    max_bytes: int = 2**19
    max_depth: int = 32
    connections: int = 64


class JsonClient:
    """Posts JSON to one of several servers that are as good as each other, in rotation.

    A server that cannot be reached, is busy or breaks is tried again, or the next one is; a server that said how long it
    needs (Retry-After) is left alone that long. Other refusals are final. Redirects, cookies and proxy settings of the
    environment are ignored. It belongs to one event loop.

    Args:
        urls: Addresses, ``http`` or ``https``, without user names.
        limits: What a call may cost.

    Raises:
        ConfigError: If an address cannot be used.
    """

    def __init__(self, urls: Sequence[str], limits: HttpLimits | None = None) -> None:
        self._urls = [check_url(url) for url in urls]
        self._limits = limits or HttpLimits()
        self._turn = 0
        self._held_until = [0.0] * len(self._urls)
        timeout = httpx.Timeout(self._limits.attempt_timeout_s, connect=self._limits.connect_timeout_s)
        self._client = httpx.AsyncClient(
            timeout=timeout,
            limits=httpx.Limits(max_connections=self._limits.connections),
            headers={"Accept": "application/json", "Accept-Encoding": "gzip", "Content-Type": "application/json"},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            follow_redirects=False,
            trust_env=False,
            verify=any(url.startswith("https:") for url in self._urls),  # without TLS, reading the certificates is a waste
        )

    async def post(self, body: Any, path: str = "") -> Any:
        """Post `body` and return the answer's JSON.

        Args:
            body: Anything that JSON can say.
            path: Put behind the server's address.

        Raises:
            RemoteError: If there is no usable answer within the limits.
        """
        content = encode_json(body)
        shown = ", ".join(self._urls)
        last: RemoteError | None = None
        try:
            with anyio.fail_after(self._limits.timeout_s):
                for attempt in range(self._limits.attempts):
                    index = await self._server(attempt)
                    try:
                        return await self._attempt(index, path, content)
                    except RemoteError as error:
                        if not error.infrastructure:
                            raise
                        last = error
        except TimeoutError:
            reason = f"; last: {last}" if last else ""
            raise RemoteError(f"{shown}: no usable answer within {self._limits.timeout_s:g} s{reason}") from last
        raise RemoteError(f"{shown}: no usable answer in {self._limits.attempts} attempts; last: {last}") from last

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def _server(self, attempt: int) -> int:
        """Wait before a further attempt, then take the next server, or the one that is free again first."""
        if attempt:
            ceiling = min(self._limits.max_backoff_s, self._limits.backoff_s * 2 ** (attempt - 1))
            await anyio.sleep(random.uniform(0, ceiling))
        now, count = anyio.current_time(), len(self._urls)
        index = min(range(count), key=lambda i: (max(self._held_until[i] - now, 0.0), (i - self._turn) % count))
        self._turn = (index + 1) % count
        held = self._held_until[index] - now
        if now + held > anyio.current_effective_deadline():
            raise RemoteError(f"{self._urls[index]}: asks to wait {held:.0f} s, which is more than is left of {self._limits.timeout_s:g} s")
        await anyio.sleep(max(held, 0.0))
        return index

    async def _attempt(self, index: int, path: str, content: bytes) -> Any:
        url = self._urls[index] + path
        try:
            with anyio.fail_after(self._limits.attempt_timeout_s):
                async with self._client.stream("POST", url, content=content) as response:
                    if response.status_code != 200:
                        self._hold(index, response.headers.get("Retry-After"))
                        await self._refused(url, response)
                    return parse_json(await self._read(url, response), url, self._limits.max_depth)
        except (TimeoutError, httpx.TimeoutException):
            raise RemoteError(f"{url}: no answer within {self._limits.attempt_timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise RemoteError(f"{url}: {type(error).__name__}: {error}") from error

    def _hold(self, index: int, retry_after: str | None) -> None:
        if retry_after is not None and (seconds := retry_after_s(retry_after)) > 0:
            self._held_until[index] = max(self._held_until[index], anyio.current_time() + seconds)

    async def _refused(self, url: str, response: httpx.Response) -> NoReturn:
        status = response.status_code
        if 300 <= status < 400:
            raise RemoteError(f"{url}: answered {status}: redirects are not followed; give the final address", infrastructure=False)
        text = (await self._read(url, response, cut=EXCERPT)).decode("utf-8", "replace")
        excerpt = " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())
        raise RemoteError(f"{url}: answered {status}" + (f": {excerpt}" if excerpt else ""), infrastructure=status in RETRIED)

    async def _read(self, url: str, response: httpx.Response, cut: int = 0) -> bytes:
        """The body, decompressed; at most `cut` bytes of it, or an error if it is larger than allowed."""
        decode, limit, body = _decoder(url, response.headers.get("Content-Encoding", "")), cut or self._limits.max_bytes, bytearray()
        async for chunk in response.aiter_raw():
            body += decode(chunk, limit + 1 - len(body))
            if len(body) > limit:
                if cut:
                    break
                raise RemoteError(f"{url}: the answer is larger than {limit} bytes", infrastructure=False)
        return bytes(body[:limit])


def check_url(url: str) -> str:
    """The address without a slash at its end.

    Raises:
        ConfigError: If it is not an ``http`` or ``https`` address, or holds a password.
    """
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError("URL", url, "is not the address of a server", "Write it as http://HOST:PORT/PATH.")
    if parts.username or parts.password:
        raise ConfigError("URL", f"{parts.scheme}://...@{parts.hostname}", "holds a user name or password", "Leave it out.")
    return url.strip().rstrip("/")


def encode_json(body: Any) -> bytes:
    """`body` as JSON.

    Raises:
        RemoteError: If it holds something that JSON cannot say, NaN among it.
    """
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RemoteError(f"the request cannot be written as JSON: {error}", infrastructure=False) from error


def parse_json(body: bytes, where: str, max_depth: int) -> Any:
    """JSON without NaN and infinities, and not nested deeper than `max_depth`.

    Raises:
        RemoteError: If it is anything else.
    """
    try:
        value = json.loads(body, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise RemoteError(f"{where}: the answer is nested deeper than {max_depth} levels", infrastructure=False) from None
    except ValueError as error:
        raise RemoteError(f"{where}: the answer is not JSON: {error}", infrastructure=False) from None
    level = [value]
    for _ in range(max_depth + 1):
        level = [child for item in level if isinstance(item, list | dict) for child in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return value
    raise RemoteError(f"{where}: the answer is nested deeper than {max_depth} levels", infrastructure=False)


def retry_after_s(header: str) -> float:
    """Seconds that a Retry-After header asks to wait, from a number or a date; 0 if it is neither."""
    if re.fullmatch(r"\d{1,9}", header.strip()):
        return float(header)
    try:
        return max(parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return 0.0


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _decoder(url: str, encoding: str) -> Callable[[bytes, int], bytes]:
    """Decompresses pieces, never more than a given number of bytes at a time."""
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
