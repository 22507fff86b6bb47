"""Tools of servers of the Model Context Protocol, as an environment offers them to the model."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.env.tools.calls import ToolCallError, ToolFailedError
from agentrl.env.tools.mcp_servers import McpServer
from agentrl.env.tools.mcp_session import McpSession, release_soon, session_with

MAX_PROBLEMS = 5
"""Problems of a call's arguments that the model reads."""


class McpTool:
    """One tool of a server; `agentrl.env.tools.environment.Tool` is that of a function."""

    def __init__(self, session: McpSession, listed: Any) -> None:
        self.name: str = listed.name
        self._session, self._description = session, listed.description or ""
        self._parameters: dict[str, Any] = listed.input_schema

    def schema(self) -> dict[str, Any]:
        """Return the server's schema in the form that chat templates take."""
        return {"type": "function", "function": {"name": self.name, "description": self._description, "parameters": self._parameters}}

    def bind(self, arguments: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        """Return arguments by name, which satisfy the schema; or `ToolCallError`."""
        names = list(self._parameters.get("properties", ()))
        if not isinstance(arguments, Mapping):
            if len(arguments) > len(names):
                raise ToolCallError(f"{self.name} takes {len(names)} arguments, not {len(arguments)}")
            arguments = dict(zip(names, arguments, strict=False))
        bound = dict(arguments)
        if problems := [_problem(error) for error in itertools.islice(self._validator.iter_errors(bound), MAX_PROBLEMS)]:
            raise ToolCallError(f"{self.name}: {'; '.join(problems)}")
        return bound

    @functools.cached_property
    def _validator(self) -> Any:
        from jsonschema.validators import validator_for  # type: ignore[import-untyped]

        return validator_for(self._parameters)(self._parameters)

    async def function(self, /, **arguments: Any) -> str:
        """Call the tool; return what it says as text.

        Raises:
            ToolFailedError: If the tool says that it failed.
            RemoteError: If the server is gone.
        """
        result = await self._session.call(self.name, arguments)
        parts = [part.text if part.type == "text" else f"({part.type})" for part in result.content]
        text = "\n".join(parts) if parts or result.structured_content is None else json.dumps(result.structured_content)
        if result.is_error:
            raise ToolFailedError(text)
        return text


def _problem(error: Any) -> str:
    place = ".".join(map(str, error.absolute_path))
    return f"{place}: {error.message}" if place else str(error.message)


class McpSessions:
    """The sessions of one episode."""

    def __init__(self) -> None:
        self._sessions: list[McpSession] = []
        self.tools: list[McpTool] = []

    async def open(self, servers: Sequence[McpServer]) -> None:
        """Begin a session with each server; `RemoteError` or `SandboxError` if one does not come up."""
        self._sessions += map(session_with, servers)
        # In case that a `close` of the user's does not call ours.
        weakref.finalize(self, release_soon, asyncio.get_running_loop(), self._sessions).atexit = False
        await asyncio.gather(*(session.ready() for session in self._sessions))
        for server, session in zip(servers, self._sessions, strict=True):
            known = {tool.name: tool for tool in session.tools}
            if missing := [name for name in server.tools if name not in known]:
                problem = f"the MCP server {server.name} has no tool {missing[0]!r}"
                raise ConfigError("tools", missing[0], problem, f"There is {', '.join(known)}.")
            self.tools += [McpTool(session, known[name]) for name in server.tools or known]

    async def close(self) -> None:
        """End the sessions that no other episode shares."""
        ending = [session for session in self._sessions if session.drop()]
        self._sessions.clear()
        await asyncio.gather(*(session.ended() for session in ending))
