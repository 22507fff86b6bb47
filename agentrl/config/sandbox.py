"""Settings of sandboxes, and of servers of tools that run in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from agentrl.core.settings import ResumeMayChange


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Sandboxes of programs, and servers of tools."""

    sandbox: Annotated[Literal["local", "none"], ResumeMayChange] = "local"
    """``local`` hides other processes, files and the network from programs, and needs bubblewrap; ``none`` has limits only, and no wall."""
    sandbox_read: Annotated[tuple[str, ...], ResumeMayChange] = ()
    """Files and folders that the programs may read, besides those of the system and of Python."""
    mcp: Annotated[tuple[str, ...], ResumeMayChange] = ()
    """Servers of the Model Context Protocol whose tools a `ToolEnv` offers besides its own: for each its command, its address
    (``http://HOST:PORT/mcp``), or a JSON file with ``mcpServers``."""
