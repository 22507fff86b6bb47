"""Addresses, JSON and compressed bodies exchanged with untrusted servers, each within limits."""

from __future__ import annotations

import json
import math
import re
import time
import zlib
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import urlsplit

from agentrl.core.errors import ConfigError, RemoteError

HTTP = ("http", "https")
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
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value
