"""Servers of the Model Context Protocol (https://modelcontextprotocol.io) that an environment or ``--mcp`` names."""

from __future__ import annotations

import functools
import importlib.util
import json
import shlex
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.errors import ConfigError
from agentrl.env.remote.wire import check_url
from agentrl.env.sandbox.spec import SandboxSpec

FORM = "Write the command of a server, its address (http://HOST:PORT/mcp), or a JSON file with mcpServers."
FIELDS = ("command", "args", "env", "url", "headers", "tools", "shared", "network", "read", "memory_mib", "image")
"""Keys of a server in a JSON file: those of other programs, and those of `McpServer` and its sandbox."""
MEMORY_MIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """A server whose tools a model may call: a program, or an address.

    Attributes:
        command: Words of a program that speaks the protocol on its standard input and output. It runs in a sandbox, whose folder is its
            working folder; the first word may be the name of a program of this machine.
        url: Address of a server that speaks it over HTTP.
        headers: Headers of the requests to `url`.
        env: Environment variables of the program.
        tools: Names of the tools that the model is offered; empty: all.
        shared: True: the episodes of a process share one session, and what the tools remember. False: every episode has its own.
        sandbox: Limits of the program, and what it may see besides the files among its words.
        start_timeout_s: Time until the server has said which tools it has.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    shared: bool = False
    sandbox: SandboxSpec = field(default_factory=lambda: SandboxSpec(memory_mib=MEMORY_MIB))
    start_timeout_s: float = 30.0

    @property
    def name(self) -> str:
        """Name of the server in messages."""
        return self.url or shlex.join(self.command)


ServerLike: TypeAlias = McpServer | str


def servers_of(given: Iterable[ServerLike], where: str) -> tuple[McpServer, ...]:
    """Return servers, for texts those that they stand for: a command, an address, or a JSON file with ``mcpServers``.

    Args:
        given: Servers and texts.
        where: Flag or attribute that they come from, for messages.

    Raises:
        ConfigError: If one cannot be used, or the package mcp is not installed.
    """
    servers: list[McpServer] = []
    for item in given:
        servers += (_usable(item, where),) if isinstance(item, McpServer) else _servers(item, where)
    if servers and importlib.util.find_spec("mcp") is None:
        raise ConfigError(where, servers[0].name, "needs the package mcp, which is not installed", "Run: pip install 'agentrl[mcp]'.")
    return tuple(servers)


@functools.lru_cache
def _servers(given: str, where: str) -> tuple[McpServer, ...]:
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(where, given, "is no server", FORM)
    if given.startswith(("http://", "https://")):
        return (_usable(McpServer(url=given), where),)
    if given.endswith(".json"):
        return tuple(_usable(server, where) for server in _from_file(given, where))
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise ConfigError(where, given, f"cannot be split into words: {error}", FORM) from error
    return (_usable(McpServer(command=tuple(words)), where),)


def _usable(server: McpServer, where: str) -> McpServer:
    """Return a server with the whole paths of its files, which its program may then see."""
    if bool(server.command) == bool(server.url):
        raise ConfigError(where, server.name, "needs either a command or an address", FORM)
    if server.url:
        return replace(server, url=check_url(server.url))
    words = tuple(str(Path(word).absolute()) if Path(word).is_file() else word for word in server.command)
    files = [word for word in words if Path(word).is_file()]
    return replace(server, command=words, sandbox=replace(server.sandbox, read=(*server.sandbox.read, *files)))


def _from_file(name: str, where: str) -> list[McpServer]:
    try:
        listed = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))["mcpServers"]
        return [_from_object(found, name, f"{where} {server}") for server, found in listed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # It is a ValueError too, and says more than the message below.
        if isinstance(error, ConfigError):
            raise
        problem = f"holds no mcpServers: {type(error).__name__}: {error}"
        raise ConfigError(where, name, problem, 'Write {"mcpServers": {"NAME": {"command": ..., "args": [...]}}}.') from error


def _from_object(found: Mapping[str, Any], name: str, where: str) -> McpServer:
    if unknown := [key for key in found if key not in FIELDS]:
        raise ConfigError(where, unknown[0], f"is no key of a server in {name}", f"There is {', '.join(FIELDS)}.")
    command = found.get("command")
    return McpServer(
        command=(str(command), *map(str, found.get("args", ()))) if command else (),
        url=str(found.get("url", "")),
        headers=dict(found.get("headers", {})),
        env={str(key): str(value) for key, value in found.get("env", {}).items()},
        tools=tuple(found.get("tools", ())),
        shared=bool(found.get("shared", False)),
        sandbox=SandboxSpec(
            memory_mib=int(found.get("memory_mib", MEMORY_MIB)),
            network=bool(found.get("network", False)),
            read=tuple(found.get("read", ())),
            image=str(found.get("image", "")),
        ),
    )


_SERVERS: ContextVar[tuple[str, ...]] = ContextVar("mcp", default=())
FLAG = "--mcp"


def use_servers(texts: tuple[str, ...]) -> None:
    """Offer the tools of servers to the tool environments of this context, besides their own."""
    _SERVERS.set(texts)


def current_servers() -> tuple[McpServer, ...]:
    """Return the servers that ``--mcp`` names."""
    return servers_of(_SERVERS.get(), FLAG)
