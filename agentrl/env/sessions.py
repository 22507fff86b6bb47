"""Where the environments of a rollout worker's episodes come from: this process, or processes of their own."""

from __future__ import annotations

from typing import Protocol

from agentrl.env.boundary import EnvLimits, EnvSession, Session, Threads
from agentrl.env.isolation.pool import ProcessPool
from agentrl.env.load import AgentSpec, preload


class Sessions(Protocol):
    """Makes the environment of each episode; started before the first and closed after the last."""

    async def start(self) -> None:
        """Load the user's class where it will run.

        Raises:
            EnvLoadError: If it cannot be loaded there.
        """

    def session(self) -> Session:
        """The environment of one episode."""

    async def close(self) -> None:
        """Release what the episodes shared; safe to call twice."""


class LocalSessions:
    """Environments in this process; plain ``def`` methods on threads.

    Args:
        agent: Where the user's class is.
        limits: Deadlines and threads.
    """

    def __init__(self, agent: AgentSpec, limits: EnvLimits) -> None:
        self._agent, self._limits = agent, limits
        self._threads = Threads(limits.threads)

    async def start(self) -> None:
        """As `Sessions.start`."""
        preload(self._agent)

    def session(self) -> Session:
        """As `Sessions.session`."""
        return EnvSession(self._agent.load(), self._agent.source, self._threads, self._limits)

    async def close(self) -> None:
        """As `Sessions.close`."""
        self._threads.close()


def open_sessions(agent: AgentSpec, limits: EnvLimits) -> Sessions:
    """Environments in processes of their own if `limits` say what such a process may use, else in this one."""
    return LocalSessions(agent, limits) if limits.process is None else ProcessPool(agent, limits)
