"""The viewer's server: one port of this machine, for as long as a person looks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, cast

from agentrl.core.errors import ConfigError
from agentrl.core.serving import App, LoopbackServer
from agentrl.viewer.app import make_app
from agentrl.viewer.guard import Guard
from agentrl.viewer.runs import RunCollection

TOKEN_BYTES = 24


async def view(collection: RunCollection, port: int, *, ready: Callable[[str], Any], token: str | None = None) -> None:
    """Serve the page until it is cancelled.

    Consumes requests, produces pages and answers; unblocked by cancellation alone.

    Args:
        collection: The runs.
        port: Port on 127.0.0.1; 0 for a free one.
        ready: Told the address of the page once it can be opened.
        token: The secret in the address; a new one if it is not given.

    Raises:
        ConfigError: If the port is taken.
    """
    token = token or secrets.token_urlsafe(TOKEN_BYTES)
    server = LoopbackServer(cast("App", Guard(make_app(collection), token)), port=port, name="viewer")
    try:
        root = await server.start()
    except OSError as error:
        raise ConfigError("--port", port, f"cannot be used: {error.strerror}", "Choose another, or 0 for a free one.") from error
    collection.prepare()
    try:
        ready(f"{root}/{token}/")
        await asyncio.Event().wait()
    finally:
        await server.close()
