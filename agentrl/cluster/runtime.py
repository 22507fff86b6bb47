"""The interface of a runtime, and the runtime in which everything is in this process: for debuggers, notebooks and tests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from agentrl.cluster.build import Stage, build_learner_rank, build_scorer, build_worker, worker_environment
from agentrl.cluster.processes import ClusterPlan
from agentrl.core.manifest import FileEntry
from agentrl.core.paths import shown_path
from agentrl.core.process import on_thread
from agentrl.core.protocols import GroupRef, Learner, Membership, RolloutWorker, TrainResult, WeightUpdate
from agentrl.core.scoring import Scorer
from agentrl.env.boundary import blocked_at
from agentrl.env.isolation.leftovers import Leftovers
from agentrl.flow.apart import ApartPool
from agentrl.flow.exports import JointLearner
from agentrl.flow.pool import RolloutPool
from agentrl.flow.turns import TimeSharedLearner
from agentrl.flow.worker_slots import Supervision
from agentrl.weights.plan import WeightsConfig

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Runtime(Protocol):
    """Started engines and learner, and whatever keeps them alive."""

    @property
    def workers(self) -> Sequence[RolloutWorker]:
        """One handle per engine."""
        ...

    @property
    def evaluators(self) -> Sequence[RolloutWorker]:
        """One handle per engine of ``--eval-engines``; none if evaluations run on the others."""
        ...

    @property
    def learner(self) -> Learner:
        """One handle for all learner ranks."""
        ...

    @property
    def supervision(self) -> Supervision | None:
        """Replacement of lost workers; `None` if they cannot be replaced."""
        ...

    @property
    def joint(self) -> bool:
        """True if engines take weights together, in a group that they form with the learner."""
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


class BlockWatch:
    """Warns when user code blocks the event loop that this is made on, from a thread of its own, until `close`."""

    def __init__(self, every_s: float = 5.0, wait_s: float = 10.0) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._every_s, self._wait_s, self._closed = every_s, wait_s, threading.Event()
        threading.Thread(target=self._watch, name="agentrl-block-watch", daemon=True).start()

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._closed.set()

    def _watch(self) -> None:
        told = ""
        while not self._closed.wait(self._every_s) and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop is closed meanwhile
                # In a loop of its own, because the watched one may be blocked.
                found = asyncio.run(blocked_at(self._loop, self._thread, self._wait_s))
                if found and found != told:
                    _log.warning("nothing goes on for %g s and more: %s Press Ctrl-C twice to end the run.", self._wait_s, found)
                told = found


class LocalRuntime:
    """One engine and one learner rank in this process; no rank if nothing is trained."""

    def __init__(self, plan: ClusterPlan, on_stage: Stage) -> None:
        self._plan, self._on_stage = plan, on_stage
        self._worker: RolloutWorker | None = None
        self._learner: ThreadedLearner | None = None
        self._scorers: dict[str, Scorer] = {}
        self._watch: BlockWatch | None = None
        self._leftovers: Leftovers | None = None

    @property
    def workers(self) -> Sequence[RolloutWorker]:
        """The only worker."""
        return [self._worker] if self._worker else []

    @property
    def evaluators(self) -> Sequence[RolloutWorker]:
        """Return none: one process has one engine."""
        return ()

    @property
    def learner(self) -> Learner:
        """The only rank."""
        if self._learner is None:
            raise RuntimeError("the runtime has not been started, or has no learner")
        return self._learner

    @property
    def supervision(self) -> None:
        """Return None: in one process no actor is replaced."""
        return

    @property
    def joint(self) -> bool:
        """True on a GPU, unless weights go through files."""
        return self._plan.joint

    async def start(self) -> None:
        """Load the learner, then the engine, which joins the learner's process group of one."""
        self._watch = BlockWatch()
        self._leftovers = Leftovers()
        os.environ.update(worker_environment(self._plan.engine))
        if self._plan.learner is not None:
            self._on_stage("loading learner")
            self._learner = ThreadedLearner(build_learner_rank(self._plan), self._plan.run.agent)
            await self._learner.start()
            if self._plan.weights.sleeps:
                await self._learner.offload(keep_weights=False)
        if names := self._plan.episodes.reward.names:
            self._on_stage("loading reward model")
            self._scorers = {name: build_scorer(self._plan, index) for index, name in enumerate(names)}
            await asyncio.gather(*(scorer.start() for scorer in self._scorers.values()))
        self._on_stage("loading engine")
        self._worker = build_worker(self._plan, 0, scorers=self._scorers)
        await self._worker.start()

    def diagnose(self) -> Mapping[str, Awaitable[str]]:
        """Return no diagnoses: there is no other process."""
        return {}

    async def close(self) -> None:
        """Close everything."""
        worker, learner, self._worker, self._learner = self._worker, self._learner, None, None
        scorers, self._scorers = self._scorers, {}
        if self._watch is not None:
            self._watch.close()
        if worker is not None:
            await worker.close()
        if learner is not None:
            await learner.close()
        for scorer in scorers.values():
            await scorer.close()
        if self._leftovers is not None:
            await asyncio.to_thread(self._leftovers.end)


