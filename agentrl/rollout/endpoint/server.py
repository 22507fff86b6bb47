"""The HTTP server beside a rollout worker; a random key says to which episode a request belongs."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.process import spare_imports
from agentrl.core.serving import Address, ApiError, ClientLeftError, LoopbackServer, Receive, Scope, Send, send_json
from agentrl.env.black_box import ModelEndpoint
from agentrl.rollout.endpoint import chat_completions, messages, responses
from agentrl.rollout.endpoint.delivery import Delivery
from agentrl.rollout.endpoint.desk import Desk
from agentrl.rollout.endpoint.session import DIGITS, EndpointSession
from agentrl.rollout.lane import Turns
from agentrl.rollout.plan import EndpointConfig

_log = logging.getLogger(__name__)

HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
KEYS = tuple(name.encode() for name in HEADERS)
"""Headers in which clients of the several services send the key."""
KEPT_KEYS = 4096
"""Keys of episodes that are over and get 410; older ones get 401."""
WORKERS, MAX_PORT = 256, 65_535
"""Ports behind the one that is set among which the rollout workers of a machine find theirs, and the last port that there is."""

DIALECTS: dict[str, Any] = {"/chat/completions": chat_completions, "/responses": responses, "/messages": messages}
"""Modules by the end of the path; any prefix may stand before it."""
COUNT = "/messages/count_tokens"
CARD = {
    "id": "policy",
    "object": "model",
    "created": 0,
    "owned_by": "agentrl",
    "type": "model",
    "display_name": "policy",
    "created_at": "1970-01-01T00:00:00Z",
}
"""Entry of the list of models, in the form of both services."""


class EndpointServer:
    """Serves the episodes of one rollout worker on a port of its own, from the first episode on.

    Episodes share nothing but the event loop. A port that is set is the only one if it `is_exact`; else those behind it are tried too.
    """

    def __init__(self, endpoint: EndpointConfig | None = None, *, is_exact: bool = False) -> None:
        self._sessions: dict[str, tuple[str, EndpointSession]] = {}  # by number of the episode: secret and session
        self._ended: dict[str, str] = {}  # secrets of episodes that are over, the oldest first
        self.turns = Turns()
        self._number, self._desk, self._modules = 0, Desk(self.turns), 0
        self._endpoint = endpoint or EndpointConfig()
        self._server = LoopbackServer(self, name="endpoint", address=_address(self._endpoint, is_exact=is_exact))

    async def open(self, session: EndpointSession) -> ModelEndpoint:
        """Admit the requests of an episode until `end`; returns its address.

        Raises:
            ConfigError: If nothing can listen at the address that is set.
        """
        try:
            root = await self._server.start()
        except OSError as error:
            problem = f"cannot be used at {self._endpoint.endpoint_host}: {error.strerror or error}"
            remedy = "Choose another port, or 0 for a free one, and with --endpoint-host an address of this machine."
            raise ConfigError("--endpoint-port", self._endpoint.endpoint_port, problem, remedy) from error
        self._number += 1
        number, secret = str(self._number), secrets.token_urlsafe(24)
        self._sessions[number] = secret, session
        return ModelEndpoint(root=root, api_key=f"agentrl-{number}-{secret}", max_model_len=session.max_model_len)

    async def end(self, llm: ModelEndpoint) -> None:
        """Refuse the key of an episode from now on."""
        number = llm.api_key.split("-")[1]
        secret, session = self._sessions.pop(number)
        self._ended[number] = secret
        while len(self._ended) > KEPT_KEYS:
            del self._ended[next(iter(self._ended))]
        await session.end()

    async def close(self) -> None:
        """End the server; safe to call twice."""
        await self._server.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application."""
        if scope["type"] != "http":
            return
        self._modules = spare_imports(self._modules)
        headers, path = _headers(scope), scope["path"].rstrip("/")
        default = messages if b"anthropic-version" in headers else chat_completions
        dialect: Any = next((module for end, module in DIALECTS.items() if path.endswith(end)), default)
        session: EndpointSession | None = None
        try:
            session, branch = self._authorize(headers)
            await self._route(_Request(scope, receive, send, dialect, session, branch, self._desk, self.turns), path)
        except ClientLeftError:
            return
        except ApiError as problem:
            if session is not None:
                session.refused(problem)
            await send_json(send, problem.status, dialect.error(problem))
        except Exception as error:  # a fault of the endpoint must reach one client only, in a form that it understands
            _log.exception("a request could not be answered")
            fault = ApiError(500, f"the endpoint failed: {type(error).__name__}: {error}", code="internal_error")
            with contextlib.suppress(RuntimeError):  # the answer has begun
                await send_json(send, fault.status, dialect.error(fault))

    async def _route(self, request: _Request, path: str) -> None:
        method = request.scope["method"]
        if method == "HEAD":
            await send_json(request.send, 200, None)
        elif method == "GET" and (path.endswith("/models") or "/models/" in path):
            ids = {"has_more": False, "first_id": CARD["id"], "last_id": CARD["id"]}
            card = {**CARD, "max_model_len": request.session.max_model_len}
            await send_json(request.send, 200, {"object": "list", "data": [card], **ids} if path.endswith("/models") else card)
        elif method == "POST" and path.endswith(COUNT):
            await request.count()
        elif method == "POST" and any(path.endswith(end) for end in DIALECTS):
            await request.answer()
        else:
            raise ApiError(
                404, f"there is no {method} {path}; there are POST {', '.join([*DIALECTS, COUNT])} and GET /models", code="not_found"
            )

    def _authorize(self, headers: dict[bytes, bytes]) -> tuple[EndpointSession, str]:
        """The episode of a request and the name of its branch; `ApiError` without the key of an episode that goes on."""
        # Any bytes are Latin-1, so that a key of another kind is refused and is no fault.
        given = {name: headers[name].removeprefix(b"Bearer ").strip().decode("latin-1") for name in KEYS if headers.get(name)}
        # Some clients send a key of their own beside the one that they were given.
        name, text = next((item for item in given.items() if "agentrl-" in item[1]), next(iter(given.items()), (b"", "")))
        key, _, branch = text.partition(":")
        _, _, rest = key.partition("agentrl-")
        number, _, secret = rest.partition("-")
        # The number finds the episode, so that one secret is compared, which takes as long however much of a guess is right.
        known, session = self._sessions.get(number, (self._ended.get(number, ""), None))
        if not known or not hmac.compare_digest(secret.encode(), known.encode()):
            problem = f"the key in {name.decode()} is not that of an episode" if name else f"there is no key in {', '.join(HEADERS)}"
            raise ApiError(401, f"{problem}; use the api_key that the agent was given", code="invalid_api_key")
        if session is None:
            raise ApiError(410, "the episode of this key is over", code="episode_over")
        return session, headers.get(b"x-agentrl-branch", branch.encode()).decode("latin-1")


