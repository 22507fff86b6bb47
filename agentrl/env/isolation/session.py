"""One episode's environment in a process of its own: the same calls, results and errors as `EnvSession`."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from agentrl.core.errors import EnvError, EnvTimeoutError
from agentrl.core.types import Task
from agentrl.env.agent import ResetResult, StepResult, StepState
from agentrl.env.boundary import CANCEL_GRACE_S, EnvLimits
from agentrl.env.isolation import wire
from agentrl.env.isolation.link import EpisodeHandle
from agentrl.env.load import AgentSpec

_log = logging.getLogger(__name__)

GRACE_S = 0.5
"""The process gives a call up by itself at its deadline, which lets `close` run; if it does not answer then, it is killed."""
REASON_S = 1.0


class Processes(Protocol):
    """Where processes come from; `agentrl.env.isolation.pool.ProcessPool` says what each method does."""

    async def acquire(self) -> EpisodeHandle:
        """A process that waits for an episode."""

    def give_back(self, handle: EpisodeHandle, *, reusable: bool) -> None:
        """Take back a process whose episode has been closed."""

    def kill(self, handle: EpisodeHandle) -> None:
        """Take back a process by killing it and everything it started."""


class ProcessSession:
    """One episode; made for `reset`, stepped, and closed whatever happened.

    Args:
        processes: Where its process comes from.
        agent: The user's class, for messages.
        limits: Deadlines.
        agents: Names that the class gives to its agents.
    """

    def __init__(self, processes: Processes, agent: AgentSpec, limits: EnvLimits, agents: Sequence[str]) -> None:
        self._processes, self._limits, self._agents = processes, limits, agents
        self._env = f"{Path(agent.source).name}: {agent.name}"
        self._handle: EpisodeHandle | None = None
        self._interrupted = False

    async def reset(self, task: Task, seed: int) -> ResetResult:
        """As `EnvSession.reset`."""
        where = f"{self._env}.reset"
        body = wire.pack_reset(task, seed, where)
        self._handle = await self._processes.acquire()
        answer = await self._call(where, body, self._limits.reset_timeout_s)
        return wire.decode_reset(answer, where, task.prompt, self._agents)

    async def step(self, state: StepState) -> StepResult:
        """As `EnvSession.step`."""
        where = f"{self._env}.step"
        return wire.decode_step(await self._call(where, wire.pack_step(state), self._limits.step_timeout_s), where, self._agents)

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
                data = wire.decode(answer, f"{self._env}.close")
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
