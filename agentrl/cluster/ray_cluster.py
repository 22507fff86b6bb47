"""A Ray cluster that a command starts for itself or joins, and the resources that it holds there.

A private cluster has no dashboard, keeps its files in a folder of its own that is removed at the end, and wants a
random token from whoever connects. All of it listens on loopback only. A `Reaper` ends it if the
driver dies without closing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.cluster.joining import FLAG, find_cluster, traveling_environment
from agentrl.cluster.placement import shortage
from agentrl.cluster.plan import RunConfig
from agentrl.cluster.ray_environment import set_environment
from agentrl.cluster.reaper import MARK, Reaper
from agentrl.core.errors import AgentRLError, ClusterError, ConfigError
from agentrl.core.process import LOOPBACK, num_gpus
from agentrl.env.isolation.leftovers import end_processes, orphans

PLACEMENT_TIMEOUT_S = 120.0
PLACING_S = 10.0
"""Seconds that Ray has to place actors where there is room."""
CONNECT_TIMEOUT_S = 25.0  # ray.init takes seconds and cannot be interrupted


class RayCluster:
    """A cluster, private unless `run` names one to join.

    Args:
        run: Section with the address to join, and how long its machines may take to come.
        environment: Environment variables of actors.

    Attributes:
        places: Placement group of each bundle that is held, and its number there.
    """

    def __init__(self, run: RunConfig, environment: Mapping[str, str]) -> None:
        self.run, self.private, self._environment = run, not run.ray_address, dict(environment)
        self.places: dict[int, tuple[Any, int]] = {}
        self._folder: str | None = None
        self._owns_connection = False  # a cluster that the user's own code is connected to is not ours to leave
        self._connecting: asyncio.Future[None] | None = None
        self._reaper: Reaper | None = None

    async def connect(self, actors: int) -> None:
        """Start the cluster with room for so many actors, or join it.

        Raises:
            ConfigError: If nobody answers at the address.
            ClusterError: If Ray does not start.
        """
        address = "" if self.private else await find_cluster(self.run.ray_address)
        self._connecting = asyncio.ensure_future(asyncio.to_thread(self._connect, address, actors))
        # A thread cannot be cancelled: `connected` waits for what it has begun to start.
        await asyncio.shield(self._connecting)

    def _connect(self, address: str, actors: int) -> None:
        set_environment(address)
        # Only here: `set_environment` refuses to go on where the user's own code is connected, and that connection stays.
        self._owns_connection = True
        import ray

        common: dict[str, Any] = {"logging_level": "INFO" if self.run.debug else "ERROR", "log_to_driver": self.run.debug}
        if not self.private:
            try:
                ray.init(address=address, **common)
            except Exception as error:  # of many types; most often no raylet runs on this machine
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise ConfigError(
                    FLAG, address, f"joining failed: {said}", "Start a raylet here: ray start --address HOST:PORT."
                ) from error
            return
        self._folder = tempfile.mkdtemp(prefix="agentrl-")
        self._reaper = Reaper(self._folder)
        from ray._private import services

        # A session of their own: `timeout` and a closed terminal send signals to the whole group, and the run still needs its cluster.
        services.ConsolePopen = partial(services.ConsolePopen, start_new_session=True)
        try:
            ray.init(
                # Every actor asks for a CPU, and a small machine may have fewer.
                num_cpus=max(os.cpu_count() or 1, actors),
                num_gpus=num_gpus(self.run.device),
                include_dashboard=False,
                _node_ip_address=LOOPBACK,
                _temp_dir=self._folder,
                runtime_env={"env_vars": self._environment},
                **common,
            )
        except Exception as error:  # Ray raises a plain Exception after 30 s, which cannot be changed
            if "timed out during startup" not in str(error):
                raise
            problem = "Ray did not start within 30 s, most likely because the machine is too busy"
            raise ClusterError(f"{problem}; end other programs and try again, or use --runtime local") from error

    async def reserve(self, bundles: Sequence[int], wanted: Sequence[Mapping[str, float]], timeout_s: float | None = None) -> None:
        """Hold the resources of some bundles, on as few machines as possible.

        Raises:
            ClusterError: If there is no room in time.
            ConfigError: If the cluster has no GPU.
        """
        import ray

        timeout_s = timeout_s or (PLACEMENT_TIMEOUT_S if self.private else PLACING_S + self.run.cluster_timeout_s)
        group = ray.util.placement_group([dict(bundle) for bundle in wanted], strategy="PACK")
        self.places.update({bundle: (group, position) for position, bundle in enumerate(bundles)})
        try:
            async with asyncio.timeout(timeout_s):
                await group.ready()
        except TimeoutError:
            raise self._no_room(wanted, timeout_s) from None

    def _no_room(self, wanted: Sequence[Mapping[str, float]], timeout_s: float) -> AgentRLError:
        import ray
        from ray._private.state import available_resources_per_node

        machines, address = [node["Resources"] for node in ray.nodes() if node["Alive"]], self.run.ray_address
        if address and any("GPU" in bundle for bundle in wanted) and not any(machine.get("GPU") for machine in machines):
            problem = f"the cluster at {address} had no GPU within {timeout_s:.0f} s"
            remedy = "Add --device cpu to run on CPUs, or give its machines more time to join with --cluster-timeout-s."
            return ConfigError("--device", self.run.device, problem, remedy)
        reason = shortage(wanted, machines, list(available_resources_per_node().values()))
        return ClusterError(
            f"the cluster has no room within {timeout_s:.0f} s: {reason}. Ask for fewer engines or learner ranks or for narrower ones, or "
            "add machines; those that are still to join have the time of --cluster-timeout-s."
        )

    def nodes(self) -> dict[int, str]:
        """Return Ray's name of the machine of each bundle."""
        import ray

        table = ray.util.placement_group_table
        return {bundle: table(group)["bundles_to_node_id"][position] for bundle, (group, position) in self.places.items()}

    def options(self, bundle: int, gpus: float, **more: Any) -> dict[str, Any]:
        """Return the options of an actor in a bundle; outside of any if it is not held."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if bundle not in self.places:  # an engine that joined a private cluster without GPUs
            # Without a CPU, because the cluster may have no more than the first actors hold.
            return {"num_cpus": 0.0, "max_restarts": 0, **more}
        group, position = self.places[bundle]
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=position)
        if not self.private:  # a private cluster's processes have them from its start
            more["runtime_env"] = {"env_vars": traveling_environment(self._environment)}
        # Never restarted by Ray: a new engine must load the live weights before it gets a group (`Supervision`).
        return {"num_cpus": 1.0, "num_gpus": gpus, "scheduling_strategy": where, "max_restarts": 0, **more}

    def ranks(self, bundles: Sequence[int], gpus: float, make: Callable[..., Any], arguments: Callable[[int], Sequence[Any]]) -> Any:
        """Return a handle for learner ranks, one in each bundle; see `agentrl.cluster.ray_actors.LearnerActor`.

        `arguments` returns what a rank of a number is made of, in which references arrive as what they stand for.
        """
        import ray

        from agentrl.cluster.ray_actors import WITH_FILES, LearnerActor, RayLearner

        rank, nodes = ray.remote(concurrency_groups=WITH_FILES)(LearnerActor), self.nodes()
        actors = [rank.options(**self.options(bundle, gpus)).remote(make, *arguments(index)) for index, bundle in enumerate(bundles)]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return RayLearner(actors, [addresses.get(nodes[bundle], nodes[bundle]) for bundle in bundles])

    async def connected(self) -> bool:
        """Wait for a connection that is under way; return True if there is one that is ours to end."""
        if self._connecting is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await asyncio.shield(self._connecting)
        ray = sys.modules.get("ray")
        if ray is not None and self._owns_connection and ray.is_initialized():
            return True
        self._remove_folder()
        return False

    def stop(self, actors: Iterable[Any]) -> None:
        """End actors, give back what is held, and leave the cluster; a private one ends."""
        import ray

        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        for group in {id(group): group for group, _ in self.places.values()}.values():
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(group)
        self.places = {}
        ray.shutdown()
        if mark := os.environ.get(MARK):
            end_processes(orphans(f"{MARK}={mark}"))
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._reaper is not None:
            self._reaper.release()
            self._reaper = None
