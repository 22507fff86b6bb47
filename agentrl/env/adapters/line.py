"""The way from a program in a sandbox to the model: over the network of the machine, or over a socket and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

from agentrl.env.black_box import ModelEndpoint
from agentrl.env.sandbox import relay
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import current_choice

SOCKET, PORT = "endpoint", 8731
"""Name of the socket in the folder of a sandbox, and port of loopback in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The address of the model for a program, and the means to reach it.

    Attributes:
        llm: The address as the program sees it.
        words: Words that stand before those of the program.
        read: Files that these words need.
        network: True if the program reaches the network.
    """

    llm: ModelEndpoint
    words: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    network: bool = True


@asynccontextmanager
async def line_to(llm: ModelEndpoint, sandbox: Sandbox) -> AsyncIterator[Line]:
    """Open the way to the model for programs of a sandbox, as ``--sandbox-network`` says."""
    if current_choice().network == "host":
        yield Line(llm=llm)
        return
    address, path = urlsplit(llm.root), sandbox.folder / SOCKET
    connect = partial(asyncio.open_connection, address.hostname, address.port)
    server = await asyncio.start_unix_server(partial(relay.join, connect=connect), path)
    try:
        own = replace(llm, root=f"http://{relay.LOOPBACK}:{PORT}")
        words = (sandbox.python, "-I", "-S", relay.__file__, str(path), str(PORT))
        yield Line(llm=own, words=words, read=(relay.__file__,), network=False)
    finally:
        server.close()
