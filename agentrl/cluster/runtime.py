"""The interface of a runtime."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

from agentrl.cluster.build import Stage
from agentrl.config.evaluate import PlayConfig
from agentrl.core.protocols import Learner, RolloutWorker
from agentrl.rollout.pool import Supervision


class Runtime(Protocol):
    """Started engines and learner, and whatever keeps them alive."""

    @property
    def workers(self) -> Sequence[RolloutWorker]:
        """One handle per engine."""
        ...

    @property
    def learner(self) -> Learner:
        """One handle for all learner ranks."""
        ...

    @property
    def supervision(self) -> Supervision | None:
        """Replacement of lost workers; `None` if they cannot be replaced."""
        ...

    async def start(self) -> None:
        """Start everything; on return engines generate and the learner trains.

        Raises:
            ClusterError: If a process cannot be placed or dies.
            ConfigError: If a setting cannot work here.
        """

    def diagnose(self) -> Mapping[str, Awaitable[str]]:
        """Ask every process but this one what its threads and tasks are doing; see `agentrl.core.process`."""
        ...

    async def close(self) -> None:
        """End everything that was started; safe to call twice and after a failed start."""


def make_runtime(config: PlayConfig, on_stage: Stage) -> Runtime:
    """The runtime that ``--runtime`` names; nothing is started yet.

    Args:
        config: The resolved configuration.
        on_stage: Told what start-up is doing, for the display.
    """
    if config.run.runtime == "local":
        from agentrl.cluster.local_runtime import LocalRuntime

        return LocalRuntime(config, on_stage)
    from agentrl.cluster.ray_runtime import RayRuntime

    return RayRuntime(config, on_stage)
