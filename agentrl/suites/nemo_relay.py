"""A relay between an agent server, which knows one address of a model for all episodes, and the endpoints of the episodes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
from collections.abc import AsyncIterator

import httpx

from agentrl.core.errors import EnvError
from agentrl.core.serving import LoopbackServer, Receive, Scope, Send, read_body

KEY = "agentrl_key"
"""Entry of a request's metadata that holds the address and the key of an episode, with a space between them."""
ROUTES = ("/v1/responses", "/v1/chat/completions")
RELAY = "agentrl-relay"
RETRY_S, TRIES = 0.2, 25
MAX_BODY = 2**28
"""Bytes of a request; of a longer one nothing is read, so it names no episode."""

_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d{1,5}/v1")


@contextlib.asynccontextmanager
async def relay(port: int) -> AsyncIterator[None]:
    """While this lasts a relay listens on a port: one of this event loop, shared by its episodes, or one of another process."""
    name = id(asyncio.get_running_loop()), port
    if name not in _keepers:
        _keepers[name] = _Keeper(port)
    keeper = _keepers[name]
    keeper.users += 1
    try:
        await keeper.ready()
        yield
    finally:
        keeper.users -= 1
        if not keeper.users:
            del _keepers[name]
            await keeper.close()


class _Keeper:
    """Keeps a relay on a port. Of several processes one holds it; the next takes over when that one ends.

    Its loop waits for the port to be free, and is unblocked by `close`.
    """

    def __init__(self, port: int) -> None:
        self.users = 0
        self._port = port
        # Proxies of the environment lead to no loopback address of this machine.
        self._client = httpx.AsyncClient(trust_env=False, timeout=None)
        self._server = LoopbackServer(self._relay, port=port, name="relay")
        self._task: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait until a relay listens; `EnvError` if something else has the port."""
        self._task = self._task or asyncio.create_task(self._keep(), name="relay keeper")
        for _ in range(TRIES):
            with contextlib.suppress(httpx.HTTPError, ValueError):
                answer = await self._client.get(f"http://127.0.0.1:{self._port}/", timeout=RETRY_S * 5)
                # A relay of another process serves as well; any other server would get the keys of episodes.
                if answer.headers.get("server") == RELAY:
                    return
            await asyncio.sleep(RETRY_S)
        raise EnvError(f"something that is no relay of agentrl listens on port {self._port}; NeMo Gym's own model server must not run")

    async def close(self) -> None:
        """Give the port up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._server.close()
        await self._client.aclose()

    async def _keep(self) -> None:
        while True:
            try:
                await self._server.start()
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the endpoint that its metadata name, as an ASGI application."""
        if scope["type"] != "http":
            return
        path, status, answer = scope["path"], 404, _refusal("there is no such route; there are POST /v1/responses and /v1/chat/completions")
        if scope["method"] == "POST" and path in ROUTES:
            try:
                content = await read_body(receive, MAX_BODY)
            except ConnectionError:  # nobody waits for an answer any more
                return
            status, answer = await self._forward(path, content or b"")
        headers = [(b"content-type", b"application/json"), (b"server", RELAY.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _forward(self, path: str, content: bytes | bytearray) -> tuple[int, bytes]:
        try:
            body = json.loads(content)
            metadata = dict(body["metadata"])
            address, _, key = metadata.pop(KEY).partition(" ")
        except (ValueError, KeyError, TypeError, AttributeError):
            return 401, _refusal(
                "the metadata of the request name no episode; the agent server must pass responses_create_params.metadata on"
            )
        # The metadata come with the request, and a relay that took any address would send requests to whatever host they name.
        if not _ADDRESS.fullmatch(address):
            return 401, _refusal("the metadata of the request name no endpoint of this machine")
        body = {**{name: value for name, value in body.items() if name != "metadata"}, **({"metadata": metadata} if metadata else {})}
        try:
            answer = await self._client.post(address + path.removeprefix("/v1"), json=body, headers={"authorization": f"Bearer {key}"})
        except httpx.HTTPError as error:
            return 502, _refusal(f"the endpoint of the episode cannot be reached: {error}")
        return answer.status_code, answer.content


_keepers: dict[tuple[int, int], _Keeper] = {}


def _refusal(problem: str) -> bytes:
    return json.dumps({"error": {"message": problem, "type": "invalid_request_error", "param": None, "code": None}}).encode()
