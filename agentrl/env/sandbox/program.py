"""A program that runs: what it prints, its limits, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable

from agentrl.env.isolation import system
from agentrl.env.sandbox.spec import Command, Ended, ExecResult, Keep

WATCH_S = 0.25
"""Seconds between two looks at the memory and the disk that a program uses."""
END_S = 5.0
START_S = 60.0
"""Seconds in which a program begins, or its sandbox has failed."""
SHOWN = 500
"""Characters of a message that are shown."""
SIGNALLED = 128
"""Exit codes above tell the signal that ended a program, where one process reports the end of another."""


async def finish(work: Awaitable[None]) -> None:
    """Wait until `work` is done, also if the caller is cancelled meanwhile, once or again; then it is."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


class Output:
    """Some of a program's output.

    Args:
        limit: Bytes that are kept.
        keep: Which bytes are kept.
        mark: Line that stands before the output of a program that began; empty if its beginning is seen otherwise.
    """

    def __init__(self, limit: int, keep: Keep, mark: bytes = b"") -> None:
        self._limit, self._keep, self._mark = limit, keep, mark
        self._data = bytearray()
        self.begun = asyncio.Event()
        self.flooded = asyncio.Event()  # there is more than may be kept, and it is the first that is kept

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Keep some of the output, and read the rest too: a full pipe would hold up the end."""
        while chunk := await stream.read(65536):
            self._data += chunk
            if self._mark and not self._begins():
                continue
            if len(self._data) > self._limit and self._keep == "first":
                del self._data[self._limit :]
                self.flooded.set()
            elif len(self._data) > self._limit:
                del self._data[: -self._limit]

    def _begins(self) -> bool:
        before, found, after = self._data.partition(self._mark)
        if found:
            self._data, self._mark = after, b""
            self.begun.set()
        else:
            self._data = before[-self._limit :]
        return bool(found)

    def __str__(self) -> str:
        return self._data.decode(errors="replace")


class Program:
    """A program that runs.

    Args:
        process: The process of this machine that it is, or that reports on it.
        output: Receives its output.
        kill: Ends all its processes, after which `process` ends too.
        watch: Returns when the program has used up memory or disk, and with which.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: Output,
        kill: Callable[[], Awaitable[None]],
        watch: Callable[[], Awaitable[Ended]],
    ) -> None:
        assert process.stdout is not None
        self._process, self._output, self._kill, self._watch = process, output, kill, watch
        self._reading = asyncio.create_task(output.read(process.stdout))
        self._is_ended = False

    async def begins(self, timeout_s: float) -> bool:
        """Return True once the mark of a program's beginning is read, False if there is none."""
        beginning = asyncio.create_task(self._output.begun.wait())
        await asyncio.wait({beginning, self._reading}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        beginning.cancel()
        return self._output.begun.is_set()

    async def run(self, command: Command) -> ExecResult:
        """Wait for the program's end or for a limit."""
        exiting, watching = asyncio.create_task(self._process.wait()), asyncio.ensure_future(self._watch())
        flooding, feeding = asyncio.create_task(self._output.flooded.wait()), asyncio.create_task(self._feed(command.stdin))
        try:
            limit = None if math.isinf(command.timeout_s) else command.timeout_s
            done, _ = await asyncio.wait({exiting, watching, flooding}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            await self.end()
            code = await self._process.wait()
        finally:
            for task in (watching, exiting, flooding, feeding):
                task.cancel()
        if self._output.flooded.is_set():
            ended: Ended = "output"
        elif watching in done:
            ended = watching.result()
        else:
            ended = "exit" if exiting in done else "timeout"
        return ExecResult(code=code, output=str(self._output), ended=ended)

    async def end(self) -> None:
        """End the program's processes, and return when they are gone and their output is read."""
        if not self._is_ended:
            await self._kill()
            await self._process.wait()
            # Not without a limit: a process that is left may hold the other end of the pipe open.
            await asyncio.wait({self._reading}, timeout=END_S)
            self._reading.cancel()
            self._is_ended = True

    async def _feed(self, stdin: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(stdin)
            await self._process.stdin.drain()
        self._process.stdin.close()


_table: tuple[float, dict[int, system.ProcessInfo]] = (0.0, {})


def resident(pid: int) -> int:
    """Return the memory of a process and its descendants; all sandboxes share one look at the system per `WATCH_S`."""
    global _table
    now = time.monotonic()
    # A little less than the time between two looks, or a sandbox that is alone would see its own last look again.
    if now - _table[0] > WATCH_S * 0.9:
        _table = now, system.processes()
    table = _table[1]
    return sum(table[member].resident for member in system.families(table, [pid])[pid])
