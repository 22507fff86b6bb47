"""The fork server: a clean process that loads the user's file once, forks a process per episode, and lets none of them survive.

It is started with `subprocess`, not forked, so nothing of the rollout worker is in it: no threads, no secrets, no model.
Whatever a process of an episode leaves behind becomes the fork server's child, because it has asked the system for that; so a
child that it does not know is to be killed. A process of an episode calls the user's code and answers over a socket.
`multiprocessing.forkserver` is not enough: it knows the processes that it forked, not what they leave behind, and has no limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import pickle
import queue
import random
import signal
import socket
import sys
import threading
import time
from logging.handlers import QueueHandler
from multiprocessing.connection import wait
from typing import Any, NoReturn

import numpy as np
import numpy.random  # loaded on first use otherwise, with a seed of its own

from agentrl.core.errors import EnvError, EnvLoadError
from agentrl.core.types import Task
from agentrl.env.agent import AgentClass
from agentrl.env.boundary import EnvLimits, EnvSession, Threads
from agentrl.env.isolation import system, wire
from agentrl.env.isolation.system import MIB, ProcessLimits
from agentrl.env.load import AgentSpec, preload

CLEAN = 173
"""Exit code of a process that leaves no descendant; any other has the fork server look for some."""
OUT_OF_MEMORY = 174


class _Session(EnvSession):
    abandoned = "; its process is ended"


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

    async def serve(self, connection: socket.socket) -> None:
        """Answer until the other side has closed the connection, or until this process has played its episodes."""
        channel = await wire.Channel.open(connection)
        call: asyncio.Task[bytes] | None = None
        while True:
            try:
                number, body = await channel.read()
            except EOFError:
                return
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
                    return
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
        system.begin_cpu_time(self._process.cpu_s)
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

    def _new_session(self) -> EnvSession:
        return _Session(self._class, self._source, self._threads, self._limits)


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
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def run(connection: socket.socket, cls: AgentClass, source: str, limits: EnvLimits) -> NoReturn:
    """Be the process of an episode; called once, right after the fork."""
    code = 1
    try:
        os.setsid()
        system.become("agentrl-env", death_signal=signal.SIGKILL)
        process = limits.process or ProcessLimits()
        system.apply(process)
        gc.enable()
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(EpisodeProcess(cls, source, limits, process).serve(connection))
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


MAX_PACKET = 2**16
MAX_PROBLEM = 2500
"""Characters of each part of an error that are reported, so that four fit into a packet, however they are escaped."""
TICK_S = 0.05
SCAN_S = 1.0
BURST = 64
"""So many new processes on the machine since the last look make it time for another."""
END_S = 5.0


class ForkServer:
    """Consumes orders (fork, kill), reports deaths; waits for orders, for `parent` to end, and for the clock."""

    def __init__(self, control: socket.socket, parent: int, limits: EnvLimits) -> None:
        self._control, self._parent, self._limits = control, parent, limits
        self._process = limits.process or ProcessLimits()
        self._class: AgentClass | None = None
        self._source = ""
        self._workers: dict[int, int] = {}  # process id -> number
        self._reasons: dict[int, str] = {}  # number -> why it was killed
        self._own: set[int] = set()  # started by the user's file when it was loaded
        self._resident = 0
        self._next_scan, self._last_pid = 0.0, 0
        self._suspect = False

    def load(self, agent: AgentSpec) -> None:
        """Load the user's file and get ready to fork; `EnvLoadError` if it cannot be loaded."""
        self._class, self._source = preload(agent), agent.source
        self._own = {pid for pid, info in system.processes().items() if info.parent == os.getpid()}
        gc.collect()
        gc.freeze()  # so that collections in the children do not copy what they share
        self._resident = system.processes()[os.getpid()].resident

    def serve(self) -> None:
        """Work until the other side closes the connection or ends."""
        while True:
            ready = wait([self._control, self._parent], TICK_S if self._workers or self._suspect else None)
            self._collect()
            if self._parent in ready or (self._control in ready and not self._obey()):
                return
            self._watch()

    def end(self) -> None:
        """Kill everything that was started and wait for it."""
        until = time.monotonic() + END_S
        while system.has_children() and time.monotonic() < until:
            system.kill_families({pid for pid, info in system.processes().items() if info.parent == os.getpid()})
            system.collect()
            time.sleep(0.005)

    def tell(self, **report: Any) -> None:
        """Send a report; nobody may be there to read it."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(report).encode())

    def _obey(self) -> bool:
        """Take an order: a number with a socket is a process to fork, one without is to be killed; False if there will be none."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET, 1)
        except ConnectionError:  # closed with reports unread
            return False
        if descriptors:
            self._fork(int(packet), descriptors[0])
        elif packet and (ordered := [pid for pid, number in self._workers.items() if number == int(packet)]):
            system.kill_families(ordered)
            self._suspect = True
        return bool(packet)

    def _fork(self, number: int, descriptor: int) -> None:
        assert self._class is not None
        try:
            pid = os.fork()
        except OSError as error:
            self.tell(died=number, code=0, why=f"its process could not be started: {error}")
            os.close(descriptor)
            return
        if pid == 0:
            os.close(self._parent)
            self._control.close()
            run(socket.socket(fileno=descriptor), self._class, self._source, self._limits)
        os.close(descriptor)
        self._workers[pid] = number

    def _collect(self) -> None:
        """Take note of the children that have ended, kill what they left behind, then report them."""
        dead = [(self._workers.pop(pid), code) for pid, code in system.collect().items() if pid in self._workers]
        if self._suspect or any(code != CLEAN for _, code in dead):
            self._kill_strays()
        for number, code in dead:
            self.tell(died=number, code=code, why=self._reasons.pop(number, ""))

    def _kill_strays(self) -> None:
        self._suspect = False
        me = os.getpid()
        known = self._own | self._workers.keys()
        strays = {pid for pid, info in system.processes().items() if info.parent == me and info.state not in "ZX"} - known
        if strays:
            system.kill_families(strays)
            self._suspect = True  # look once more when they are gone

    def _watch(self) -> None:
        """Look for episodes that have too many processes or too much memory: now and then, and when many processes are new."""
        now = time.monotonic()
        with open("/proc/loadavg", encoding="ascii") as file:
            last_pid = int(file.read().split()[4])
        burst = not 0 <= last_pid - self._last_pid < BURST
        if not self._workers or (now < self._next_scan and not burst):
            return
        self._last_pid = last_pid
        table = system.processes()
        over = {}
        for pid, family in system.families(table, self._workers.keys()).items():
            memory = sum(max(table[member].resident - self._resident, 0) for member in family)
            if len(family) - 1 > self._process.processes:
                over[pid] = f"it had {len(family) - 1} processes, more than --env-processes {self._process.processes}"
            elif memory > self._process.memory_mib * MIB:
                over[pid] = f"it used {memory // MIB} MiB, more than --env-memory-mib {self._process.memory_mib}"
        if over:
            for pid, why in over.items():
                self._reasons[self._workers[pid]] = why
            system.kill_families(over)
            self._suspect = True
        self._next_scan = time.monotonic() + max(SCAN_S, 20 * (time.monotonic() - now))


def main(descriptor: int, expected_parent: int) -> None:
    """Be the fork server of the process that started this one; standard input holds the environment's class and its limits."""
    system.become("agentrl-envs", death_signal=signal.SIGTERM)  # ends a load that hangs; nothing has been forked yet
    parent = os.pidfd_open(expected_parent)
    if os.getppid() != expected_parent:
        return
    agent, limits = pickle.load(sys.stdin.buffer)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    server = ForkServer(socket.socket(fileno=descriptor), parent, limits)
    try:
        server.load(agent)
        system.become("agentrl-envs", death_signal=0)
        server.tell(threads=threading.active_count() - 1)
        server.serve()
    except EnvLoadError as error:
        server.tell(failed=[str(text)[:MAX_PROBLEM] for text in (error.field, error.value, error.problem, error.remedy)])
    finally:
        server.end()
    sys.stdout.flush()
    os._exit(0)
