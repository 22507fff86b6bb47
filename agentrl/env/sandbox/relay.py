"""Relay from a port of loopback to a socket in a folder, for a program that reaches nothing else.

Run as ``python -I -S relay.py SOCKET PORT PROGRAM ARGUMENT...`` in a sandbox without a network, it becomes the program, beside a process
that relays; so it needs nothing but the standard library. The connections end with their clients, and the process with the sandbox.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import TypeAlias

LOOPBACK = "127.0.0.1"
CHUNK = 65536

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: Callable[[], Awaitable[Streams]]) -> None:
    """Connect a client to what `connect` opens, until one of both ends."""
    try:
        far_reader, far_writer = await connect()
    except OSError:
        writer.close()
        return
    pumps = [asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        for each in (writer, far_writer):
            each.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:  # the end of the connection, as any other
        return


async def _serve(listener: socket.socket, path: str) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join(reader, writer, lambda: asyncio.open_unix_connection(path))

    async with await asyncio.start_server(accept, sock=listener) as server:
        await server.serve_forever()


def main() -> None:
    """Listen, and become the program; a child relays."""
    path, port, *words = sys.argv[1:]
    listener = socket.create_server((LOOPBACK, int(port)))
    if os.fork():
        listener.close()
        os.execvp(words[0], words)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # else the output of the program would seem to go on after its end
        os.dup2(null, descriptor)
    asyncio.run(_serve(listener, path))


if __name__ == "__main__":
    main()