def _address(endpoint: EndpointConfig, *, is_exact: bool) -> Address:
    port = endpoint.endpoint_port
    return Address(
        host=endpoint.endpoint_host,
        ports=range(port, min(port + (1 if is_exact else WORKERS), MAX_PORT + 1)) if port else (0,),
        url=endpoint.endpoint_url,
        certificate=endpoint.endpoint_certificate,
    )


class _Request:
    """One request for an answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, dialect: Any, session: EndpointSession, branch: str, desk: Desk, turns: Turns
    ) -> None:
        self.scope, self.send, self._receive, self._headers = scope, send, receive, _headers(scope)
        self._dialect, self.session, self._branch, self._desk, self._turns = dialect, session, branch, desk, turns

    async def count(self) -> None:
        """Answer with the tokens of the prompt."""
        async with self._desk.body(self._headers, self._receive) as body:
            asked = self.session.seen(await self._desk.parsed(messages.parse_prompt, body))
        tokens = await self.session.count(asked)
        await send_json(self.send, 200, {"input_tokens": tokens})

    async def answer(self) -> None:
        """Read the body, and send the answer or what its parse raises."""
        self.session.check_open()
        key = self._headers.get(b"idempotency-key", b"").decode("latin-1")
        async with self._desk.body(self._headers, self._receive) as body:
            digest = await self._desk.digest(body, self.scope["path"], self._branch)
            exchange = self.session.repeated(digest, _retry(self._headers), key)
            if exchange is None:
                asked = self.session.seen(await self._desk.parsed(self._dialect.parse, body))
                self._desk.warn(asked)
                exchange = self.session.begin(digest, asked, self._branch, key)
        # Before anything is awaited: a request without a client is dropped.
        exchange.clients += 1
        # Only behind the body, which comes through the same `receive`.
        gone = asyncio.create_task(self._disconnect())
        try:
            await Delivery(exchange, self.session, self._dialect, self.send, self._turns).run(gone)
        finally:
            self.session.leave(exchange)
            gone.cancel()

    async def _disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _retry(headers: Mapping[bytes, bytes]) -> int | None:
    """Number of earlier tries, if the client marks it."""
    count = headers.get(b"x-stainless-retry-count", b"").decode("latin-1")
    return int(count) if count.isdecimal() and len(count) <= DIGITS else None


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])
