"""Engines and learner ranks as Ray actors, on a private cluster or one that exists."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from math import ceil
from typing import Any

from agentrl.cluster.build import Stage, actor_environment, build_learner_rank
from agentrl.cluster.joining import Site, check_paths, pack
from agentrl.cluster.placement import Placement, free_places, place
from agentrl.cluster.processes import ClusterPlan
from agentrl.cluster.ray_cluster import RayCluster
from agentrl.core.errors import ClusterError
from agentrl.core.process import num_gpus
from agentrl.core.protocols import Learner, RolloutWorker
from agentrl.flow.worker_slots import Supervision
from agentrl.suites.load import load_agent
from agentrl.weights.plan import PUBLISH_TIMEOUT_S


def _joined(index: int) -> int:
    """Return the number of the bundle of an engine that joined later; those of the first engines and ranks are not negative."""
    return -1 - index


CLOSE_TIMEOUT_S = 10.0
MAX_SCORER_RESTARTS = 3
RESPAWN_TIMEOUT_S = 600.0  # a large model takes minutes to load


class RayRuntime:
    """Starts the cluster and the actors, hands out their handles, and takes everything down again; no learner with 0 ranks."""

    def __init__(self, plan: ClusterPlan, on_stage: Stage) -> None:
        self._plan, self._on_stage = plan, on_stage
        self._cluster = RayCluster(plan.run, actor_environment(plan))
        self._private = self._cluster.private
        self._site: Any = None  # what every actor is told of the cluster
        self._placement: Placement | None = None
        self._sent = plan  # what actors are given
        self._workers: dict[int, Any] = {}  # by the number of the engine
        self._learner: Any = None
        self._shared_gpus: dict[int, str] = {}  # by the number of the engine, with --colocate
        self._scorers: dict[str, Any] = {}  # reward models by name

    @property
    def workers(self) -> Sequence[RolloutWorker]:
        """One handle per engine that generates for training."""
        return [worker for index, worker in self._workers.items() if not self._is_apart(index)]

    @property
    def evaluators(self) -> Sequence[RolloutWorker]:
        """One handle per engine of ``--eval-engines``."""
        return [worker for index, worker in self._workers.items() if self._is_apart(index)]

    @property
    def learner(self) -> Learner:
        """One handle for all learner ranks."""
        learner: Learner = self._learner
        return learner

    @property
    def joint(self) -> bool:
        """True over NCCL and CUDA IPC."""
        return self._plan.joint

    @property
    def supervision(self) -> Supervision:
        """Lost engines are replaced, however weights reach them."""
        engine = self._plan.engine.engine
        return Supervision(
            respawn=self._respawn,
            retire=self._retire,
            room=self._room,
            find_block=self._find_block,
            max_restarts=engine.max_engine_restarts,
            stuck_s=engine.engine_timeout_s,
            # Members meet, then weights move; each has the deadline to itself.
            load_timeout_s=2.2 * PUBLISH_TIMEOUT_S,
        )

    async def start(self) -> None:
        """Start Ray, place the actors, load models; engines and learner load side by side."""
        self._on_stage("starting Ray" if self._private else f"joining Ray at {self._plan.run.ray_address}")
        beside = self._plan.num_front_ends
        per_engine = 1 + (beside if beside > 1 else 0)
        await self._cluster.connect(self._plan.num_engines * per_engine + self._plan.num_ranks + len(self._plan.judges))
        self._choose_front_ends()
        gpus = self._gpus()
        placement = place(self._plan, gpus=gpus)
        if not self._private:
            self._on_stage("waiting for room in the cluster")
        for bundles in placement.parts():
            await self._cluster.reserve(bundles, [placement.bundles[bundle] for bundle in bundles])
        self._create_actors(placement)
        parts = [*([self._learner] if self._learner else []), *self._workers.values(), *self._scorers.values()]
        if not self._private:
            self._on_stage("looking whether every machine sees the same folders")
            workers = {f"engine-{index}": worker.actor for index, worker in self._workers.items()}
            front_ends = {f"engine-{i} {name}": actor for i, each in self._workers.items() for name, actor in each.episode_actors.items()}
            ranks = {f"learner-{rank}": actor for rank, actor in enumerate(self._learner.actors)} if self._learner else {}
            await check_paths(self._sent, self._plan.run_dir, workers, ranks, front_ends)
        self._on_stage("loading engine and learner" if self._learner else "loading engine")
        if not (self._learner and self._plan.weights.colocate):
            await asyncio.gather(*(part.start() for part in parts))
            return
        await self._learner.start()  # first, because vLLM measures what it leaves
        if self._plan.weights.sleeps:
            await self._learner.offload(keep_weights=False)
        await self._show_gpus()
        await asyncio.gather(*(worker.start() for worker in self._workers.values()))

    async def _show_gpus(self) -> None:
        """Tell engines the GPUs of the learner ranks that they share them with."""
        if self._plan.device == "cuda":
            held = await asyncio.gather(*(actor.gpus.remote() for actor in self._learner.actors))
            size = self._plan.engine.engine.gpus_per_engine
            self._shared_gpus = {index: ",".join(held[index * size : (index + 1) * size]) for index in self._workers}
        for index, worker in self._workers.items():
            worker.gpus = self._shared_gpus.get(index, "")

    def diagnose(self) -> Mapping[str, Awaitable[str]]:
        """One request per actor."""
        learner = self._learner.diagnose() if self._learner else {}
        return {**{f"engine-{index}": worker.diagnose() for index, worker in self._workers.items()}, **learner}

    async def close(self) -> None:
        """Close the actors within a deadline, end them, and stop a private cluster, also one that is only just starting."""
        if not await self._cluster.connected():
            return
        closing = [worker.close() for worker in self._workers.values()] + ([self._learner.close()] if self._learner else [])
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*closing, return_exceptions=True)
        await asyncio.to_thread(self._stop)
        self._workers, self._learner, self._scorers = {}, None, {}

    def _choose_front_ends(self) -> None:
        import ray

        self._plan = self._plan.placed(int(ray.cluster_resources().get("CPU", 0.0)))
        if (front_ends := self._plan.num_front_ends) > 1:
            self._on_stage(f"{front_ends} rollout workers for each engine")

    def _gpus(self) -> int:
        """Return the GPUs to plan with: those of this machine, or as many as a joined cluster is asked for, since its machines may come."""
        return num_gpus(self._plan.run.device) if self._private else ceil(self._plan.needed_gpus) * (self._plan.device != "cpu")

    def _create_actors(self, placement: Placement) -> None:
        import ray

        plan, site = (self._plan, Site()) if self._private else pack(self._plan)
        self._sent, self._site = plan, ray.put(site)
        self._placement = placement = placement.by_node(self._cluster.nodes())
        self._scorers = self._create_scorers(placement)
        self._workers = {index: self._create_worker(placement, index) for index in range(len(placement.engine_bundles))}
        if bundles := placement.learner_bundles:
            self._learner = self._cluster.ranks(bundles, placement.gpus_per_rank, rank_on, lambda index: (plan, index, self._site))

    def _create_scorers(self, placement: Placement) -> dict[str, Any]:
        """Each reward model with its processes; they hold no state, so Ray starts a lost one again, and repeats what it was asked."""
        import ray

        from agentrl.cluster.reward_actors import RayScorer, RewardActor

        reward, share = self._plan.episodes.reward, placement.gpus_per_scorer
        again, made = {"max_restarts": MAX_SCORER_RESTARTS, "max_task_retries": MAX_SCORER_RESTARTS}, ray.remote(RewardActor)
        actors = [
            made.options(**{**self._cluster.options(bundle, share), **again}).remote(self._sent, index, self._site)
            for index, bundle in enumerate(placement.scorer_bundles)
        ]
        return {name: RayScorer(actor) for name, actor in zip(reward.names, actors, strict=True)}

    def _create_worker(self, placement: Placement, index: int) -> Any:
        import ray

        from agentrl.cluster.engine_actors import shared_engine
        from agentrl.cluster.ray_actors import DIAGNOSIS, RayWorker, RolloutActor

        bundle = placement.engine_bundles[index] if index < len(placement.engine_bundles) else _joined(index)
        # Each group under way is a call, of which Ray lets an asynchronous actor have 1,000 by default.
        options = self._cluster.options(bundle, placement.gpus_per_engine, max_concurrency=4096)
        if self._plan.num_front_ends > 1:
            anywhere = {name: value for name, value in options.items() if name not in ("scheduling_strategy", "num_gpus")}
            agent = load_agent(self._plan.run.agent)
            return shared_engine(self._sent, index, self._site, agent, self._scorers, options, anywhere)
        actor = ray.remote(concurrency_groups=DIAGNOSIS)(RolloutActor).options(**options)
        made = actor.remote(self._sent, index, self._site, load_agent(self._plan.run.agent), self._scorers)
        return RayWorker(made, self._shared_gpus.get(index, ""))

    def _is_apart(self, index: int) -> bool:
        return self._plan.engine.engine.num_engines <= index < self._plan.num_engines

    async def _find_block(self, name: str) -> str:
        """Return where user code blocks a worker."""
        blocked: str = await self._workers[int(name.rpartition("-")[2])].blocked()
        return blocked

    async def _respawn(self, name: str) -> RolloutWorker:
        """End what is left of a worker and start another in its bundle; one that joins gets a bundle first, as soon as there is room."""
        index, placement = int(name.rpartition("-")[2]), self._placement
        if placement is None:
            raise ClusterError(f"{name} cannot be started: the cluster was not")
        if index in self._workers:
            with contextlib.suppress(Exception):
                self._workers[index].kill()
        elif not self._private or placement.gpus_per_engine:
            await self._cluster.reserve([_joined(index)], [placement.bundles[placement.engine_bundles[0]]], RESPAWN_TIMEOUT_S)
        worker: Any = self._create_worker(placement, index)
        self._workers[index] = worker
        async with asyncio.timeout(RESPAWN_TIMEOUT_S):
            await worker.start()
        replacement: RolloutWorker = worker
        return replacement

    def _room(self) -> int | None:
        """Return how many more engines have room now; `None` where they ask for nothing."""
        placement = self._placement
        if placement is None or (self._private and not placement.gpus_per_engine):
            return None
        from ray._private.state import available_resources_per_node

        return free_places(placement.bundles[placement.engine_bundles[0]], available_resources_per_node().values())

    async def _retire(self, name: str) -> None:
        """End a worker that left; the resources of one that had joined are given back, those of the first ones stay with the run."""
        import ray

        index = int(name.rpartition("-")[2])
        worker = self._workers.pop(index, None)
        with contextlib.suppress(Exception):
            if worker is not None:
                worker.kill()
            if (place := self._cluster.places.pop(_joined(index), None)) is not None:
                ray.util.remove_placement_group(place[0])

    def _stop(self) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(Exception):
                worker.kill()
        others = [actor for scorer in self._scorers.values() for actor in scorer.actors]
        self._cluster.stop([*(self._learner.actors if self._learner else ()), *others])


def rank_on(plan: ClusterPlan, rank: int, site: Site, host: str) -> Any:
    """Return a learner rank on the machine with the address `host`."""
    return build_learner_rank(site.settled(plan), rank, host)
