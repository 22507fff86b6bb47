"""One address of this machine for programs that have no network: what they send to it within their namespace is passed on here."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from agentrl.core.errors import SandboxError
from agentrl.env.isolation import launcher
from agentrl.env.sandbox.program import SHOWN, START_S

CHUNK = 65536


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; `SandboxError` if it is no such address."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise SandboxError(f"network = {address!r} is no address that a program may connect to; write HOST:PORT, True or False")
    return host, port


def receive_listener(told: socket.socket) -> tuple[bytes, socket.socket | None]:
    """Return what is told, and the socket that comes with it, which listens in another namespace of the network."""
    word, descriptors, _, _ = socket.recv_fds(told, 1, 1)
    return word, socket.socket(fileno=descriptors[0]) if descriptors else None


async def listen_in(pid: int, port: int) -> socket.socket:
    """Return a socket that listens on loopback in the network of a process; `SandboxError` if this user may not."""
    told, tell = socket.socketpair()
    with told, tell:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launcher.__file__, launcher.LISTEN, str(pid), str(port), str(tell.fileno())),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(tell.fileno(),),
        )
        async with asyncio.timeout(START_S):
            _, message = await process.communicate()
        if process.returncode:
            problem = message.decode(errors="replace").strip()[-SHOWN:]
            raise SandboxError(f"a container cannot be given a single address: {problem}; give its programs the network, or none")
        _, listener = receive_listener(told)
    assert listener is not None
    return listener


@contextlib.asynccontextmanager
async def relayed(listener: socket.socket | None, address: str) -> AsyncIterator[None]:
    """Pass on the connections of a listener to an address; nothing without a listener."""
    if listener is None:
        yield
        return
    host, port = split_address(address)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError), contextlib.closing(writer):
            there, away = await asyncio.open_connection(host, port)
            with contextlib.closing(away):
                await asyncio.gather(_pump(reader, away), _pump(there, writer))
        tasks.discard(task)

    server = await asyncio.start_server(serve, sock=listener)
    try:
        yield
    finally:
        # It only ends listening; connections that were accepted are ended one by one.
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes one way until their end, which is passed on too."""
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()
