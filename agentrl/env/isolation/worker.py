"""The process of one episode: forked from the zygote, it calls the user's code and answers over a socket."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import pickle
import random
import signal
import socket
import sys
from typing import Any, NoReturn

import numpy as np
import numpy.random  # loaded on first use otherwise, with a seed of its own

from agentrl.core.errors import EnvError
from agentrl.core.types import Task
from agentrl.env.agent import AgentClass
from agentrl.env.boundary import EnvLimits, EnvSession, Threads
from agentrl.env.isolation import limits as rlimits
from agentrl.env.isolation import linux, wire
from agentrl.env.isolation.limits import ProcessLimits

CLEAN = 173
"""Exit code of a process that leaves no descendant; any other has the zygote look for some."""
OUT_OF_MEMORY = 174


class _Session(EnvSession):
    abandoned = "; its process is ended"


class EpisodeProcess:
    """Consumes calls from the socket and answers them one by one; at a deadline a call is given up here, then this process from outside."""

    def __init__(self, cls: AgentClass, source: str, limits: EnvLimits, process: ProcessLimits) -> None:
        self._class, self._source, self._limits, self._process = cls, source, limits, process
        self._threads = Threads(limits.threads)
        self._where = f"{os.path.basename(source)}: {cls.__name__}"
        self._log = _Log()
        self._task: Task | None = None
        self._session = self._new_session()
        self._is_clean = True
        self._episodes = 0

    async def serve(self, connection: socket.socket) -> None:
        """Answer until the other side has closed the connection, or until this process has played its episodes."""
        reader, writer = await asyncio.open_connection(sock=connection)
        call: asyncio.Task[bytes] | None = None
        while True:
            try:
                size, number = wire.HEADER.unpack(await reader.readexactly(wire.HEADER.size))
                operation, *arguments = pickle.loads(await reader.readexactly(size))
            except asyncio.IncompleteReadError:
                return
            if operation == "cancel":
                if call is not None:
                    call.cancel()
                continue
            if call is not None:
                await asyncio.wait({call})  # only a cancelled call is not waited for by the other side
            if operation == "close":
                answer, over = await self._close()
                writer.write(wire.framed(answer, number))
                await writer.drain()
                if over:
                    return
            else:
                call = asyncio.create_task(self._answer(operation, arguments))
                call.add_done_callback(functools.partial(_send, writer, number))

    async def _answer(self, operation: str, arguments: list[Any]) -> bytes:
        where = f"{self._where}.{operation}"
        try:
            result = await (self._reset(*arguments) if operation == "reset" else self._step(*arguments))
            return wire.encode_result(result, where)
        except EnvError as error:
            self._is_clean = False
            return wire.encode_error(error, rlimits.named_limit(str(error).partition("\n")[0], self._process))
        except asyncio.CancelledError:
            self._is_clean = False
            raise

    async def _reset(self, task: Task, seed: int) -> Any:
        rlimits.begin_cpu_time(self._process.cpu_s)
        seed_generators(seed)
        self._task = task
        self._session = self._new_session()
        return await self._session.reset(task, seed)

    async def _step(self, values: dict[str, Any]) -> Any:
        assert self._task is not None
        return await self._session.step(wire.step_state(values, self._task))

    async def _close(self) -> tuple[bytes, bool]:
        """Close the episode; what there is to say of it, and whether this process has played enough."""
        await self._session.close()
        self._episodes += 1
        self._task = None
        clean = self._is_clean and not linux.has_children()
        reusable = clean and self._episodes < self._process.reuse
        flush_output()
        return wire.encode_closed(clean=clean, reusable=reusable, log=self._log.take()), not reusable

    def _new_session(self) -> EnvSession:
        return _Session(self._class, self._source, self._threads, self._limits)


def _send(writer: asyncio.StreamWriter, number: int, call: asyncio.Task[bytes]) -> None:
    if not call.cancelled():
        writer.write(wire.framed(call.result(), number))


class _Log(logging.Handler):
    """Keeps agentrl's own warnings, to be logged where the run is."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []
        logger = logging.getLogger("agentrl")
        logger.handlers, logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self._lines = [*self._lines[-9:], record.getMessage()]

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


def seed_generators(seed: int) -> None:
    """Seed the generators that a process has one of, so that an episode depends on its task and on nothing before it."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def run(connection: socket.socket, cls: AgentClass, source: str, limits: EnvLimits) -> NoReturn:
    """Be the process of an episode; called once, right after the fork."""
    code = 1
    try:
        os.setsid()
        linux.become("agentrl-env", death_signal=signal.SIGKILL)
        process = limits.process or ProcessLimits()
        rlimits.apply(process)
        gc.enable()
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(EpisodeProcess(cls, source, limits, process).serve(connection))
        code = 0 if linux.has_children() else CLEAN
        flush_output()
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)  # what was registered for the end of the zygote is not this process's


def flush_output() -> None:
    """Write what was printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
