"""``agentrl serve``: the endpoint that black-box agents are given in training, over a model, to try an agent first."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any

from agentrl.api.background import run_until_signal
from agentrl.config.load import load
from agentrl.core.errors import ConfigError
from agentrl.core.serving import LoopbackServer
from agentrl.resolve.commands import SERVE


def main(words: list[str]) -> int:
    """Serve until a signal comes; the exit code is 0 then."""
    config = load(SERVE, words)
    from agentrl.api.serving import serve
    from agentrl.resolve.parts import check_model, cluster_plan

    check_model(config)
    return until_signal(serve(cluster_plan(config), config.model.model or "tiny", say))


def until_signal(server: Coroutine[Any, Any, None]) -> int:
    """Run a server until a signal comes; the exit code is 0 then."""
    try:
        run_until_signal(server)
    except KeyboardInterrupt:
        return 0
    return 1  # the server ended by itself


async def start_at(server: LoopbackServer, host: str, port: int) -> str:
    """Start a server, and return the address that others are told; `ConfigError` if it cannot have the port."""
    try:
        return await server.start()
    except OSError as error:
        remedy = "Choose another, or 0 for a free one."
        raise ConfigError("--port", f"{host}:{port}", f"cannot be used: {error.strerror}", remedy) from error


def say(line: str, *, is_result: bool = False) -> None:
    """Write a line for a person to standard error, or the one that scripts read to standard output."""
    stream = sys.stdout if is_result else sys.stderr
    stream.write(f"{line}\n" if is_result else f"agentrl: {line}\n")
    stream.flush()
