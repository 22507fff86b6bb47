"""Sessions with servers of the Model Context Protocol: begun, shared by episodes, and ended.

A program speaks through two named pipes in the folder of its sandbox, which ``cat`` joins to the pipes of the client, so that the package
mcp has a process of its usual kind in its hands, and the sandbox has all limits of any other program.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from agentrl.core.errors import RemoteError, SandboxError
from agentrl.env.results import said
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import ExecResult, current_choice
from agentrl.env.tools.calls import ToolFailedError
from agentrl.env.tools.mcp_servers import McpServer

END_S = 1.0
"""Seconds in which a program whose connection is gone has ended, or is said to go on."""
SHOWN = 1000
PIPES = (".mcp-in", ".mcp-out")
SERVE = f'exec "$@" <{PIPES[0]} >{PIPES[1]}'
RELAY = 'cat "$2" & exec cat >"$1"'
MAX_PAGES = 16
TIMEOUT_S, READ_TIMEOUT_S = 30.0, 3600.0
"""Limits of a connection over HTTP and of an answer, which the time limit of a tool comes before."""

_Outcome = TypeVar("_Outcome")
_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, McpSession]] = WeakKeyDictionary()


class McpSession:
    """A session with one server, in a task of its own: only the task that entered a connection may leave it.

    Attributes:
        tools: The tools, as the server lists them; empty before it is ready.
    """

    def __init__(self, server: McpServer) -> None:
        self.tools: list[Any] = []
        self.users = 0
        self._server = server
        self._client: Any = None
        self._program: asyncio.Task[ExecResult] | None = None
        self._settled = asyncio.Event()  # the tools are listed, or will not be
        self._task = self._watched(self._hold())

    @property
    def is_over(self) -> bool:
        """True if the server is gone, or the session ends."""
        return self._task.done() or self.users == 0 or (self._program is not None and self._program.done())

    async def ready(self) -> None:
        """Wait until the server has listed its tools.

        Raises:
            RemoteError: If it does not, or ends.
            SandboxError: If its sandbox does not start.
        """
        limit = self._server.start_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._settled.wait()
        if self._client is not None:
            return
        error = self._task.exception() if self._task.done() and not self._task.cancelled() else None
        if error is None:
            raise await self._gone(f"did not list its tools within {limit:g} s")
        first = _first(error)
        raise first if isinstance(first, SandboxError) else await self._gone(said(first)) from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool and return its result, a ``CallToolResult``.

        Raises:
            ToolFailedError: If the server refuses the call.
            RemoteError: If the server is gone.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            return await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise await self._gone(str(error)) from error
            raise ToolFailedError(str(error)) from error

    def drop(self) -> bool:
        """Give the session up, which ends with its last user; return True if it does."""
        self.users -= 1
        return not self.users and self._task.cancel()

    async def ended(self) -> None:
        """Wait until the session is over."""
        await asyncio.wait({self._task})

    def _watched(self, doing: Coroutine[Any, Any, _Outcome]) -> asyncio.Task[_Outcome]:
        """Return a task whose end is the end of waiting; its error is read here, in case nobody else does."""
        task = asyncio.create_task(doing, name=f"mcp {self._server.name}")
        task.add_done_callback(lambda done: self._settled.set() or done.cancelled() or done.exception())  # type: ignore[func-returns-value]
        return task

    async def _gone(self, problem: str) -> RemoteError | SandboxError:
        """Return the error for a server that does not answer, with what became of its program."""
        if self._program is not None:
            await asyncio.wait({self._program}, timeout=END_S)
            if self._program.done() and not self._program.cancelled():
                try:
                    ended = self._program.result()
                except SandboxError as error:
                    return error
                how = f"ended with code {ended.code}" if ended.ended == "exit" else f"was ended at its limit of {ended.ended}"
                problem = f"{how}; it printed last: {ended.output.strip()[-SHOWN:]!r}"
        return RemoteError(f"the MCP server {self._server.name}: {problem}")

    async def _hold(self) -> None:
        """Hold the connection until the task is cancelled."""
        from mcp import Client

        async with self._transport() as transport, Client(transport) as client:
            cursor = None
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                self.tools += page.tools
                if not (cursor := page.next_cursor):
                    break
            self._client = client
            self._settled.set()
            await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        server = self._server
        if server.url:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            timeout = httpx2.Timeout(TIMEOUT_S, read=READ_TIMEOUT_S)
            verify = server.url.startswith("https:")  # loading certificates takes a while
            async with httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout, verify=verify) as http:
                yield streamable_http_client(server.url, http_client=http)
            return
        from mcp import StdioServerParameters

        if (server.sandbox.kind or current_choice().kind) == "remote":
            raise SandboxError(f"{server.name} cannot run in a remote sandbox; name the address of a server, or SandboxSpec(kind='local')")
        async with Sandbox(server.sandbox) as sandbox:
            pipes = [sandbox.folder / name for name in PIPES]
            for pipe in pipes:
                os.mkfifo(pipe)
            program, *more = server.command
            if sandbox.kind != "container":  # where the variable PATH is that of the system, and may not name this Python's programs
                program = shutil.which(program) or program
            words = ("sh", "-c", SERVE, "sh", program, *more)
            self._program = self._watched(sandbox.exec(*words, timeout_s=math.inf, env=server.env, keep="last"))
            try:
                yield StdioServerParameters(command="sh", args=["-c", RELAY, "sh", *map(str, pipes)])
            except Exception:
                await asyncio.wait({self._program}, timeout=END_S)  # its end says more than that of the connection
                raise
            finally:
                self._program.cancel()
                await asyncio.wait({self._program})


def session_with(server: McpServer) -> McpSession:
    """Return a session with a server, for one more episode; `McpSession.drop` gives it back."""
    sessions = _SHARED.setdefault(asyncio.get_running_loop(), {}) if server.shared else {}
    # By its text, as a server with dictionaries in it has no hash.
    session = sessions.get(repr(server))
    if session is None or session.is_over:
        session = sessions[repr(server)] = McpSession(server)
    session.users += 1
    return session


def release_soon(loop: asyncio.AbstractEventLoop, sessions: list[McpSession]) -> None:
    """Give up the sessions of an episode from any thread."""
    if sessions and not loop.is_closed():
        loop.call_soon_threadsafe(_drop, tuple(sessions))


def _drop(sessions: Iterable[McpSession]) -> None:
    for session in sessions:
        session.drop()


def _first(error: BaseException) -> BaseException:
    """Return the error that a group of errors begins with."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
