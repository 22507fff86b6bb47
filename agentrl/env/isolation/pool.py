"""Environments of a rollout worker's episodes: in this process, or in a pool of processes that are started ahead and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections import deque
from collections.abc import Sequence
from typing import IO, Protocol

from agentrl.core.errors import EnvError, EnvLoadError
from agentrl.env.agent_spec import AgentSpec, preload
from agentrl.env.boundary import EnvLimits, EnvSession
from agentrl.env.directory import CurrentDirectory
from agentrl.env.isolation import system
from agentrl.env.isolation.episode_process import CLEAN, OUT_OF_MEMORY
from agentrl.env.isolation.fork_server import MAX_PACKET
from agentrl.env.isolation.session import EpisodeHandle, ProcessSession
from agentrl.env.isolation.system import ProcessLimits, child_environment, describe_end
from agentrl.env.multi_agent import named_agents
from agentrl.env.session import Session
from agentrl.env.threads import Threads

_log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
LEAVE_S = 2.0
SPARES = 4
MARK = "AGENTRL_ENV_POOL"
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from agentrl.env.isolation.fork_server import main
main(*map(int, sys.argv[2:]))
"""


class ProcessPool:
    """Plays every episode in a process of its own; started ahead, first `SPARES`, later as many as were in use at a time."""

    def __init__(self, agent: AgentSpec, limits: EnvLimits) -> None:
        self._agent, self._limits = agent, limits
        self._process = limits.process or ProcessLimits()
        self._mark = uuid.uuid4().hex
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._reports: asyncio.Task[None] | None = None
        self._orders: deque[tuple[bytes, tuple[socket.socket, ...]]] = deque()  # words, and sockets of a process to be started
        self._handles: dict[int, EpisodeHandle] = {}
        self._spares: deque[EpisodeHandle] = deque()
        self._count, self._used, self._peak = 0, 0, 0
        self._starting = asyncio.Lock()
        self._is_lost = False
        self._restart: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the fork server, wait until it has loaded the user's file, and start some processes; `EnvLoadError` if that fails."""
        if self._agent.kind.calls_model:
            problem = f"{self._agent.name} calls the model itself, and runs in the rollout worker"
            raise EnvLoadError("--env-isolation", "process", problem, "Leave the flag out, or write a class with reset and step.")
        async with self._starting:
            if self._is_lost:
                await self._end_fork_server()
            if self._fork_server is None and not self._closed:
                try:
                    self._reports = asyncio.create_task(self._listen(await self._start_fork_server()))
                except BaseException:
                    await self._end_fork_server()
                    raise
                self._refill()

    def session(self) -> Session:
        """The environment of one episode."""
        return ProcessSession(self, self._agent, self._limits, named_agents(self._agent.load()))

    async def acquire(self) -> EpisodeHandle:
        """Return a process that waits for an episode, to be given back or killed; `EnvError` if none can be had."""
        if self._fork_server is None or self._is_lost:
            try:
                await self.start()
            except (EnvLoadError, OSError) as error:
                raise EnvError(f"the environment's processes cannot be started: {error}") from error
        if self._closed or self._fork_server is None:
            raise EnvError("the environment's processes have been ended")
        while self._spares and self._spares[0].died.done():
            self._spares.popleft()
        handle = self._spares.popleft() if self._spares else self._fork()
        self._used += 1
        self._peak = max(self._peak, self._used)
        # Later, so that the episode that waits is not held up by processes for others.
        asyncio.get_running_loop().call_soon(self._refill)
        return handle

    def give_back(self, handle: EpisodeHandle, *, reusable: bool) -> None:
        """Take back a process whose episode has been closed; one that is not reusable ends by itself, or is helped to."""
        self._used -= 1
        if reusable and not handle.died.done():
            self._spares.append(handle)
            return
        asyncio.get_running_loop().call_later(LEAVE_S, self._order_end, handle)
        self._refill()

    def kill(self, handle: EpisodeHandle) -> None:
        """Take back a process by killing it and everything it started."""
        self._used -= 1
        self._order_end(handle)
        handle.close()
        self._refill()

    def copies(self, handle: EpisodeHandle, count: int) -> list[EpisodeHandle]:
        """Return handles of copies of a process, which is to be asked for them next; each is to be given back or killed."""
        if handle.lane is None:
            raise EnvError("the environment's processes were not started to be copied (--branch-at)")
        made, theirs = [], []
        for _ in range(count):
            self._count += 1
            ours, their = socket.socketpair()
            self._handles[self._count] = EpisodeHandle(self._count, ours)
            made.append(self._handles[self._count])
            theirs.append(their)
        try:
            socket.send_fds(handle.lane, [b"+"], [each.fileno() for each in theirs])
        except OSError as error:
            for copied in made:
                self._handles.pop(copied.number).close()
            raise EnvError(f"the environment's process cannot be copied: {error}") from error
        finally:
            for their in theirs:
                their.close()
        self._used += count
        self._peak = max(self._peak, self._used)
        # Before the process is asked for copies: the fork server kills children that it does not know, unless some are expected.
        self._order(b"+")
        return made

    def adopt(self, copies: Sequence[EpisodeHandle], pids: Sequence[int]) -> None:
        """Tell the fork server which processes the copies are; without ids there are none, and what there may be is killed."""
        for handle, pid in zip(copies, pids, strict=False):
            self._order(b"=%d %d" % (handle.number, pid))
        self._order(b"-")
        if not pids:
            for handle in copies:
                self._used -= 1
                self._handles.pop(handle.number, None)
                handle.end("it was not copied")
                handle.close()

    async def close(self) -> None:
        """Kill every process; safe to call twice."""
        self._closed = True
        async with self._starting:
            await self._end_fork_server()

    async def _start_fork_server(self) -> socket.socket:
        """Start the fork server, and return its control socket once it has loaded the user's file."""
        # A file, since a pipe would hold up this event loop until the new process has read a large pickle.
        with tempfile.TemporaryFile() as job:
            pickle.dump((self._agent, self._limits), job)
            job.seek(0)
            # Packets, so that each order arrives alone, with its own descriptors.
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._fork_server = _start(theirs, job, child_environment(os.environ, self._process.passed) | {MARK: self._mark})
        self._control.setblocking(False)
        problem, remedy = "its process ended while it was loaded", "Look at what it does when it is imported."
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                report = json.loads(await _receive(self._control) or "null")
        except TimeoutError:
            problem = f"loading it in a process of its own did not end within {LOAD_TIMEOUT_S:g} s"
            raise EnvLoadError("--agent", self._agent.spec, problem, remedy) from None
        if report is None:
            raise EnvLoadError("--agent", self._agent.spec, problem, remedy)
        if "failed" in report:
            raise EnvLoadError(*map(str, report["failed"]))
        if report["threads"]:
            problem = "starts threads when it is imported; the processes of the episodes do not have them"
            _log.warning("%s %s: start them in reset", self._agent.source, problem)
        return self._control

    async def _end_fork_server(self) -> None:
        """Have the fork server kill everything and end; if it is not able to, do it from here."""
        server, control, reports = self._fork_server, self._control, self._reports
        self._fork_server = self._control = self._reports = None
        self._is_lost = False
        for handle in self._handles.values():
            handle.end("its process was ended with all others")
            handle.close()
        self._handles.clear()
        self._spares.clear()
        for _, connections in self._orders:
            for connection in connections:
                connection.close()
        self._orders.clear()
        if reports is not None:
            reports.cancel()
            await asyncio.wait({reports})
        if control is not None:
            asyncio.get_running_loop().remove_writer(control)
            control.close()
        if server is not None:
            await asyncio.shield(asyncio.to_thread(_wait_for_end, server, f"{MARK}={self._mark}"))

    def _fork(self) -> EpisodeHandle:
        self._count += 1
        ours, theirs = socket.socketpair()
        lane, other = socket.socketpair() if self._limits.copied else (None, None)
        handle = self._handles[self._count] = EpisodeHandle(self._count, ours, lane)
        self._order(b"%d" % self._count, *(each for each in (theirs, other) if each is not None))
        return handle

    def _refill(self) -> None:
        """Start processes ahead, up to the largest number that was in use at a time."""
        if self._fork_server is None or self._is_lost or self._closed:
            return
        while self._used + len(self._spares) < max(self._peak, SPARES):
            try:
                self._spares.append(self._fork())
            except OSError as error:  # out of descriptors: the next episode says so
                _log.warning("no process can be started ahead: %s", error)
                return

    def _order_end(self, handle: EpisodeHandle) -> None:
        if not handle.died.done() and self._control is not None:
            self._order(b"%d" % handle.number)

    def _order(self, words: bytes, *connections: socket.socket) -> None:
        """Give the fork server an order, as `ForkServer` reads it."""
        self._orders.append((words, connections))
        if len(self._orders) == 1:
            self._write()

    def _write(self) -> None:
        """Send what waits to be sent; go on when there is room."""
        assert self._control is not None
        loop = asyncio.get_running_loop()
        while self._orders:
            words, connections = self._orders[0]
            try:
                socket.send_fds(self._control, [words], [each.fileno() for each in connections])
            except BlockingIOError:
                loop.add_writer(self._control, self._write)
                return
            except OSError:  # the fork server is gone; `_listen` notices
                return
            self._orders.popleft()
            for connection in connections:
                connection.close()
        loop.remove_writer(self._control)

    async def _listen(self, control: socket.socket) -> None:
        """Take reports of deaths; their end means that the fork server has ended by itself, and another is started."""
        while packet := await _receive(control):
            report = json.loads(packet)
            handle = self._handles.pop(report["died"], None)
            if handle is not None:
                handle.end(report["why"] or self._describe(report["code"]))
        _log.warning("the process that starts environments has ended; another is started")
        self._is_lost = True
        for handle in self._handles.values():
            handle.end("the process that starts environments has ended")
        self._restart = asyncio.create_task(self.start())
        self._restart.add_done_callback(lambda task: task.cancelled() or task.exception())  # the next episode meets it too

    def _describe(self, code: int) -> str:
        if code == OUT_OF_MEMORY:
            return f"its process ran out of memory (--env-limits memory_mib={self._process.memory_mib})"
        return "its process has ended" if code == CLEAN else describe_end(code, self._process)


