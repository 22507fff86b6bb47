"""A JSON client for untrusted servers: calls have deadlines, answers have limits of size and depth and hold no NaN."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any

import anyio
import httpx

from agentrl.core.errors import RemoteError
from agentrl.env.remote.wire import RETRIED, check_url, decoder, encode_json, excerpt, parse_json, retry_after_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

UNTOUCHED = frozenset({429, 503})
"""Statuses of servers that have not begun to act on the request."""
EXCERPT = 300
KEEP_S = 2.0
"""Idle connections are closed after this long, before servers commonly do (5 s), so that none is closed under a request."""
MAX_COOKIES, MAX_COOKIE_CHARS = 32, 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of a call; seconds and bytes.

    Attributes:
        timeout_s: Deadline of the whole call, with all attempts and the waits between them.
        attempt_timeout_s: Deadline of one attempt, from connecting to the last byte.
        connect_timeout_s: Deadline of connecting.
        attempts: Maximum number of attempts.
        backoff_s: Before attempt n + 1 the client waits a random time up to this times 2^(n-1) (full jitter;
            https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter).
        max_backoff_s: Upper bound of the backoff.
        max_bytes: Maximum size of an answer after decompression.
        max_depth: Maximum number of nesting levels in an answer.
        connections: Maximum number of simultaneous connections.
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


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of a server: status, decompressed body, address of the request, and levels of nesting that its JSON may have."""

    status: int
    body: bytes
    url: str
    max_depth: int

    @property
    def text(self) -> str:
        """The body as text; what is not UTF-8 is replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON; `RemoteError` if it is not JSON, too deep, or holds NaN or an infinity."""
        return parse_json(self.body, self.url, self.max_depth)


