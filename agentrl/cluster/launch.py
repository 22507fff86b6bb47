"""The choice between the two runtimes."""

from __future__ import annotations

from agentrl.cluster.runtime import Runtime, Stage
from agentrl.config.schema import TrainConfig


def make_runtime(config: TrainConfig, on_stage: Stage) -> Runtime:
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
