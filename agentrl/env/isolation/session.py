"""One episode's environment in a process of its own: the same calls, results and errors as `EnvSession`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from agentrl.core.errors import EnvError, EnvTimeoutError
from agentrl.core.types import Span, Task
from agentrl.env.agent import ResetResult, StepResult, StepState
from agentrl.env.boundary import CANCEL_GRACE_S, EnvLimits
from agentrl.env.isolation import wire
from agentrl.env.isolation.wire import HEADER, MAX_ANSWER, framed
from agentrl.env.load import AgentSpec

DRAIN_S = 0.2


class Link(asyncio.Protocol):
    """Frames, one answer to a call. What arrives is not trusted: one that is too long ends the link, one to an old call is dropped."""

    def __init__(self, answer: asyncio.Future[bytes | None]) -> None:
        self._answer, self._number = answer, 0
        self._buffer = bytearray()
        self.refused = ""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio calls it."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """As asyncio calls it."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            size, number = HEADER.unpack_from(self._buffer)
            if size > MAX_ANSWER:
                self.refused = f"its process sent {size} bytes, more than {MAX_ANSWER}; it was killed"
                self.abort()
                return
            if len(self._buffer) < HEADER.size + size:
                return
            body = bytes(self._buffer[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            if number == self._number and not self._answer.done():
                self._answer.set_result(body)

    def connection_lost(self, error: Exception | None) -> None:
        """As asyncio calls it."""
        self._transport = None
        if not self._answer.done():
            self._answer.set_result(None)

    def call(self, body: bytes) -> asyncio.Future[bytes | None]:
        """Send a call; the future's result is the answer, or `None` if the connection is lost."""
        self._answer = asyncio.get_running_loop().create_future()
        self._number += 1
        if self._transport is None:
            self._answer.set_result(None)
        else:
            self.send(body)
        return self._answer

    def send(self, body: bytes) -> None:
        """Send something that is not answered."""
        if self._transport is not None:
            self._transport.write(framed(body, self._number))

    def abort(self) -> None:
        """Close at once; what waits for an answer gets `None`."""
        if self._transport is not None:
            self._transport.abort()


class EpisodeHandle:
    """A process that plays an episode or waits for one: its number at the zygote; `died`, the reason for its end, once it has ended."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._connection: socket.socket | None = connection
        self._link: Link | None = None

    async def call(self, body: bytes, timeout_s: float) -> bytes | None:
        """Send a call and wait for the answer; `None` if the process ends before, `TimeoutError` if there is no answer in time."""
        link = await self._open()
        answer = link.call(body)
        either: set[asyncio.Future[Any]] = {answer, self.died}
        done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise TimeoutError
        if not answer.done():  # it may have answered before it ended
            await asyncio.wait({answer}, timeout=DRAIN_S)
        return answer.result() if answer.done() else None

    def send(self, body: bytes) -> None:
        """Send something that is not answered."""
        if self._link is not None:
            self._link.send(body)

    async def reason(self, timeout_s: float) -> str:
        """Return the reason for the process's end, which may be known only after a moment."""
        if self._link is not None and self._link.refused:
            return self._link.refused
        await asyncio.wait({self.died}, timeout=timeout_s)
        return self.died.result() if self.died.done() else "its process closed the connection; it was killed"

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.abort()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _open(self) -> Link:
        if self._link is None:
            assert self._connection is not None
            connection, self._connection = self._connection, None
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            unanswered: asyncio.Future[bytes | None] = loop.create_future()
            unanswered.set_result(None)
            _, self._link = await loop.create_connection(lambda: Link(unanswered), sock=connection)
        return self._link


def settle(future: asyncio.Future[str], reason: str) -> None:
    """Set a reason, unless there is one."""
    with contextlib.suppress(asyncio.InvalidStateError):
        future.set_result(reason)


_log = logging.getLogger(__name__)

GRACE_S = 0.5
"""The process gives a call up by itself at its deadline, which lets `close` run; if it does not answer then, it is killed."""
REASON_S = 1.0


class Processes(Protocol):
    """Source of processes; `agentrl.env.isolation.pool.ProcessPool` documents the methods."""

    async def acquire(self) -> EpisodeHandle:
        """A process that waits for an episode."""

    def give_back(self, handle: EpisodeHandle, *, reusable: bool) -> None:
        """Take back a process whose episode has been closed."""

    def kill(self, handle: EpisodeHandle) -> None:
        """Take back a process by killing it and everything it started."""


class ProcessSession:
    """One episode; made for `reset`, stepped, and closed whatever happened."""

    def __init__(self, processes: Processes, agent: AgentSpec, limits: EnvLimits, agents: Sequence[str]) -> None:
        self._processes, self._limits, self._agents = processes, limits, agents
        self._env = f"{Path(agent.source).name}: {agent.name}"
        self._handle: EpisodeHandle | None = None
        self._interrupted = False
        self._spans: tuple[Span, ...] = ()

    async def reset(self, task: Task, seed: int) -> ResetResult:
        """As `EnvSession.reset`."""
        where = f"{self._env}.reset"
        body = wire.pack_reset(task, seed, where)
        self._handle = await self._processes.acquire()
        answer = await self._call(where, body, self._limits.reset_timeout_s)
        return wire.decode_reset(self._decoded(answer, where), where, task.prompt, self._agents)

    async def step(self, state: StepState) -> StepResult:
        """As `EnvSession.step`."""
        where = f"{self._env}.step"
        answer = await self._call(where, wire.pack_step(state), self._limits.step_timeout_s)
        return wire.decode_step(self._decoded(answer, where), where, self._agents)

    def take_spans(self) -> tuple[Span, ...]:
        """As `EnvSession.take_spans`."""
        found, self._spans = self._spans, ()
        return found

    def _decoded(self, body: bytes, where: str) -> dict[str, Any]:
        """Return an answer, and keep the times in it."""
        answer = wire.decode(body, where)
        self._spans = wire.spans_of(answer)
        return answer

    async def close(self) -> None:
        """As `EnvSession.close`; then the process ends, is killed if it does not, or waits for another episode."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        reusable = clean = False
        try:
            grace = GRACE_S + CANCEL_GRACE_S * (2 if self._interrupted else 1)
            answer = await handle.call(pickle.dumps(("close",)), self._limits.close_timeout_s + grace)
            if answer is not None:
                data = wire.without_error(wire.decode(answer, f"{self._env}.close"))
                clean, reusable = data.get("clean") is True, data.get("reusable") is True
                for line in data.get("log", ())[:10]:
                    _log.warning("%s", line)
        except TimeoutError:
            _log.warning("%s.close did not return within %g s; its process was killed", self._env, self._limits.close_timeout_s)
        except (EnvError, TypeError) as error:
            _log.warning("%s", error)
        finally:
            if clean:
                self._processes.give_back(handle, reusable=reusable)
            else:
                self._processes.kill(handle)

    async def _call(self, where: str, body: bytes, timeout_s: float) -> bytes:
        handle = self._handle
        if handle is None:
            raise EnvError(f"{where}: its process has ended")
        try:
            answer = await handle.call(body, timeout_s + CANCEL_GRACE_S + GRACE_S)
        except TimeoutError:
            self._kill()
            raise EnvTimeoutError(f"{where} did not return within {timeout_s:g} s; its process was killed") from None
        except BaseException:
            self._interrupted = True
            handle.send(pickle.dumps(("cancel",)))
            raise
        if answer is None:
            reason = await handle.reason(REASON_S)
            self._kill()
            raise EnvError(f"{where}: {reason}")
        return answer

    def _kill(self) -> None:
        if self._handle is not None:
            self._processes.kill(self._handle)
            self._handle = None
