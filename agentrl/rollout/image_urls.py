"""Images at addresses of hosts that the user has named."""

from __future__ import annotations

import time
from collections.abc import Iterable
from urllib.parse import urljoin, urlsplit

MAX_BYTES = 2**25
"""Bytes of an image file at most."""
TIMEOUT_S = 30.0
"""Deadline of an image, redirections included."""
MAX_HOPS = 5


class ImageFetcher:
    """Fetches images from some hosts and from no others, also where one of them redirects.

    Args:
        hosts: Names of hosts as they stand in addresses, with their ports where these are given.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)

    def allows(self, address: str) -> bool:
        """Return True if an address may be fetched."""
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and parts.netloc.lower() in self._hosts

    def fetch(self, address: str) -> bytes:
        """Return the bytes of the file at an address.

        Raises:
            ValueError: If its host is not allowed, or does not give the file in time; the message names the address.
        """
        import httpx

        end, at = time.monotonic() + TIMEOUT_S, address
        try:
            with httpx.Client(timeout=TIMEOUT_S, follow_redirects=False) as client:
                for _ in range(MAX_HOPS):
                    self._check(at, address)
                    with client.stream("GET", at) as response:
                        if not response.has_redirect_location:
                            return _body(response.raise_for_status().iter_bytes(), address, end)
                        # A server may redirect to a relative address.
                        at = urljoin(at, response.headers["location"])
        except httpx.HTTPError as error:
            raise ValueError(f"the image at {address} cannot be fetched: {type(error).__name__}: {error}") from error
        raise ValueError(f"the image at {address} is redirected more than {MAX_HOPS - 1} times")

    def _check(self, at: str, address: str) -> None:
        if not self.allows(at):
            way = "" if at == address else f", to which {address[:80]!r} redirects"
            raise ValueError(f"images are not fetched from addresses such as {at[:80]!r}{way}; name the host with --allow-image-urls")


def _body(chunks: Iterable[bytes], address: str, end: float) -> bytes:
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > MAX_BYTES:
            raise ValueError(f"the image at {address} has more than {MAX_BYTES:,} bytes")
        # The limit of httpx is one for each read, within which a slow server may go on for ever.
        if time.monotonic() > end:
            raise ValueError(f"the image at {address} took longer than {TIMEOUT_S:g} s")
    return bytes(data)
