"""``agentrl serve-sandboxes``: sandboxes of this machine over HTTP, for ``--sandbox remote`` of trainers elsewhere."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass
from typing import Literal

from agentrl.api.serving import Say
from agentrl.api.training import uninterrupted
from agentrl.cli.serve import say, start_at, until_signal
from agentrl.cli.words import command_of, read
from agentrl.core.errors import ConfigError
from agentrl.core.process import LOOPBACK
from agentrl.core.sandboxes import DEFAULT_IMAGE, KEY
from agentrl.core.serving import Address, LoopbackServer
from agentrl.core.settings import Count, CountOrZero, Port
from agentrl.env.sandbox.engine import find_engine
from agentrl.env.sandbox.local import check_local
from agentrl.env.sandbox.server import SandboxServer
from agentrl.env.sandbox.spec import SandboxChoice
from agentrl.track.text import counted

MIN_KEY = 16


@dataclass(frozen=True, kw_only=True)
class ServeSandboxesArgs:
    """Hold sandboxes for trainers elsewhere, which take --sandbox remote, --sandbox-url and the key in AGENTRL_SANDBOX_KEY."""

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


SERVE_SANDBOXES = command_of("serve-sandboxes", ServeSandboxesArgs)


def main(words: list[str]) -> int:
    """Serve until a signal comes; the exit code is 0 then."""
    return until_signal(serve_sandboxes(read(SERVE_SANDBOXES, words), say))


def serving_key(serving: ServeSandboxesArgs) -> str:
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


async def serve_sandboxes(serving: ServeSandboxesArgs, say: Say) -> None:
    """Serve until it is cancelled; then end every sandbox and say how many there were.

    Consumes requests, produces answers, waits for programs; unblocked by cancellation alone.

    Raises:
        ConfigError: If others could use the server without a key, or the port is taken.
        SandboxError: If this machine cannot hold such sandboxes.
    """
    key = serving_key(serving)
    if serving.sandbox != "none":
        await asyncio.to_thread(check_local if serving.sandbox == "local" else find_engine)
    choice = SandboxChoice(kind=serving.sandbox, image=serving.sandbox_image, read=serving.sandbox_read, max_starting=serving.max_starting)
    app = SandboxServer(key, choice, serving.max_running)
    address = Address(host=serving.host, ports=(serving.port,), certificate=serving.certificate)
    server = LoopbackServer(app, name="sandbox server", address=address)
    root = await start_at(server, serving.host, serving.port)
    watching = asyncio.create_task(app.watch())
    say(f"serving {serving.sandbox} sandboxes at {root} key {key}", is_result=True)
    try:
        await watching
    finally:
        watching.cancel()
        await uninterrupted(server.close())
        await uninterrupted(app.close())
        say(f"{counted(app.num_opened, 'request')} for a sandbox were met")
