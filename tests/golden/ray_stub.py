"""Ray without processes: actors are objects of this process, and what Ray was asked for is recorded."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from agentrl.core.errors import ConfigError
from agentrl.core.process import LOOPBACK
from tests.golden.machines import Cluster, Machine
from tests.golden.recording import Recording
from tests.golden.standins import Nothing

JOINED = "10.0.0.1"
"""Address of the first machine of a cluster of others."""


class StubCluster:
    """A cluster: its machines, and the bundles that were reserved on them."""

    def __init__(self, machine: Machine, recording: Recording) -> None:
        self._machine, self.recording = machine, recording
        self._joined: Cluster | None = None
        self._nodes: list[dict[str, float]] = []
        self._left: list[dict[str, float]] = []
        self._groups: list[Group] = []
        self.connected = False
        self.ranks = 0

    def init(self, **options: Any) -> None:
        """As `ray.init`."""
        self.recording.add("ray.init", options)
        self.connected, self._joined = True, self._machine.cluster if options.get("address") else None
        if self._joined is None:
            self._nodes = [{"CPU": float(options["num_cpus"]), "GPU": float(options["num_gpus"])}]
        else:
            self._nodes = [{"CPU": float(self._joined.cpus), "GPU": float(self._joined.gpus)} for _ in range(self._joined.machines)]
        self._left = [dict(node) for node in self._nodes]

    def shutdown(self) -> None:
        """As `ray.shutdown`."""
        self.connected = False

    def nodes(self) -> list[dict[str, Any]]:
        """As `ray.nodes`."""
        return [
            {"NodeID": f"node-{index}", "NodeManagerAddress": self.address(index), "Alive": True, "Resources": resources}
            for index, resources in enumerate(self._nodes)
        ]

    def address(self, node: int = 0) -> str:
        """Return the address of a machine."""
        return LOOPBACK if self._joined is None else f"10.0.0.{node + 1}"

    def cluster_resources(self) -> dict[str, float]:
        """As `ray.cluster_resources`."""
        return {name: sum(node[name] for node in self._nodes) for name in ("CPU", "GPU")}

    def available(self) -> dict[str, dict[str, float]]:
        """Return the resources that are free on each machine."""
        return {f"node-{index}": left for index, left in enumerate(self._left)}

    def placement_group(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> Group:
        """As `ray.util.placement_group`; bundles fill one machine after the other."""
        self.recording.add("ray.group", {"bundles": list(bundles), "strategy": strategy})
        group = Group(len(self._groups), [self._place(bundle) for bundle in bundles])
        self._groups.append(group)
        return group

    def _place(self, bundle: Mapping[str, float]) -> int:
        fits = [index for index, left in enumerate(self._left) if all(left.get(name, 0.0) >= size for name, size in bundle.items())]
        node = fits[0] if fits else -1
        if fits:
            for name, size in bundle.items():
                self._left[node][name] = self._left[node].get(name, 0.0) - size
        return node

    def remote(self, kind: type[Any] | None = None, **options: Any) -> Any:
        """As `ray.remote`, with a class or as a decorator."""
        return Actor(self, kind, {}) if kind is not None else lambda decorated: Actor(self, decorated, options)


class Group:
    """A placement group; one without room for a bundle is never ready."""

    def __init__(self, number: int, nodes: Sequence[int]) -> None:
        self.number, self.nodes = number, nodes

    async def ready(self) -> None:
        """Return at once where there is room."""
        if any(node < 0 for node in self.nodes):
            raise TimeoutError

    def table(self) -> dict[str, Any]:
        """As `ray.util.placement_group_table`."""
        return {"bundles_to_node_id": {index: f"node-{node}" for index, node in enumerate(self.nodes)}}


class Actor:
    """A class whose objects are actors."""

    def __init__(self, cluster: StubCluster, kind: type[Any], options: Mapping[str, Any]) -> None:
        self._cluster, self._kind, self._options = cluster, kind, options

    def options(self, **options: Any) -> Actor:
        """As Ray's."""
        return Actor(self._cluster, self._kind, {**self._options, **options})

    def remote(self, *arguments: Any, **named: Any) -> Handle:
        """Make the object."""
        options = dict(self._options)
        if (where := options.pop("scheduling_strategy", None)) is not None:
            options["place"] = [where.placement_group.number, where.placement_group_bundle_index]
        self._cluster.recording.add(f"actor.{self._kind.__name__}", options)
        number = self._cluster.ranks
        self._cluster.ranks += self._kind.__name__ == "LearnerActor"
        return Handle(self._kind(*arguments, **named), number)


class Handle:
    """An actor, whose methods are called at once."""

    def __init__(self, held: Any, number: int) -> None:
        self._held, self._number = held, number

    def __getattr__(self, name: str) -> Method:
        if name.startswith("__"):
            raise AttributeError(name)
        return Method(self._held, name, self._number)


class Method:
    """A method of an actor."""

    def __init__(self, held: Any, name: str, number: int, num_returns: int = 1) -> None:
        self._held, self._name, self._number, self._num_returns = held, name, number, num_returns

    def options(self, *, num_returns: int = 1) -> Method:
        """As Ray's."""
        return Method(self._held, self._name, self._number, num_returns)

    def remote(self, *arguments: Any) -> Any:
        """Call it; the answer can be awaited."""
        if self._name in ("gpus", "address"):
            return _answered(str(self._number) if self._name == "gpus" else (JOINED, 0))
        answer = getattr(self._held, self._name)(*arguments)
        answer = asyncio.ensure_future(answer) if inspect.isawaitable(answer) else _answered(answer)
        return answer if self._num_returns == 1 else (asyncio.ensure_future(_first(answer)), "a reference to a group")


async def _first(answer: Any) -> Any:
    return (await answer)[0]


def _answered(value: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


@contextmanager
def stubbed_ray(machine: Machine, recording: Recording) -> Iterator[None]:
    """Have Ray's functions answered by a `StubCluster` within the block."""
    from ray._private import services

    from agentrl.cluster import ray_actors

    cluster = StubCluster(machine, recording)

    async def find(address: str) -> str:
        if machine.cluster is None:
            raise ConfigError("--ray-address", address, "nobody listens there", "The simulated machine has no cluster.")
        return f"{JOINED}:6379"

    own = {
        "ray": {
            "init": cluster.init,
            "shutdown": cluster.shutdown,
            "remote": cluster.remote,
            "nodes": cluster.nodes,
            "cluster_resources": cluster.cluster_resources,
            "put": lambda value: value,
            "kill": lambda actor: None,
            "is_initialized": lambda: cluster.connected,
        },
        "ray.util": {
            "placement_group": cluster.placement_group,
            "placement_group_table": Group.table,
            "remove_placement_group": lambda group: None,
            "get_node_ip_address": cluster.address,
        },
        "ray._private.state": {"available_resources_per_node": cluster.available},
        "agentrl.cluster.ray_environment": {"_read_again": lambda address: None},
        "agentrl.cluster.ray_cluster": {"find_cluster": find, "Reaper": Nothing},
    }
    with ExitStack() as stack:
        for module, functions in own.items():
            for name, function in functions.items():
                stack.enter_context(patch(f"{module}.{name}", function))
        stack.enter_context(patch.object(services, "ConsolePopen", services.ConsolePopen))
        stack.enter_context(patch.object(ray_actors, "_last", []))
        yield
