"""The process of an episode: it calls the user's code, answers over a socket, and can be copied between two calls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import pickle
import queue
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from logging.handlers import QueueHandler
from typing import Any, NoReturn

import numpy as np
import numpy.random  # loaded on first use otherwise, with a seed of its own

from agentrl.core.errors import EnvError
from agentrl.core.types import Task
from agentrl.env.agent import AgentClass
from agentrl.env.boundary import EnvLimits, EnvSession
from agentrl.env.isolation import launcher, system, wire
from agentrl.env.isolation.copying import Holdings, check_copy, let_go, places, spawn
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.threads import Threads

CLEAN = 173
"""Exit code of a process that leaves no descendant; any other has the fork server look for some."""
OUT_OF_MEMORY = 174


class _Session(EnvSession):
    abandoned = "; its process is ended"

    def take_over(self, other: _Session) -> None:
        """Go on with the user's object of a session whose process this one is a copy of."""
        self._object = other._object


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """A call that asks for copies of the process, which is answered between two runs of the event loop."""

    number: int  # of the call
    count: int


class EpisodeProcess:
    """Consumes calls from the socket and answers them one by one; at a deadline a call is given up here, then this process from outside."""

    def __init__(self, cls: AgentClass, source: str, limits: EnvLimits, process: ProcessLimits) -> None:
        self._class, self._source, self._limits, self._process = cls, source, limits, process
        self._threads = Threads(limits.threads)
        self._where = f"{os.path.basename(source)}: {cls.__name__}"
        self._log = _collect_warnings()
        self._task: Task | None = None
        self._session = self._new_session()
        self._is_clean = True
        self._episodes = 0

    async def serve(self, channel: wire.Channel) -> CopyOrder | None:
        """Answer until this process is to be copied, or, `None`, until the other side is gone or this process has played its episodes."""
        call: asyncio.Task[bytes] | None = None
        while True:
            try:
                number, body = await channel.read()
            except EOFError:
                return None
            operation, *arguments = pickle.loads(body)
            if operation == "cancel":
                if call is not None:
                    call.cancel()
                continue
            if call is not None:
                await asyncio.wait({call})  # only a cancelled call is not waited for by the other side
            if operation == "close":
                answer, over = await self._close()
                channel.write(answer, number)
                await channel.drain()
                if over:
                    return None
            elif operation == "copy":
                return CopyOrder(number, *arguments)
            else:
                call = asyncio.create_task(self._answer(operation, arguments))
                call.add_done_callback(functools.partial(_send, channel, number))

    async def _answer(self, operation: str, arguments: list[Any]) -> bytes:
        where = f"{self._where}.{operation}"
        try:
            result = await (self._reset(*arguments) if operation == "reset" else self._step(*arguments))
            return wire.encode_result(result, where, self._session.take_spans())
        except EnvError as error:
            self._is_clean = False
            hint = system.named_limit(str(error).partition("\n")[0], self._process)
            return wire.encode_error(error, hint, self._session.take_spans())
        except asyncio.CancelledError:
            self._is_clean = False
            raise

    async def _reset(self, task: Task, seed: int) -> Any:
        # The system counts from the start of the process, which may have played other episodes before.
        launcher.begin_cpu_time(self._process.cpu_s)
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
        clean = self._is_clean and not system.has_children()
        reusable = clean and self._episodes < self._process.reuse
        flush_output()
        return wire.encode_closed(clean=clean, reusable=reusable, log=_taken(self._log)), not reusable

    def _new_session(self) -> _Session:
        return _Session(self._class, self._source, self._threads, self._limits)

    @property
    def where(self) -> str:
        """File and class, for messages."""
        return self._where

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks on the event loop that are not the user's."""
        return [self._session.user_task] if self._session.user_task is not None else []

    def copied(self) -> EpisodeProcess:
        """Return what goes on with the episode in a copy of this process, where threads and the event loop are gone."""
        other = EpisodeProcess(self._class, self._source, self._limits, self._process)
        other._task, other._episodes, other._is_clean = self._task, self._episodes, self._is_clean
        other._session.take_over(self._session)
        return other


def _send(channel: wire.Channel, number: int, call: asyncio.Task[bytes]) -> None:
    if not call.cancelled():
        channel.write(call.result(), number)


def _collect_warnings() -> queue.SimpleQueue[logging.LogRecord]:
    """Have agentrl's own warnings put into a queue, to be logged where the run is."""
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(records)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("agentrl")
    logger.handlers, logger.propagate = [handler], False
    return records


def _taken(records: queue.SimpleQueue[logging.LogRecord]) -> list[str]:
    return [records.get().message for _ in range(records.qsize())][-10:]


def seed_generators(seed: int) -> None:
    """Seed the generators that a process has one of, so that an episode depends on its task and on nothing before it."""
    random.seed(seed)
    # NumPy refuses seeds of more than 32 bits.
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def run(connection: socket.socket, lane: socket.socket | None, cls: AgentClass, source: str, limits: EnvLimits) -> NoReturn:
    """Be the process of an episode; called once, right after the fork. Sockets of copies come through `lane`."""

    def play() -> None:
        launcher.become("agentrl-env", death_signal=signal.SIGKILL)
        process = limits.process or ProcessLimits()
        launcher.limit_all(process.memory_mib, process.file_mib, process.open_files)
        gc.enable()
        _play(connection, lane, EpisodeProcess(cls, source, limits, process))

    os.setsid()
    _end_after(play)


def _play(connection: socket.socket, lane: socket.socket | None, process: EpisodeProcess) -> None:
    """Play episodes, and make copies of this process when that is asked for."""
    before = Holdings.of_this_process()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    channel = loop.run_until_complete(wire.Channel.open(connection))
    held = Holdings.of_this_process()
    own = {each.fileno() for each in (connection, lane) if each is not None}
    started = Holdings(before.descriptors - own, before.shared)  # what a copy goes on with
    while (order := loop.run_until_complete(process.serve(channel))) is not None:
        descriptors = socket.recv_fds(lane, 1, order.count)[1] if lane is not None else []
        try:
            check_copy(f"{process.where}.snapshot", held.and_open(descriptors), loop, process.tasks)
            flush_output()
            play = partial(_be_copy, descriptors, process, started, held, places())
            pids = [spawn(partial(play, descriptor)) for descriptor in descriptors]
            answer = wire.encode_copies(pids)
        except (EnvError, OSError) as error:
            answer = wire.encode_error(error if isinstance(error, EnvError) else EnvError(f"{process.where}.snapshot: {error}"))
        for descriptor in descriptors:
            os.close(descriptor)
        channel.write(answer, order.number)


def _be_copy(
    descriptors: list[int], process: EpisodeProcess, started: Holdings, held: Holdings, read: Mapping[int, int], descriptor: int
) -> NoReturn:
    """Be a copy of the process of an episode; called once, right after the fork."""

    def play() -> None:
        for other in descriptors:
            if other != descriptor:
                os.close(other)
        let_go(started, held.and_open([descriptor]), keep=descriptor, read=read)
        launcher.become("agentrl-env", death_signal=signal.SIGKILL)
        _play(socket.socket(fileno=descriptor), None, process.copied())

    os.setsid()
    _end_after(play)


def _end_after(play: Callable[[], None]) -> NoReturn:
    """End this process when it has played, with a code that says how."""
    code = 1
    try:
        play()
        code = 0 if system.has_children() else CLEAN
        flush_output()
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)  # what was registered for the end of the fork server is not this process's


def flush_output() -> None:
    """Write what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
