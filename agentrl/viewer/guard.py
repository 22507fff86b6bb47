"""The gate of the viewer's server: who may ask, how, and with which headers it answers."""

from __future__ import annotations

import hmac
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
"""Headers of every answer."""
NAMES = ("127.0.0.1", "localhost")
"""Names of this machine that a browser may use."""
MAX_PATH = 4096


class Guard:
    """Lets a request through to the application if it has the token, came to this machine by name, and only reads.

    The token is the first part of the path, and is taken off before the application sees the request. The name in ``Host`` is checked,
    because a page of another site may have its own name point to this machine.

    Args:
        app: The application.
        token: The secret.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; see the class."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket
            await send({"type": "websocket.close", "code": 1008})
            return
        problem = self._problem(scope)
        if problem is not None:
            await _refuse(send, *problem)
            return
        rest = scope["path"].partition("/")[2].partition("/")[2]
        await self._app({**scope, "path": "/" + rest, "raw_path": None, "root_path": ""}, receive, _with_headers(send))

    def _problem(self, scope: Scope) -> tuple[int, str] | None:
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in [f"{name}:{scope['server'][1]}" for name in NAMES]:
            return 403, "this server answers on this machine only; open the address that `agentrl view` printed"
        if len(scope["path"]) > MAX_PATH:
            return 414, "the address is too long"
        token = scope["path"].partition("/")[2].partition("/")[0]
        # The comparison takes the same time however much of the token is right.
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            return 401, "the address lacks the token; open the one that `agentrl view` printed"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "the viewer only reads"
        return None


def _with_headers(send: Send) -> Send:
    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message["headers"]}
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return answer


async def _refuse(send: Send, status: int, why: str) -> None:
    body = json.dumps({"error": why, "type": "Refused"}).encode()
    head = {"content-type": "application/json", "content-length": str(len(body)), **HEADERS}
    head |= {"allow": "GET, HEAD"} if status == 405 else {}
    headers = [(name.encode(), value.encode()) for name, value in head.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
