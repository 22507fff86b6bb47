"""An engine in an actor of its own, shared by the rollout workers of several other actors; see `agentrl.rollout.front_ends`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from agentrl.cluster.build import build_engine
from agentrl.cluster.joining import Site
from agentrl.cluster.processes import ClusterPlan
from agentrl.cluster.ray_actors import DIAGNOSIS, RayWorker, RolloutActor, beside, missing_here, stored, unwrapped
from agentrl.core.errors import ClusterError, EngineDeadError, RolloutWorkerDeadError
from agentrl.core.process import describe_process
from agentrl.core.protocols import EngineLimits, EngineStats, GroupRef, Memory, RolloutWorker, WeightUpdate
from agentrl.core.scoring import Scorer
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest
from agentrl.engine.shared import Answers, EngineHost, Requests, SharedEngine
from agentrl.env.agent_spec import AgentSpec
from agentrl.rollout.front_ends import FrontEnds

PLACED_WITHIN_S = 120.0
STARTED_WITHIN_S = 600.0


class EngineActor:
    """Holds one engine; its asynchronous methods run side by side on the actor's event loop."""

    def __init__(self, plan: ClusterPlan, index: int, site: Site) -> None:
        self._host = EngineHost(build_engine(site.settled(plan).engine.at(index)))
        self._loops: list[asyncio.AbstractEventLoop] = []

    @beside
    async def diagnose(self) -> str:
        """Return the stacks of threads and requests."""
        return describe_process(self._loops)

    async def missing(self, paths: Sequence[str]) -> tuple[str, list[str]]:
        """Return the address of this machine, and those of the paths that it does not have."""
        return missing_here(paths)

    async def start(self) -> EngineLimits:
        """Load the engine."""
        self._loops[:] = [asyncio.get_running_loop()]
        return await self._host.start()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call another method of the engine's host; a reference among the arguments has arrived as what it stands for."""
        return await getattr(self._host, method)(*arguments)


class ActorLine:
    """The way to an `EngineActor`; see `agentrl.engine.shared.EngineLine`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def start(self) -> EngineLimits:
        """As `EngineLine.start`."""
        facts: EngineLimits = await _of_engine(self.actor.start.remote())
        return facts

    async def submit(self, client: str, requests: Requests) -> None:
        """As `EngineLine.submit`."""
        await _of_engine(self.actor.call.remote("submit", client, requests))

    async def collect(self, client: str, wait_s: float) -> Answers:
        """As `EngineLine.collect`."""
        answers: Answers = await _of_engine(self.actor.call.remote("collect", client, wait_s))
        return answers

    async def leave(self, client: str) -> None:
        """As `EngineLine.leave`."""
        await _of_engine(self.actor.call.remote("leave", client))

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `EngineLine.load_weights`; a payload is written to the object store once, not for every engine."""
        return int(await _of_engine(self.actor.call.remote("load_weights", stored(update))))

    async def stats(self) -> EngineStats:
        """As `Engine.stats`, of this moment."""
        stats: EngineStats = await _of_engine(self.actor.call.remote("stats"))
        return stats

    async def close(self) -> None:
        """As `Engine.close`."""
        await _of_engine(self.actor.call.remote("close"))


class SharedProcess(ActorLine):
    """An `EngineActor` and the actors of its rollout workers; see `agentrl.rollout.front_ends.EngineProcess`.

    Args:
        actor: The engine.
        make: Makes the actor of a rollout worker from the engine and the worker's name.
    """

    def __init__(self, actor: Any, make: Callable[[Any, str], Any]) -> None:
        super().__init__(actor)
        self._make, self._numbers = make, itertools.count()
        self.workers: dict[str, RayWorker] = {}  # by name

    def spawn(self) -> RayWorker:
        """Return one more rollout worker, which is not started."""
        name = f"worker-{next(self._numbers)}"
        self.workers[name] = RayWorker(self._make(self.actor, name), lost=RolloutWorkerDeadError)
        return self.workers[name]

    async def release(self, worker: RolloutWorker) -> None:
        """As `EngineProcess.release`."""
        for name in [name for name, found in self.workers.items() if found is worker]:
            with contextlib.suppress(Exception):
                ray.kill(self.workers.pop(name).actor)
            await self.leave(name)

    async def respawn(self) -> RolloutWorker:
        """As `EngineProcess.respawn`."""
        worker = self.spawn()
        await placed(worker)
        async with asyncio.timeout(STARTED_WITHIN_S):
            await worker.start()
        return worker


