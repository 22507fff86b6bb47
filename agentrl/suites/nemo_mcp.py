"""Tools that a resources server of NeMo Gym offers over MCP (https://modelcontextprotocol.io): listed and called for one session.

``/seed_session`` names the route and the headers of the session in ``mcp``. Each request is one JSON-RPC call without a handshake, as NeMo
Gym's servers take it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import RemoteError
from agentrl.env.remote.wire import excerpt, parse_json

if TYPE_CHECKING:
    from agentrl.env.remote.http import HttpSession, JsonClient, Reply

MAX_PAGES, MAX_HEADERS = 16, 16
ACCEPT = {"Accept": "application/json, text/event-stream"}


class McpTools:
    """The tools of one session.

    Args:
        client: Connection to the server.
        session: The session that ``/seed_session`` began.
        given: What its answer says under ``mcp``: ``url_path`` and ``headers``.
        timeout_s: Deadline of a request, seconds.

    Raises:
        RemoteError: If `given` names no route of the same server, or headers that are no texts.
    """

    def __init__(self, client: JsonClient, session: HttpSession, given: Mapping[str, Any], timeout_s: float) -> None:
        path, headers = given.get("url_path", "/mcp"), given.get("headers") or {}
        named = isinstance(headers, Mapping) and len(headers) <= MAX_HEADERS and all(isinstance(value, str) for value in headers.values())
        # Two slashes would begin the name of another host.
        if not isinstance(path, str) or not path.startswith("/") or path.startswith("//") or not named:
            raise RemoteError(f"/seed_session: mcp = {excerpt(json.dumps(given), 200)} names no path and headers", infrastructure=False)
        self._client, self._path, self._timeout_s = client, path, timeout_s
        self._session = replace(session, headers={**ACCEPT, **{str(name): value for name, value in headers.items()}})
        self._number = 0
        self.names: frozenset[str] = frozenset()

    async def load(self) -> dict[str, dict[str, Any]]:
        """Ask for the tools; return them by name, in the form that chat templates take. `RemoteError` if the server does not list them."""
        found: dict[str, dict[str, Any]] = {}
        cursor: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = await self._ask("tools/list", cursor, repeat=True)
            for tool in page.get("tools") or ():
                function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("inputSchema")}
                found[tool["name"]] = {"type": "function", "function": {key: value for key, value in function.items() if value}}
            if not page.get("nextCursor"):
                break
            cursor = {"cursor": page["nextCursor"]}
        self.names = frozenset(found)
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool; return the text for the model, and False if the tool says that the call failed."""
        result = await self._ask("tools/call", {"name": name, "arguments": dict(arguments)}, repeat=False)
        parts = [part.get("text", f"({part.get('type')})") for part in result.get("content") or () if isinstance(part, Mapping)]
        return "\n".join(map(str, parts)), not result.get("isError")

    async def _ask(self, method: str, params: Mapping[str, Any], *, repeat: bool) -> Mapping[str, Any]:
        self._number += 1
        body = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        reply = await self._client.call("POST", self._path, body, session=self._session, repeat=repeat, timeout_s=self._timeout_s)
        answer = _answer(reply)
        result = answer.get("result") if isinstance(answer, Mapping) else None
        if not isinstance(result, Mapping):
            raise RemoteError(f"{reply.url}: {method} was answered {excerpt(reply.text, 200)!r}", infrastructure=False)
        return result


def _answer(reply: Reply) -> Any:
    """The JSON of an answer, which may come as the last event of a stream."""
    events = [line.removeprefix("data:") for line in reply.text.splitlines() if line.startswith("data:")]
    return parse_json(events[-1].encode(), reply.url, reply.max_depth) if events else reply.json()