def _start(control: socket.socket, job: IO[bytes], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(control.fileno()), str(os.getpid())],
        stdin=job,
        env=environment,
        pass_fds=[control.fileno()],
        # A group of its own, which is killed as a whole if it hangs.
        start_new_session=True,
    )


async def _receive(control: socket.socket) -> bytes:
    """Return the next packet of the fork server; empty if it has ended."""
    try:
        return await asyncio.get_running_loop().sock_recv(control, MAX_PACKET)
    except OSError:
        return b""


def _wait_for_end(server: subprocess.Popen[bytes], mark: str) -> None:
    """Wait until the fork server has ended, kill it if it does not, and then what it may have left."""
    try:
        server.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    if left := system.kill_marked(mark):
        _log.warning("killed %d processes that environments had left behind", left)


class Sessions(Protocol):
    """Maker of each episode's environment; started before the first episode and closed after the last."""

    async def start(self) -> None:
        """Load the user's class where it will run; `EnvLoadError` if it cannot be loaded there."""

    def session(self) -> Session:
        """The environment of one episode."""

    async def close(self) -> None:
        """Release what the episodes shared; safe to call twice."""


class LocalSessions:
    """Environments in this process; plain ``def`` methods on threads."""

    def __init__(self, agent: AgentSpec, limits: EnvLimits) -> None:
        self._agent, self._limits = agent, limits
        self._threads = Threads(limits.threads)
        self._directory: CurrentDirectory | None = None

    async def start(self) -> None:
        """As `Sessions.start`."""
        preload(self._agent)
        self._directory = CurrentDirectory()

    def session(self) -> Session:
        """As `Sessions.session`."""
        return EnvSession(self._agent.load(), self._agent.source, self._threads, self._limits, self._directory)

    async def close(self) -> None:
        """As `Sessions.close`."""
        self._threads.close()


def open_sessions(agent: AgentSpec, limits: EnvLimits) -> Sessions:
    """Return sessions in separate processes if `limits` has limits of such a process, else in this process."""
    return LocalSessions(agent, limits) if limits.process is None else ProcessPool(agent, limits)
