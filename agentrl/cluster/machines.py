"""Every machine of a cluster that others started, to look at each and to have them talk to each other; nothing is reserved there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.cluster.joining import FLAG, find_cluster
from agentrl.cluster.ray_environment import set_environment
from agentrl.core.errors import ClusterError, ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines of a joined cluster, by the addresses of their raylets."""

    nodes: Mapping[str, str]  # address -> Ray's name of the node

    @property
    def hosts(self) -> Sequence[str]:
        """Addresses of the machines."""
        return list(self.nodes)

    async def call(self, host: str, work: Callable[..., T], *arguments: Any, timeout_s: float) -> T:
        """Call a function of agentrl on a machine, in a process that asks for no CPU and sees all GPUs.

        Raises:
            ClusterError: If there is no answer in time, or the machine cannot run it.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        placed = NodeAffinitySchedulingStrategy(self.nodes[host], soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": placed}
        # Ray would hide every GPU from a process that asks for none.
        options["runtime_env"] = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
        answer = ray.remote(**options)(_call).remote(work, arguments)
        try:
            async with asyncio.timeout(timeout_s):
                result: T = await answer
                return result
        except TimeoutError:
            ray.cancel(answer, force=True)
            raise ClusterError(
                f"the machine at {host} gave no answer within {timeout_s:.0f} s; look at `ray status`, and at its load"
            ) from None
        except ray.exceptions.RayError as error:
            said = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise ClusterError(f"the machine at {host} cannot run it: {said}; agentrl has to be installed there as here") from error


def _call(work: Callable[..., T], arguments: Sequence[Any]) -> T:
    """Call what Ray would not take by itself, as functions of compiled modules."""
    return work(*arguments)


@contextlib.asynccontextmanager
async def machines_of(address: str) -> AsyncIterator[Machines]:
    """Join a cluster for the block.

    Raises:
        ConfigError: If nobody answers at the address, or no raylet runs on this machine.
    """
    found = await find_cluster(address)
    set_environment(found)
    import ray

    try:
        await asyncio.to_thread(ray.init, address=found, logging_level="ERROR", log_to_driver=False)
    except Exception as error:  # of many types; most often no raylet runs on this machine
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(FLAG, address, f"joining failed: {said}", "Start a raylet here: ray start --address HOST:PORT.") from error
    try:
        yield Machines({node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]})
    finally:
        await asyncio.to_thread(ray.shutdown)
