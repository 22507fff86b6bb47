"""Sandboxes for trainers on other machines: what ``agentrl serve-sandboxes`` runs."""

from __future__ import annotations

import asyncio

from agentrl.api.serving import Say
from agentrl.api.training import uninterrupted
from agentrl.config.serving import SandboxServing, serving_key
from agentrl.core.errors import ConfigError
from agentrl.core.serving import Address, LoopbackServer
from agentrl.env.sandbox.engine import find_engine
from agentrl.env.sandbox.local import check_local
from agentrl.env.sandbox.server import SandboxServer
from agentrl.env.sandbox.spec import SandboxChoice
from agentrl.track.text import counted


async def serve_sandboxes(serving: SandboxServing, say: Say) -> None:
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
    try:
        root = await server.start()
    except OSError as error:
        where = f"{serving.host}:{serving.port}"
        raise ConfigError("--port", where, f"cannot be used: {error.strerror}", "Choose another, or 0 for a free one.") from error
    watching = asyncio.create_task(app.watch())
    say(f"serving {serving.sandbox} sandboxes at {root} key {key}", is_result=True)
    try:
        await watching
    finally:
        watching.cancel()
        await uninterrupted(server.close())
        await uninterrupted(app.close())
        say(f"{counted(app.num_opened, 'request')} for a sandbox were met")