class ThreadedLearner:
    """A learner rank on a thread of its own, so that training does not stop the event loop.

    Environments are in the same process: `env` names them in the warning that one changed the default type of tensors, which is given once.
    """

    def __init__(self, rank: Any, env: str = "the environment") -> None:
        self._rank, self._env = rank, env
        self._dtype: Any = None
        self._is_told = False
        # One thread, so that calls follow one another as in an actor.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    async def start(self) -> None:
        """As `Learner.start`."""
        await self._call(lambda: self._rank.start(0, 1, 0))
        import torch

        self._dtype = torch.get_default_dtype()

    async def train(self, step: int, groups: Sequence[GroupRef]) -> TrainResult:
        """As `Learner.train`."""
        self._restore_dtype()
        return await self._call(lambda: self._rank.train(step, *groups))

    def _restore_dtype(self) -> None:
        import torch

        if (found := torch.get_default_dtype()) == self._dtype:
            return
        torch.set_default_dtype(self._dtype)
        if not self._is_told:
            self._is_told = True
            remedy = "it is set back. Give dtype= to the tensors that you make, in place of torch.set_default_dtype"
            _log.warning("%s changed the default type of tensors to %s for the whole process; %s", shown_path(self._env), found, remedy)

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        """As `Learner.export_weights`."""
        return await self._call(lambda: self._rank.export_weights(version, members))

    async def abandon_weights(self, reason: str) -> None:
        """As `Learner.abandon_weights`."""
        await self._call(lambda: self._rank.abandon_weights(reason))

    async def offload(self, *, keep_weights: bool) -> None:
        """As `Learner.offload`."""
        await self._call(lambda: self._rank.offload(keep_weights))

    async def reload(self) -> None:
        """As `Learner.reload`."""
        await self._call(self._rank.reload)

    async def save_model(self, path: str) -> None:
        """As `Learner.save_model`."""
        await self._call(lambda: self._rank.save_model(path))

    async def save_checkpoint(self, path: str, step: int) -> None:
        """As `Learner.save_checkpoint`."""
        await self._call(lambda: self._rank.save_checkpoint(path, step))

    async def flush_checkpoint(self, path: str) -> Mapping[str, FileEntry]:
        """As `Learner.flush_checkpoint`, on a thread of its own."""
        entries: Mapping[str, FileEntry] = await on_thread(self._rank.flush_checkpoint, path)
        return entries

    async def map_files(self, work: Callable[..., T], files: Mapping[str, FileEntry], *arguments: Any) -> list[T]:
        """As `Learner.map_files`, on a thread of its own."""
        return [await on_thread(work, files, *arguments)]

    async def load_checkpoint(self, path: str) -> int:
        """As `Learner.load_checkpoint`."""
        return await self._call(lambda: int(self._rank.load_checkpoint(path)))

    async def close(self) -> None:
        """As `Learner.close`."""
        await self._call(self._rank.close)
        self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def pool_of(runtime: Runtime) -> RolloutPool:
    """Return the rollout workers of a started runtime as one."""
    workers = {f"engine-{index}": worker for index, worker in enumerate(runtime.workers)}
    return RolloutPool(workers, runtime.supervision, next_index=len(workers) + len(runtime.evaluators))


def evaluators_of(runtime: Runtime, trained: RolloutPool) -> ApartPool | None:
    """Return the engines of ``--eval-engines`` of a started runtime, which take their weights from `trained`; `None` without any."""
    workers = {f"engine-{index}": worker for index, worker in enumerate(runtime.evaluators, len(runtime.workers))}
    return ApartPool(workers, trained, runtime.supervision) if workers else None


def learner_beside(pool: RolloutPool, runtime: Runtime, weights: WeightsConfig, *, version: int = 0) -> Learner:
    """Return the learner of a started runtime as the settings of weights have it work beside the engines of `pool`.

    That is alone; in a group that takes weights together; or in turns on the same GPUs. `version` is that of its weights.
    """
    learner = runtime.learner
    if runtime.joint and weights.publish != "adapter":
        learner = JointLearner(learner, pool, version=version)
    if weights.sleeps:
        learner = TimeSharedLearner(learner, pool, sleep_level=weights.sleep_level)
    return learner


def make_runtime(plan: ClusterPlan, on_stage: Stage) -> Runtime:
    """The runtime that ``--runtime`` names; nothing is started yet."""
    if plan.run.runtime == "local":
        return LocalRuntime(plan, on_stage)
    from agentrl.cluster.ray_runtime import RayRuntime

    return RayRuntime(plan, on_stage)