@dataclass(slots=True)
class HttpSession:
    """The state of one caller.

    Attributes:
        cookies: Its cookies, kept by the rules of browsers.
        server: Index of the server that all its calls go to after the first answer.
        headers: Headers of its requests.
    """

    cookies: httpx.Cookies = field(default_factory=httpx.Cookies)
    server: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def keep(self, response: httpx.Response) -> None:
        """Store the cookies of an answer; `RemoteError` if they are too many or too large."""
        self.cookies.extract_cookies(response)
        cookies = list(self.cookies.jar)
        if len(cookies) > MAX_COOKIES or sum(len(cookie.name) + len(cookie.value or "") for cookie in cookies) > MAX_COOKIE_CHARS:
            raise RemoteError(f"{response.request.url}: sets more cookies than are kept", infrastructure=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A request and the rules for repeating it; see `JsonClient.call`."""

    method: str
    path: str
    content: bytes
    timeout_s: float
    session: HttpSession | None = None
    repeat: bool = True
    told: Collection[int] = ()


class _AttemptError(Exception):
    """An attempt without a usable answer; `untouched`: the server has certainly not begun to act; `gone`: none listens at the address."""

    def __init__(self, error: RemoteError, *, untouched: bool = False, gone: bool = False) -> None:
        super().__init__(error)
        self.error, self.untouched, self.gone = error, untouched, gone

    def final(self, call: _Call) -> bool:
        """Return True if another attempt would be useless or harmful."""
        lost = self.gone and call.session is not None and call.session.server is not None
        return lost or not self.error.infrastructure or not (call.repeat or self.untouched)


class JsonClient:
    """Client that sends JSON to one of several equivalent servers in rotation, and reads JSON; belongs to one event loop.

    If a server cannot be reached, is busy or breaks, the call is tried again there or on the next server; a Retry-After
    header is obeyed. Other refusals are final. Redirects and proxy settings of the environment are ignored, so nothing is
    ever sent to a host that the user did not name. Cookies are kept only in a session.

    Args:
        urls: Addresses, ``http`` or ``https``, without user names.
        limits: Limits of each call.

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
            limits=httpx.Limits(max_connections=self._limits.connections, keepalive_expiry=KEEP_S),
            # Only gzip, which `decoder` reads within a limit; httpx would ask for other encodings too, if their packages are there.
            headers={"Accept": "application/json", "Accept-Encoding": "gzip", "Content-Type": "application/json"},
            # This client serves all episodes, so it keeps no cookies itself.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            follow_redirects=False,
            trust_env=False,
            verify=any(url.startswith("https:") for url in self._urls),  # without TLS, reading the certificates is a waste
        )

    async def post(self, body: Any, path: str = "") -> Any:
        """Post `body` to a path below the server's address and return the answer's JSON; `RemoteError` if none comes in time."""
        return (await self.call("POST", path, body)).json()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        session: HttpSession | None = None,
        repeat: bool = True,
        told: Collection[int] = (),
        timeout_s: float | None = None,
    ) -> Reply:
        """Call a route and return the answer unchanged.

        Args:
            method: HTTP method.
            path: Path appended to the server's address.
            body: Any JSON value; not sent with ``GET``.
            session: Cookies to use. Once a server has answered, the session stays with that server, and a refused
                connection is final because the server's session is lost.
            repeat: Send a request again although the server may have acted on it. `False`: only after a failed
                connection, 429 or 503.
            told: Statuses besides 2xx that count as an answer and not as a failure.
            timeout_s: Deadline of the whole call; `None`: that of the limits.

        Raises:
            RemoteError: If there is no such answer within the limits.
        """
        content = b"" if method == "GET" else encode_json(body)
        limit = timeout_s or self._limits.timeout_s
        return await self._run(_Call(method=method, path=path, content=content, timeout_s=limit, session=session, repeat=repeat, told=told))

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def _run(self, call: _Call) -> Reply:
        """Repeat attempts until one succeeds, one fails for good, or a limit is reached."""
        shown = ", ".join(self._urls)
        last: RemoteError | None = None
        try:
            with anyio.fail_after(call.timeout_s):
                for attempt in range(self._limits.attempts):
                    index = await self._server(attempt, call)
                    try:
                        return await self._attempt(index, call)
                    except _AttemptError as failed:
                        if failed.final(call):
                            raise failed.error from failed.__cause__
                        last = failed.error
        except TimeoutError:
            reason = f"; last: {last}" if last else ""
            raise RemoteError(f"{shown}: no usable answer within {call.timeout_s:g} s{reason}") from last
        raise RemoteError(f"{shown}: no usable answer in {self._limits.attempts} attempts; last: {last}") from last

    async def _server(self, attempt: int, call: _Call) -> int:
        """Wait before a further attempt, then choose the session's server, the next one, or the one whose Retry-After ends first."""
        if attempt:
            ceiling = min(self._limits.max_backoff_s, self._limits.backoff_s * 2 ** (attempt - 1))
            await anyio.sleep(random.uniform(0, ceiling))
        now, count = anyio.current_time(), len(self._urls)
        if call.session is not None and call.session.server is not None:
            index = call.session.server
        else:
            index = min(range(count), key=lambda i: (max(self._held_until[i] - now, 0.0), (i - self._turn) % count))
            self._turn = (index + 1) % count
        held = self._held_until[index] - now
        # The caller learns at once what it would otherwise learn at its deadline.
        if now + held > anyio.current_effective_deadline():
            raise RemoteError(f"{self._urls[index]}: asks to wait {held:.0f} s, which is more than is left of {call.timeout_s:g} s")
        await anyio.sleep(max(held, 0.0))
        return index

    async def _attempt(self, index: int, call: _Call) -> Reply:
        url = self._urls[index] + call.path
        try:
            with anyio.fail_after(self._limits.attempt_timeout_s):
                async with self._sent(url, call) as response:
                    status = response.status_code
                    if not (status in call.told or 200 <= status < 300):
                        self._hold(index, response.headers.get("Retry-After"))
                        raise await self._refused(url, response)
                    if call.session is not None:
                        call.session.server = index
                    return Reply(status, await self._read(url, response), url, self._limits.max_depth)
        except RemoteError as error:
            raise _AttemptError(error) from error.__cause__
        except (httpx.ConnectTimeout, httpx.PoolTimeout):
            raise _AttemptError(RemoteError(f"{url}: no connection within {self._limits.connect_timeout_s:g} s"), untouched=True) from None
        except (TimeoutError, httpx.TimeoutException):
            raise _AttemptError(RemoteError(f"{url}: no answer within {self._limits.attempt_timeout_s:g} s")) from None
        except httpx.ConnectError as error:
            raise _AttemptError(RemoteError(f"{url}: ConnectError: {error}"), untouched=True, gone=True) from error
        except httpx.TransportError as error:
            raise _AttemptError(RemoteError(f"{url}: {type(error).__name__}: {error}")) from error

    @asynccontextmanager
    async def _sent(self, url: str, call: _Call) -> AsyncIterator[httpx.Response]:
        headers = dict(call.session.headers) if call.session is not None else None
        request = self._client.build_request(call.method, url, content=call.content or None, headers=headers)
        if call.session is not None:
            call.session.cookies.set_cookie_header(request)
        response = await self._client.send(request, stream=True)
        try:
            if call.session is not None:
                call.session.keep(response)
            yield response
        finally:
            await response.aclose()

    def _hold(self, index: int, retry_after: str | None) -> None:
        if retry_after is not None and (seconds := retry_after_s(retry_after)) > 0:
            self._held_until[index] = max(self._held_until[index], anyio.current_time() + seconds)

    async def _refused(self, url: str, response: httpx.Response) -> Exception:
        status = response.status_code
        if 300 <= status < 400:
            return RemoteError(f"{url}: answered {status}: redirects are not followed; give the final address", infrastructure=False)
        text = excerpt((await self._read(url, response, cut=EXCERPT)).decode("utf-8", "replace"), EXCERPT)
        error = RemoteError(f"{url}: answered {status}" + (f": {text}" if text else ""), infrastructure=status in RETRIED)
        return _AttemptError(error, untouched=status in UNTOUCHED)

    async def _read(self, url: str, response: httpx.Response, cut: int = 0) -> bytes:
        """Return the decompressed body: its first `cut` bytes if `cut` is set, else all of it or an error if it is too large."""
        decode, limit, body = decoder(url, response.headers.get("Content-Encoding", "")), cut or self._limits.max_bytes, bytearray()
        # Raw, as httpx decompresses without a limit, and a few bytes may stand for gigabytes.
        async for chunk in response.aiter_raw():
            body += decode(chunk, limit + 1 - len(body))
            if len(body) > limit:
                if cut:
                    break
                raise RemoteError(f"{url}: the answer is larger than {limit} bytes", infrastructure=False)
        return bytes(body[:limit])


class SharedClient:
    """One client for all episodes of an event loop, made at the first `open` and closed at the last `close`."""

    def __init__(self, make: Callable[[], JsonClient]) -> None:
        self._make = make
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[JsonClient, int]] = weakref.WeakKeyDictionary()

    def open(self) -> JsonClient:
        """Return the client of the running loop; every `open` needs one `close`."""
        loop = asyncio.get_running_loop()
        client, users = self._clients.get(loop) or (self._make(), 0)
        self._clients[loop] = client, users + 1
        return client

    async def close(self) -> None:
        """Give up one use."""
        loop = asyncio.get_running_loop()
        # Taken out before it closes, so that an `open` meanwhile makes a new one.
        client, users = self._clients.pop(loop)
        if users > 1:
            self._clients[loop] = client, users - 1
        else:
            await client.aclose()
