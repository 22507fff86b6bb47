"""One episode's environment in a process of its own: the same calls, results and errors as `EnvSession`."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentrl.core.errors import EnvError, EnvTimeoutError
from agentrl.core.types import Span, Task
from agentrl.env.agent import ResetResult, StepResult, StepState
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation import wire
from agentrl.env.results import check_reset, check_step
from agentrl.env.session import Snapshot
from agentrl.env.user_task import CANCEL_GRACE_S

_log = logging.getLogger(__name__)

DRAIN_S = 0.2
"""Time to read what a process sent before it ended."""
GRACE_S = 0.5
"""The process gives a call up by itself at its deadline, which lets `close` run; if it does not answer then, it is killed."""
REASON_S = 1.0


class EpisodeHandle:
    """A process that plays an episode or waits for one: its number at the fork server, and `died`, the reason for its end, once known."""

    def __init__(self, number: int, connection: socket.socket, lane: socket.socket | None = None) -> None:
        self.number, self.lane = number, lane  # through which the process is given the sockets of its copies
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._channel: wire.Channel | None = None
        self._calls = 0
        self._refused = ""

    async def call(self, body: bytes, timeout_s: float) -> bytes | None:
        """Send a call and wait for the answer; `None` if the process ends before, `TimeoutError` if there is no answer in time.

        What the process sends is not trusted: an answer that is too long ends the connection, one to an old call is dropped.
        """
        async with asyncio.timeout(timeout_s):
            try:
                if self._channel is None and self.died.done():
                    return None
                if self._channel is None:
                    self._channel = await wire.Channel.open(self._connection)
                self._calls += 1
                self._channel.write(body, self._calls)
                while True:
                    number, answer = await self._channel.read(wire.MAX_ANSWER)
                    if number == self._calls:
                        return answer
            except EnvError as error:
                self._refused = str(error)
                self.close()
            except (EOFError, OSError):
                pass
        return None

    def send(self, body: bytes) -> None:
        """Send something that is not answered."""
        if self._channel is not None:
            self._channel.write(body, self._calls)

    async def reason(self) -> str:
        """Return the reason for the process's end, which may be known only after a moment."""
        if self._refused:
            return self._refused
        await asyncio.wait({self.died}, timeout=REASON_S)
        return self.died.result() if self.died.done() else "its process closed the connection; it was killed"

    def end(self, reason: str) -> None:
        """Note that the process has ended; what it sent before can still be read for a moment."""
        if not self.died.done():
            self.died.set_result(reason)
            asyncio.get_running_loop().call_later(DRAIN_S, self.close)

    def close(self) -> None:
        """Close the connection."""
        if self.lane is not None:
            self.lane.close()
        if self._channel is not None:
            self._channel.abort()
        else:
            self._connection.close()


class Processes(Protocol):
    """A pool of processes, as far as a session needs it."""

    async def acquire(self) -> EpisodeHandle:
        """Return a process for an episode."""

    def give_back(self, handle: EpisodeHandle, *, reusable: bool) -> None:
        """Take a process back, for another episode if it is `reusable`."""

    def kill(self, handle: EpisodeHandle) -> None:
        """End a process."""

    def copies(self, handle: EpisodeHandle, count: int) -> list[EpisodeHandle]:
        """Return handles of copies of a process, which is to be asked for them next."""

    def adopt(self, copies: Sequence[EpisodeHandle], pids: Sequence[int]) -> None:
        """Say which processes the copies are; without ids there are none."""


@dataclass(frozen=True, slots=True, eq=False)
class CopiedProcess:
    """A process in the state of another one; see `agentrl.env.session.Snapshot`."""

    pool: Processes
    handle: EpisodeHandle

    def discard(self) -> None:
        """End it."""
        self.pool.kill(self.handle)


class ProcessSession:
    """One episode; made for `reset`, stepped, and closed whatever happened."""

    def __init__(self, pool: Processes, agent: AgentSpec, limits: EnvLimits, agents: Sequence[str]) -> None:
        self._pool, self._limits, self._agents = pool, limits, agents
        self._env = f"{Path(agent.source).name}: {agent.name}"
        self._handle: EpisodeHandle | None = None
        self._interrupted = False
        self._spans: tuple[Span, ...] = ()

    async def reset(self, task: Task, seed: int) -> ResetResult:
        """As `EnvSession.reset`."""
        where = f"{self._env}.reset"
        body = wire.pack_reset(task, seed, where)
        self._handle = await self._pool.acquire()
        answer = await self._call(where, body, self._limits.reset_timeout_s)
        return wire.decode_result(ResetResult, answer, where, lambda result: check_reset(result, where, task.prompt, self._agents))

    async def step(self, state: StepState) -> StepResult:
        """As `EnvSession.step`."""
        where = f"{self._env}.step"
        answer = await self._call(where, wire.pack_step(state), self._limits.step_timeout_s)
        return wire.decode_result(StepResult, answer, where, lambda result: check_step(result, where, self._agents))

    async def snapshot(self, count: int) -> list[Snapshot]:
        """Copy the process as often as is asked for; `EnvError` if a copy would differ from it."""
        where = f"{self._env}.snapshot"
        if self._handle is None:
            raise EnvError(f"{where}: its process has ended")
        copies = self._pool.copies(self._handle, count)
        pids: list[int] = []
        try:
            answer = await self._call(where, pickle.dumps(("copy", count)), self._limits.step_timeout_s)
            pids = wire.pids_of(answer, count, where)
        finally:
            # Also after a failure: as long as it expects copies, the fork server kills no child that it does not know.
            self._pool.adopt(copies, pids)
        return [CopiedProcess(self._pool, handle) for handle in copies]

    async def restore(self, snapshot: Snapshot, task: Task) -> None:
        """Go on in a copy of another session's process."""
        assert isinstance(snapshot, CopiedProcess)
        self._handle = snapshot.handle

    def take_spans(self) -> tuple[Span, ...]:
        """As `EnvSession.take_spans`."""
        spans, self._spans = self._spans, ()
        return spans

    async def close(self) -> None:
        """As `EnvSession.close`; then the process ends, is killed if it does not, or waits for another episode."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        reusable = clean = False
        try:
            # A call that was cancelled may take its own grace first, before the process comes to `close`.
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
                self._pool.give_back(handle, reusable=reusable)
            else:
                self._pool.kill(handle)

    async def _call(self, where: str, body: bytes, timeout_s: float) -> dict[str, Any]:
        """Return the answer to a call, which may be an error, and keep the times in it."""
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
            # Otherwise the process goes on with the call, for whose end `close` waits.
            handle.send(pickle.dumps(("cancel",)))
            raise
        if answer is None:
            reason = await handle.reason()
            self._kill()
            raise EnvError(f"{where}: {reason}")
        data = wire.decode(answer, where)
        self._spans = wire.spans_of(data)
        return data

    def _kill(self) -> None:
        if self._handle is not None:
            self._pool.kill(self._handle)
            self._handle = None
