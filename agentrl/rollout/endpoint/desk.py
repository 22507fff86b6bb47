"""Bodies of requests on their way in: how many are read at once, how they are parsed, and what is said about them."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from hashlib import blake2b

from agentrl.core.serving import ApiError, Receive, json_object, read_body
from agentrl.rollout.endpoint.fields import OMITTED
from agentrl.rollout.endpoint.neutral import ChatRequest, Json
from agentrl.rollout.lane import Lane, Turns

_log = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20
"""Size of a request's body at most, bytes."""
LARGE, MAX_LARGE = 256 * 2**10, 8
"""Bytes from which a body is large, and large bodies that are read and parsed at once; the others wait in their connections."""
MARKS, MAX_MARKS = (b'"', b"\\", b",", b"[", b"{"), 300_000
"""Characters that cost time in JSON, and how many of them a body may have: those of several million tokens of text."""
SLICE = 2**20
"""Bytes that are looked through at a time."""
KEPT_TOOLS = 32
"""Different lists of tools, of bodies that are not large, that are kept for later requests."""
MAX_NOTICES = 50
"""Different warnings that are given at most."""
WRONG_TYPES = (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError)


class Desk:
    """Reads and parses bodies: small ones at once, large ones on a thread and a few at a time, so that memory is bounded."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._large, self._lane = asyncio.Semaphore(MAX_LARGE), Lane(short=LARGE)
        self._told: set[str] = set()
        self._tools = deque[Sequence[Json]](maxlen=KEPT_TOOLS)

    @asynccontextmanager
    async def body(self, headers: Mapping[bytes, bytes], receive: Receive) -> AsyncIterator[bytes | bytearray]:
        """The body of a request; a large one takes one of a few places as long as the context is open.

        Raises:
            ApiError: If it is too large, which is known before it is read if the client says so, does not arrive in time, or is packed in a
                way that is not known.
            ClientLeftError: If the client leaves before its end.
        """
        said = headers.get(b"content-length", b"")
        size = int(said) if said.isdigit() else None
        packed = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        if packed not in (*PLAIN, *PACKED):
            raise ApiError(415, f"content-encoding = {packed[:40]!r}: is none of {', '.join(PACKED)}", "content-encoding", "unsupported")
        if size is not None and size > MAX_BODY:
            raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", code="request_too_large")
        async with AsyncExitStack() as stack:
            # A body whose size is not stated may be a large one.
            if size is None or size > LARGE or packed in PACKED:
                await stack.enter_async_context(self._large)
            body = await read_body(receive, MAX_BODY)
            yield await self._lane.run(lambda: unpacked(body, packed), MAX_BODY) if packed in PACKED else body

    async def digest(self, body: bytes | bytearray, *more: str) -> bytes:
        """Return what tells a body from others, together with some texts."""
        # With a separator behind each, so that the same letters divided otherwise are other texts.
        found = blake2b("\0".join((*more, "")).encode(), digest_size=16)
        await self._turns.take()
        await self._lane.run(lambda: found.update(body), len(body))
        return found.digest()

    async def parsed(self, parse: Callable[[Json], ChatRequest], body: bytes | bytearray) -> ChatRequest:
        """Return the request that a body is; `ApiError` if it is none."""
        return await self._lane.run(lambda: self._with_known_tools(_parsed(parse, body), len(body)), len(body))

    def warn(self, request: ChatRequest) -> None:
        """Warn of what a request asks in vain, each thing once."""
        for name in request.ignored:
            self._warn(f"field {name}", f"requests of the agent have the field {name}, which the endpoint does not know and ignores")
        if request.images_omitted:
            self._warn("images", f"requests of the agent have images; the model reads {OMITTED!r} in their place")

    def _with_known_tools(self, request: ChatRequest, size: int) -> ChatRequest:
        """The request with the very tools of an earlier one that had the same.

        An agent sends its tools with each request. A hundred tools are hundreds of objects, which the garbage collector would look through
        once for each request of an episode.
        """
        try:
            tools = next((known for known in self._tools if known == request.tools), None)
        except RecursionError:  # too deep to be compared, and none that an agent sends
            return request
        if tools is not None:
            return replace(request, tools=tools)
        if request.tools and size <= LARGE:
            self._tools.append(request.tools)
        return request

    def _warn(self, subject: str, text: str) -> None:
        if subject not in self._told and len(self._told) < MAX_NOTICES:
            self._told.add(subject)
            _log.warning("%s", text)


def unpacked(body: bytes | bytearray, packed: str) -> bytes:
    """Return a body that is packed by one of `PACKED` as it was before.

    Raises:
        ApiError: If it is not packed so, or is larger than `MAX_BODY` bytes, of which no more are unpacked.
    """
    try:
        found = PACKED[packed](bytes(body))
    except (zlib.error, EOFError, OSError, ValueError) as error:
        raise ApiError(400, f"the body is not packed by {packed}, as content-encoding says: {error}", code="invalid_body") from error
    except ImportError as error:
        raise ApiError(415, f"content-encoding = {packed!r}: needs pyarrow, which is not installed here", "content-encoding") from error
    if len(found) > MAX_BODY:
        raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", code="request_too_large")
    return found


def _inflated(body: bytes, window: int) -> bytes:
    stream = zlib.decompressobj(window)
    found = stream.decompress(body, MAX_BODY + 1)
    if not stream.eof and len(found) <= MAX_BODY:
        raise EOFError("it ends too early")
    return found


def _deflated(body: bytes) -> bytes:
    try:
        return _inflated(body, zlib.MAX_WBITS)
    except zlib.error:  # some clients leave out the header that the standard asks for
        return _inflated(body, -zlib.MAX_WBITS)


def _zstd(body: bytes) -> bytes:
    from pyarrow import BufferReader, CompressedInputStream

    return bytes(CompressedInputStream(BufferReader(body), "zstd").read(MAX_BODY + 1))


PLAIN = ("", "identity")
PACKED: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: _inflated(body, zlib.MAX_WBITS | 16),
    "deflate": _deflated,
    "zstd": _zstd,
}
"""Values of Content-Encoding, with functions that unpack a body, up to one byte more than it may have."""


def _parsed(parse: Callable[[Json], ChatRequest], body: bytes | bytearray) -> ChatRequest:
    if len(body) > LARGE and _marks(body) > MAX_MARKS:
        problem = f"the body has more than {MAX_MARKS} quotes, escapes, commas and brackets, which no context holds"
        raise ApiError(413, problem, code="request_too_large")
    value = json_object(body)
    try:
        return parse(value)
    except WRONG_TYPES as error:  # fields that are read without a look at their type
        problem = f"the body has a value of a wrong type: {type(error).__name__}: {str(error)[:200]}"
        raise ApiError(400, problem, code="invalid_type") from error


def _marks(body: bytes | bytearray) -> int:
    """Number of characters that cost time, counted up to a few more than a body may have."""
    count = 0
    for start in range(0, len(body), SLICE):
        part = body[start : start + SLICE]
        count += sum(map(part.count, MARKS))
        if count > MAX_MARKS:
            break
    return count
