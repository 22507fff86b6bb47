"""Settings of sandboxes, and of servers of tools that run in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from agentrl.core.sandboxes import DEFAULT_IMAGE
from agentrl.core.settings import CountOrZero, ResumeMayChange


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Sandboxes of programs, and servers of tools."""

    sandbox: Annotated[Literal["local", "container", "remote", "none"], ResumeMayChange] = "local"
    """``local`` hides other processes, files and the network from programs, and needs bubblewrap; ``container`` runs them in containers of
    podman or docker; ``remote`` on a machine with ``agentrl serve-sandboxes``; ``none`` has limits only, and no wall."""
    sandbox_read: Annotated[tuple[str, ...], ResumeMayChange] = ()
    """Files and folders that the programs may read, besides those of the system and of Python, or of the image."""
    sandbox_image: Annotated[str, ResumeMayChange] = DEFAULT_IMAGE
    """Image of containers: a name, or the path of a Containerfile or of a folder with one, beginning with ``/`` or ``.``, built once."""
    sandbox_url: Annotated[str, ResumeMayChange] = ""
    """Address of a server of sandboxes, for ``--sandbox remote``; its key is read from the environment variable ``AGENTRL_SANDBOX_KEY``."""
    sandbox_network: Annotated[Literal["endpoint", "all"], ResumeMayChange] = "endpoint"
    """Network of the programs of ``command:`` and ``harbor:`` behind a wall: the model's endpoint, or all that this machine reaches."""
    sandbox_max_running: Annotated[CountOrZero, ResumeMayChange] = 0
    """Sandboxes of a rollout worker that are open at a time; an episode that needs its first one waits. 0: no limit."""
    sandbox_max_starting: Annotated[CountOrZero, ResumeMayChange] = 0
    """Programs of a rollout worker whose sandboxes start at a time, apart from those that run. 0: two for each core."""
    mcp: Annotated[tuple[str, ...], ResumeMayChange] = ()
    """Servers of the Model Context Protocol whose tools a `ToolEnv` offers besides its own: for each its command, its address
    (``http://HOST:PORT/mcp``), or a JSON file with ``mcpServers``."""
