"""Engines and learner ranks as Ray actors: a private cluster on loopback, or one that exists.

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
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

from agentrl.cluster.build import Stage, actor_environment
from agentrl.cluster.joining import FLAG, Site, check_paths, find_cluster, pack, traveling_environment
from agentrl.cluster.placement import Placement, free_places, place, shortage
from agentrl.cluster.processes import ClusterPlan
from agentrl.cluster.ray_environment import set_environment
from agentrl.cluster.reaper import MARK, Reaper
from agentrl.core.errors import AgentRLError, ClusterError, ConfigError
from agentrl.core.process import LOOPBACK, num_gpus
from agentrl.core.protocols import Learner, RolloutWorker
from agentrl.env.isolation.leftovers import end_processes, orphans
from agentrl.flow.worker_slots import Supervision
from agentrl.suites.load import load_agent
from agentrl.weights.plan import PUBLISH_TIMEOUT_S


def _joined(index: int) -> int:
    """Return the number of the bundle of an engine that joined later; those of the first engines and ranks are not negative."""
    return -1 - index


PLACEMENT_TIMEOUT_S = 120.0
PLACING_S = 10.0
"""Seconds that Ray has to place actors where there is room."""
CLOSE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 25.0  # ray.init takes seconds and cannot be interrupted
MAX_SCORER_RESTARTS = 3
RESPAWN_TIMEOUT_S = 600.0  # a large model takes minutes to load


class RayRuntime:
    """Starts the cluster and the actors, hands out their handles, and takes everything down again; no learner with 0 ranks."""

    def __init__(self, plan: ClusterPlan, on_stage: Stage) -> None:
        self._plan, self._on_stage = plan, on_stage
        self._private = not plan.run.ray_address
        self._site: Any = None  # what every actor is told of the cluster
        self._folder: str | None = None
        self._owns_connection = False  # a cluster that the user's own code is connected to is not ours to leave
        self._connecting: asyncio.Future[None] | None = None
        self._reaper: Reaper | None = None
        self._places: dict[int, tuple[Any, int]] = {}  # bundle -> its placement group, and its number there
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
        address = "" if self._private else await find_cluster(self._plan.run.ray_address)
        self._connecting = asyncio.ensure_future(asyncio.to_thread(self._connect, address))
        # A thread cannot be cancelled: `close` waits for what it has begun to start.
        await asyncio.shield(self._connecting)
        self._choose_front_ends()
        gpus = self._gpus()
        placement = place(self._plan, gpus=gpus)
        if not self._private:
            self._on_stage("waiting for room in the cluster")
        timeout_s = PLACEMENT_TIMEOUT_S if self._private else PLACING_S + self._plan.run.cluster_timeout_s
        for bundles in placement.parts():
            await self._reserve(bundles, [placement.bundles[bundle] for bundle in bundles], timeout_s)
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
        if self._connecting is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await asyncio.shield(self._connecting)
        ray = sys.modules.get("ray")
        if ray is None or not self._owns_connection or not ray.is_initialized():
            self._remove_folder()
            return
        closing = [worker.close() for worker in self._workers.values()] + ([self._learner.close()] if self._learner else [])
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*closing, return_exceptions=True)
        await asyncio.to_thread(self._stop, ray)
        self._workers, self._learner, self._scorers, self._places = {}, None, {}, {}

    def _connect(self, address: str) -> None:
        set_environment(address)
        # Only here: `set_environment` refuses to go on where the user's own code is connected, and that connection stays.
        self._owns_connection = True
        import ray

        debug = self._plan.run.debug
        common: dict[str, Any] = {"logging_level": "INFO" if debug else "ERROR", "log_to_driver": debug}
        if not self._private:
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
        front_ends = self._plan.num_front_ends
        per_engine = 1 + (front_ends if front_ends > 1 else 0)
        actors = self._plan.num_engines * per_engine + self._plan.num_ranks + len(self._plan.judges)
        from ray._private import services

        # A session of their own: `timeout` and a closed terminal send signals to the whole group, and the run still needs its cluster.
        services.ConsolePopen = partial(services.ConsolePopen, start_new_session=True)
        try:
            ray.init(
                # Every actor asks for a CPU, and a small machine may have fewer.
                num_cpus=max(os.cpu_count() or 1, actors),
                num_gpus=self._gpus(),
                include_dashboard=False,
                _node_ip_address=LOOPBACK,
                _temp_dir=self._folder,
                runtime_env={"env_vars": actor_environment(self._plan)},
                **common,
            )
        except Exception as error:  # Ray raises a plain Exception after 30 s, which cannot be changed
            if "timed out during startup" not in str(error):
                raise
            problem = "Ray did not start within 30 s, most likely because the machine is too busy"
            raise ClusterError(f"{problem}; end other programs and try again, or use --runtime local") from error

    def _choose_front_ends(self) -> None:
        import ray

        self._plan = self._plan.placed(int(ray.cluster_resources().get("CPU", 0.0)))
        if (front_ends := self._plan.num_front_ends) > 1:
            self._on_stage(f"{front_ends} rollout workers for each engine")

    def _gpus(self) -> int:
        """Return the GPUs to plan with: those of this machine, or as many as a joined cluster is asked for, since its machines may come."""
        return num_gpus(self._plan.run.device) if self._private else ceil(self._plan.needed_gpus) * (self._plan.device != "cpu")

    async def _reserve(self, bundles: Sequence[int], wanted: Sequence[Mapping[str, float]], timeout_s: float) -> None:
        """Hold the resources of some bundles, on as few machines as possible."""
        import ray

        group = ray.util.placement_group([dict(bundle) for bundle in wanted], strategy="PACK")
        self._places.update({bundle: (group, position) for position, bundle in enumerate(bundles)})
        try:
            async with asyncio.timeout(timeout_s):
                await group.ready()
        except TimeoutError:
            raise self._no_room(wanted, timeout_s) from None

    def _no_room(self, wanted: Sequence[Mapping[str, float]], timeout_s: float) -> AgentRLError:
        import ray
        from ray._private.state import available_resources_per_node

        machines, address = [node["Resources"] for node in ray.nodes() if node["Alive"]], self._plan.run.ray_address
        if address and any("GPU" in bundle for bundle in wanted) and not any(machine.get("GPU") for machine in machines):
            problem = f"the cluster at {address} had no GPU within {timeout_s:.0f} s"
            remedy = "Add --device cpu to run on CPUs, or give its machines more time to join with --cluster-timeout-s."
            return ConfigError("--device", self._plan.run.device, problem, remedy)
        reason = shortage(wanted, machines, list(available_resources_per_node().values()))
        return ClusterError(
            f"the cluster has no room within {timeout_s:.0f} s: {reason}. Ask for fewer engines or learner ranks or for narrower ones, or "
            "add machines; those that are still to join have the time of --cluster-timeout-s."
        )

    def _create_actors(self, placement: Placement) -> None:
        import ray

        from agentrl.cluster.ray_actors import WITH_FILES, LearnerActor, RayLearner

        plan, site = (self._plan, Site()) if self._private else pack(self._plan)
        self._sent, self._site = plan, ray.put(site)
        table = ray.util.placement_group_table
        nodes = {bundle: table(group)["bundles_to_node_id"][position] for bundle, (group, position) in self._places.items()}
        self._placement = placement = placement.by_node(nodes)
        self._scorers = self._create_scorers(placement)
        rank = ray.remote(concurrency_groups=WITH_FILES)(LearnerActor)
        self._workers = {index: self._create_worker(placement, index) for index in range(len(placement.engine_bundles))}
        ranks = [
            rank.options(**self._options(bundle, placement.gpus_per_rank)).remote(plan, index, self._site)
            for index, bundle in enumerate(placement.learner_bundles)
        ]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        hosts = [addresses.get(nodes[bundle], nodes[bundle]) for bundle in placement.learner_bundles]
        self._learner = RayLearner(ranks, hosts) if ranks else None

    def _create_scorers(self, placement: Placement) -> dict[str, Any]:
        """Each reward model with its processes; they hold no state, so Ray starts a lost one again, and repeats what it was asked."""
        import ray

        from agentrl.cluster.reward_actors import RayScorer, RewardActor

        reward, share = self._plan.episodes.reward, placement.gpus_per_scorer
        again, made = {"max_restarts": MAX_SCORER_RESTARTS, "max_task_retries": MAX_SCORER_RESTARTS}, ray.remote(RewardActor)
        actors = [
            made.options(**{**self._options(bundle, share), **again}).remote(self._sent, index, self._site)
            for index, bundle in enumerate(placement.scorer_bundles)
        ]
        return {name: RayScorer(actor) for name, actor in zip(reward.names, actors, strict=True)}

    def _create_worker(self, placement: Placement, index: int) -> Any:
        import ray

        from agentrl.cluster.engine_actors import shared_engine
        from agentrl.cluster.ray_actors import DIAGNOSIS, RayWorker, RolloutActor

        bundle = placement.engine_bundles[index] if index < len(placement.engine_bundles) else _joined(index)
        # Each group under way is a call, of which Ray lets an asynchronous actor have 1,000 by default.
        options = self._options(bundle, placement.gpus_per_engine, max_concurrency=4096)
        if self._plan.num_front_ends > 1:
            anywhere = {name: value for name, value in options.items() if name not in ("scheduling_strategy", "num_gpus")}
            agent = load_agent(self._plan.run.agent)
            return shared_engine(self._sent, index, self._site, agent, self._scorers, options, anywhere)
        actor = ray.remote(concurrency_groups=DIAGNOSIS)(RolloutActor).options(**options)
        made = actor.remote(self._sent, index, self._site, load_agent(self._plan.run.agent), self._scorers)
        return RayWorker(made, self._shared_gpus.get(index, ""))

    def _options(self, bundle: int, num_gpus: float, **more: Any) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if bundle not in self._places:  # an engine that joined a private cluster without GPUs
            # Without a CPU, because the cluster may have no more than the first actors hold.
            return {"num_cpus": 0.0, "max_restarts": 0, **more}
        group, position = self._places[bundle]
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=position)
        if not self._private:  # a private cluster's processes have them from its start
            more["runtime_env"] = {"env_vars": traveling_environment(self._plan)}
        # Never restarted by Ray: a new engine must load the live weights before it gets a group (`Supervision`).
        return {"num_cpus": 1.0, "num_gpus": num_gpus, "scheduling_strategy": where, "max_restarts": 0, **more}

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
            await self._reserve([_joined(index)], [placement.bundles[placement.engine_bundles[0]]], RESPAWN_TIMEOUT_S)
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
            if (place := self._places.pop(_joined(index), None)) is not None:
                ray.util.remove_placement_group(place[0])

    def _stop(self, ray: Any) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(Exception):
                worker.kill()
        others = [actor for scorer in self._scorers.values() for actor in scorer.actors]
        for actor in [*(self._learner.actors if self._learner else ()), *others]:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        for group in {id(group): group for group, _ in self._places.values()}.values():
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(group)
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