async def placed(worker: RayWorker) -> None:
    """Wait until the actor of a rollout worker has a machine.

    Raises:
        ClusterError: If no machine has a free CPU for too long.
    """
    try:
        async with asyncio.timeout(PLACED_WITHIN_S):
            await worker.missing([])
    except TimeoutError:
        raise ClusterError(
            f"no machine of the cluster had a free CPU for a rollout worker within {PLACED_WITHIN_S:.0f} s. "
            "Lower --rollout-workers-per-engine, or add machines; they need no GPU."
        ) from None


class RaySharedEngine:
    """A `RolloutWorker` that is several: an actor with an engine, and `count` actors with episodes."""

    def __init__(self, actor: Any, make: Callable[[Any, str], Any], count: int, max_restarts: int) -> None:
        self.actor, self._process = actor, SharedProcess(actor, make)
        self._front_ends = FrontEnds(self._process, [self._process.spawn() for _ in range(count)], max_restarts)

    @property
    def episode_actors(self) -> dict[str, Any]:
        """The actors with episodes, by name."""
        return {name: worker.actor for name, worker in self._process.workers.items()}

    async def diagnose(self) -> str:
        """Return the stacks of the engine's process and of those with episodes that answer."""
        workers = dict(self._process.workers)
        told = [unwrapped(self.actor.diagnose.remote(), EngineDeadError, "an engine"), *(worker.diagnose() for worker in workers.values())]
        answers = await asyncio.gather(*told, return_exceptions=True)
        return "\n\n".join(f"= {name}\n{answer}" for name, answer in zip(["engine", *workers], answers, strict=True))

    async def blocked(self) -> str:
        """Return where user code blocks episodes; empty if it does not."""
        answers = await asyncio.gather(*(worker.blocked() for worker in self._process.workers.values()), return_exceptions=True)
        return next((answer for answer in answers if isinstance(answer, str) and answer), "")

    async def start(self) -> None:
        """As `RolloutWorker.start`."""
        await asyncio.gather(*map(placed, self._process.workers.values()))
        await self._front_ends.start()

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, GroupRef]:
        """As `RolloutWorker.run_group`."""
        return await self._front_ends.run_group(group_request)

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `RolloutWorker.load_weights`."""
        return await self._front_ends.load_weights(update)

    async def sleep(self, level: int) -> None:
        """As `RolloutWorker.sleep`."""
        await self._front_ends.sleep(level)

    async def wake(self, *parts: Memory) -> None:
        """As `RolloutWorker.wake`."""
        await self._front_ends.wake(*parts)

    async def stats(self) -> EngineStats:
        """As `RolloutWorker.stats`."""
        return await self._front_ends.stats()

    async def close(self) -> None:
        """As `RolloutWorker.close`."""
        await self._front_ends.close()

    def kill(self) -> None:
        """End all of its processes."""
        for actor in (*self.episode_actors.values(), self.actor):
            with contextlib.suppress(Exception):
                ray.kill(actor)


def shared_engine(
    plan: ClusterPlan,
    index: int,
    site: Any,
    agent: AgentSpec,
    scorers: Mapping[str, Scorer],
    options: Mapping[str, Any],
    anywhere: Mapping[str, Any],
) -> RaySharedEngine:
    """Return engine number `index` and its rollout workers, which have the reward models `scorers`.

    `options` are Ray's for the engine, which has a place of its own; with `anywhere` Ray finds places for the others, first on machines
    without GPUs.
    """
    front_end = ray.remote(concurrency_groups=DIAGNOSIS)(RolloutActor).options(**anywhere)

    def make(engine: Any, name: str) -> Any:
        return front_end.remote(plan, index, site, agent, scorers, SharedEngine(ActorLine(engine), name))

    actor = ray.remote(concurrency_groups=DIAGNOSIS)(EngineActor).options(**options).remote(plan, index, site)
    return RaySharedEngine(actor, make, plan.num_front_ends, plan.engine.engine.max_engine_restarts)


async def _of_engine(ref: Any) -> Any:
    return await unwrapped(ref, EngineDeadError, "an engine")
