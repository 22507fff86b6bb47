"""Settings of sandboxes and of servers of tools that run in them, and those of ``agentrl serve-sandboxes``."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Annotated, Literal

from agentrl.core.errors import ConfigError
from agentrl.core.process import LOOPBACK
from agentrl.core.sandboxes import DEFAULT_IMAGE, KEY
from agentrl.core.settings import Count, CountOrZero, Port, ResumeMayChange

MIN_KEY = 16


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
    """Network of programs that are agents (``command:``, ``harness:``, ``harbor:``) behind a wall: the model's endpoint, or all that this
    machine reaches."""
    sandbox_max_running: Annotated[CountOrZero, ResumeMayChange] = 0
    """Sandboxes of the run that are open at a time on a machine, in all rollout workers; an episode that needs its first one waits. 0: no
    limit."""
    sandbox_max_starting: Annotated[CountOrZero, ResumeMayChange] = 0
    """Programs of a rollout worker whose sandboxes start at a time, apart from those that run. 0: two for each core."""
    mcp: Annotated[tuple[str, ...], ResumeMayChange] = ()
    """Servers of the Model Context Protocol whose tools a `ToolEnv` offers besides its own: for each its command, its address
    (``http://HOST:PORT/mcp``), or a JSON file with ``mcpServers``."""


@dataclass(frozen=True, kw_only=True)
class SandboxServing:
    """The sandboxes of a machine, and the address at which they are offered."""

    port: Port = 8300
    """Port to listen on. 0: a free one."""
    host: str = LOOPBACK
    """Address to listen on. Any other than loopback needs a key in the environment variable ``AGENTRL_SANDBOX_KEY``."""
    certificate: str = ""
    """File with a certificate and its private key (PEM); the server then speaks HTTPS."""
    sandbox: Literal["local", "container", "none"] = "local"
    """Kind of the sandboxes, as in training: ``local`` needs bubblewrap, ``container`` podman or docker; ``none`` has no wall."""
    sandbox_image: str = DEFAULT_IMAGE
    """Image of containers for which the client names none."""
    sandbox_read: tuple[str, ...] = ()
    """Files and folders of this machine that the programs may read, besides those of the system and of Python, or of the image."""
    max_running: Count = 64
    """Sandboxes that are held at a time; clients that ask for more wait."""
    max_starting: CountOrZero = 0
    """Programs whose sandboxes start at a time. 0: two for each core."""


def serving_key(serving: SandboxServing) -> str:
    """Return the key of a server: that of the environment, else on loopback a new one.

    Raises:
        ConfigError: If others could reach the server and the key is missing or too short.
    """
    key = os.environ.get(KEY, "")
    if key and len(key) < MIN_KEY:
        raise ConfigError(
            KEY, f"{len(key)} characters", "is too short to be safe", f"Set at least {MIN_KEY}, such as {secrets.token_hex(16)}."
        )
    if not key and not serving.host.startswith("127.") and serving.host not in ("localhost", "::1"):
        problem = "would let whoever reaches it run programs here without a key"
        raise ConfigError("--host", serving.host, problem, f"Set the environment variable {KEY}, here and for the trainer.")
    return key or secrets.token_urlsafe(24)
