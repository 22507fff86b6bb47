"""Ray at the edge: actors that hold our plain objects, and handles that look like them.

A handle implements the protocol of the object it stands for. Tokens stay in the cluster's object store: `run_group`
answers with a small summary and a reference, and the reference is what the learner is given.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from agentrl.cluster.build import build_worker
from agentrl.cluster.joining import Site
from agentrl.cluster.processes import ClusterPlan
from agentrl.core.errors import AgentRLError, CheckpointError, ClusterError, EngineDeadError, LearnerDeadError
from agentrl.core.manifest import FileEntry, shares
from agentrl.core.operating_system import memory_root
from agentrl.core.process import LOOPBACK, describe_process
from agentrl.core.protocols import Engine, EngineStats, GroupRef, Membership, Memory, TrainResult, WeightUpdate
from agentrl.core.scoring import Scorer
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.boundary import blocked_at

T = TypeVar("T")

F = TypeVar("F", bound=Callable[..., Any])

DIAGNOSIS = {"diagnosis": 1}
"""Ray's concurrency groups of both actors: `diagnose` runs on a thread of its own, so a busy or hanging process answers too."""
WITH_FILES = {**DIAGNOSIS, "flushing": 1, "files": 1}
"""Concurrency groups of a learner rank: files are hashed and copied beside training, and hashing does not wait for copies."""

LOSS_TIMEOUT_S = 30.0
"""Seconds in which Ray tells of a lost machine after a rank on another one has noticed."""


def _group(name: str) -> Callable[[F], F]:
    return cast("Callable[[F], F]", ray.method(concurrency_group=name))


beside = _group("diagnosis")
"""Runs a method of an actor on a thread of its own."""


class RolloutActor:
    """Holds one rollout worker; its asynchronous methods run side by side on the actor's event loop."""

    def __init__(
        self, plan: ClusterPlan, index: int, site: Site, agent: AgentSpec, scorers: Mapping[str, Scorer], engine: Engine | None = None
    ) -> None:
        del agent  # its arrival makes an environment known here that was given as an object in Python
        self._worker = build_worker(site.settled(plan), index, scorers, engine)
        self._loops: list[asyncio.AbstractEventLoop] = []
        self._thread = 0

    @beside
    async def diagnose(self) -> str:
        """Return the stacks of threads and episodes."""
        return describe_process(self._loops)

    @beside
    async def blocked(self) -> str:
        """Return where user code keeps the episodes' event loop from going on; empty if nothing does."""
        return await blocked_at(self._loops[0], self._thread) if self._loops else ""

    async def missing(self, paths: Sequence[str]) -> tuple[str, list[str]]:
        """Return the address of this machine, and those of the paths that it does not have."""
        return missing_here(paths)

    async def start(self, gpus: str = "") -> None:
        """Load user code and engine; `gpus` are those that the engine shares with learner ranks, in CUDA's form."""
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        self._thread = threading.get_ident()
        self._loops.append(asyncio.get_running_loop())
        await self._worker.start()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call another method of the worker; a reference among the arguments has arrived as what it stands for."""
        return await getattr(self._worker, method)(*arguments)


class LearnerActor:
    """Holds one learner rank, which `make` makes of the arguments and the address of this machine.

    Its methods run one after another, on one thread.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._probe = ""
        host = ray.util.get_node_ip_address()
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(host)):
            os.environ["GLOO_SOCKET_IFNAME"] = interface  # gloo would take that of the host's name, which often stands for loopback
        self._rank = make(*arguments, host)

    @beside
    def diagnose(self) -> str:
        """Return the stacks of threads."""
        return describe_process()

    def address(self) -> tuple[str, int]:
        """Return an address for rank 0: this node's address and a port that is free now."""
        from agentrl.core.process import free_port

        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def gpus(self) -> str:
        """Return the GPUs of this rank, in the form of ``CUDA_VISIBLE_DEVICES``."""
        return ",".join(map(str, ray.get_gpu_ids()))

    def missing(self, paths: Sequence[str]) -> tuple[str, list[str]]:
        """Return the address of this machine, and those of the paths that it does not have."""
        return missing_here(paths)

    def in_memory(self) -> str:
        """Return the path of a file in this machine's shared memory, which is there until the next call."""
        if self._probe:
            os.unlink(self._probe)
            self._probe = ""
        else:
            descriptor, self._probe = tempfile.mkstemp(prefix="probe-", dir=memory_root())
            os.close(descriptor)
        return self._probe

    @_group("flushing")
    def flush_checkpoint(self, path: str) -> dict[str, FileEntry]:
        """Flush and hash what the rank wrote."""
        entries: dict[str, FileEntry] = self._rank.flush_checkpoint(path)
        return entries

    @_group("files")
    def with_files(self, work: Callable[..., Any], files: Mapping[str, FileEntry], *arguments: Any) -> Any:
        """Call a function with some files of a checkpoint."""
        return work(files, *arguments)

    @beside
    def call_beside(self, method: str) -> Any:
        """Call a method of the rank while another one runs."""
        return getattr(self._rank, method)()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rank; references among the arguments have arrived as what they stand for."""
        return getattr(self._rank, method)(*arguments)


def missing_here(paths: Sequence[str]) -> tuple[str, list[str]]:
    """Return the address of this machine, and those of the paths that it does not have."""
    return ray.util.get_node_ip_address(), [path for path in paths if not os.path.exists(path)]


def interface_of(host: str) -> str:
    """Return the name of the network interface with the address `host`, or of loopback for any of its addresses; empty if there is none."""
    loopback = host.startswith("127.")
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.address == host or (loopback and address.address == LOOPBACK):
                return name
    return ""


class RayWorker:
    """A `RolloutWorker` that lives in an actor; `lost` is the error of calls when its process is gone."""

    def __init__(self, actor: Any, gpus: str = "", lost: type[Exception] = EngineDeadError) -> None:
        self.actor, self.gpus, self._lost = actor, gpus, lost
        self.episode_actors: dict[str, Any] = {}  # there are none beside it

    async def diagnose(self) -> str:
        """Return the stacks of the process."""
        return await self._answer(self.actor.diagnose.remote())

    async def blocked(self) -> str:
        """Return where user code blocks the worker's episodes; empty if it does not."""
        return await self._answer(self.actor.blocked.remote())

    async def start(self) -> None:
        """As `RolloutWorker.start`."""
        await self._answer(self.actor.start.remote(self.gpus))

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, GroupRef]:
        """As `RolloutWorker.run_group`; the second value is a reference into the object store. Cancelling it ends the episodes."""
        summary, group = self.actor.call.options(num_returns=2).remote("run_group", group_request)
        try:
            return await self._answer(summary), group
        except asyncio.CancelledError:
            ray.cancel(summary)
            raise

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `RolloutWorker.load_weights`; a payload is written to the object store once, not for every engine."""
        return await self._answer(self.actor.call.remote("load_weights", stored(update)))

    async def sleep(self, level: int) -> None:
        """As `RolloutWorker.sleep`."""
        await self._answer(self.actor.call.remote("sleep", level))

    async def wake(self, *parts: Memory) -> None:
        """As `RolloutWorker.wake`."""
        await self._answer(self.actor.call.remote("wake", *parts))

    async def stats(self) -> EngineStats:
        """As `RolloutWorker.stats`."""
        return await self._answer(self.actor.call.remote("stats"))

    async def close(self) -> None:
        """As `RolloutWorker.close`."""
        await self._answer(self.actor.call.remote("close"))

    async def missing(self, paths: Sequence[str]) -> tuple[str, list[str]]:
        """Return the address of its machine, and those of the paths that it does not have."""
        return await self._answer(self.actor.missing.remote(paths))

    def kill(self) -> None:
        """End its process."""
        ray.kill(self.actor)

    async def _answer(self, ref: Awaitable[T]) -> T:
        return await unwrapped(ref, self._lost, "a rollout worker")


class RayLearner:
    """A `Learner` whose ranks are actors; a call goes to all of them, rank 0 answers."""

    def __init__(self, actors: Sequence[Any], nodes: Sequence[str]) -> None:
        self.actors, self._nodes = actors, nodes  # `nodes` has the address of each rank's machine; those of one follow one another

    def diagnose(self) -> dict[str, Awaitable[str]]:
        """Return the stacks of each rank, by its name."""
        return {f"learner-{rank}": _learner(actor.diagnose.remote()) for rank, actor in enumerate(self.actors)}

    async def start(self) -> None:
        """As `Learner.start`."""
        host, port = await _learner(self.actors[0].address.remote())
        places = [(self._nodes[:rank].count(node), self._nodes.count(node)) for rank, node in enumerate(self._nodes)]
        starts = [
            actor.call.remote("start", rank, len(self.actors), port, host, place)
            for rank, (actor, place) in enumerate(zip(self.actors, places, strict=True))
        ]
        await asyncio.gather(*(self._rank(rank, start) for rank, start in enumerate(starts)))

    async def train(self, step: int, groups: Sequence[GroupRef]) -> TrainResult:
        """As `Learner.train`; references are resolved by the ranks, not here."""
        result: TrainResult = await self._all("train", step, *groups)
        return result

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        """As `Learner.export_weights`."""
        return merged(await self.every("export_weights", version, members))

    async def abandon_weights(self, reason: str) -> None:
        """As `Learner.abandon_weights`."""
        await self._all("abandon_weights", reason)

    async def offload(self, *, keep_weights: bool) -> None:
        """As `Learner.offload`."""
        await self._all("offload", keep_weights)

    async def reload(self) -> None:
        """As `Learner.reload`."""
        await self._all("reload")

    async def save_model(self, path: str) -> None:
        """As `Learner.save_model`."""
        await self._all("save_model", path)

    async def save_checkpoint(self, path: str, step: int) -> None:
        """As `Learner.save_checkpoint`."""
        await self._all("save_checkpoint", path, step)

    async def flush_checkpoint(self, path: str) -> Mapping[str, FileEntry]:
        """As `Learner.flush_checkpoint`; an entry says which rank wrote the file."""
        answers = await asyncio.gather(*(_learner(actor.flush_checkpoint.remote(path)) for actor in self.actors))
        return {name: {**entry, "rank": rank} for rank, entries in enumerate(answers) for name, entry in entries.items()}

    async def map_files(self, work: Callable[..., T], files: Mapping[str, FileEntry], *arguments: Any) -> list[T]:
        """As `Learner.map_files`: a rank is given what it wrote, or as many bytes as the others."""
        parts = zip(self.actors, shares(files, len(self.actors)), strict=True)
        return list(await asyncio.gather(*(_learner(actor.with_files.remote(work, part, *arguments)) for actor, part in parts if part)))

    async def load_checkpoint(self, path: str) -> int:
        """As `Learner.load_checkpoint`."""
        return int(await self._all("load_checkpoint", path))

    async def close(self) -> None:
        """As `Learner.close`."""
        await self._all("close")

    async def _all(self, method: str, *arguments: Any) -> Any:
        """Call a method of every rank; returns the answer of rank 0."""
        answer, *_ = await self.every(method, *arguments)
        return answer

    async def every(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank, and return the answers; of several errors, the one that tells what happened is raised."""
        calls = [asyncio.ensure_future(self._rank(rank, actor.call.remote(method, *arguments))) for rank, actor in enumerate(self.actors)]
        try:
            return await asyncio.gather(*calls)
        except Exception as error:  # of a rank that misses another one, most likely, and it says so sooner than Ray
            if isinstance(error, AgentRLError) and not isinstance(error, CheckpointError):  # that is how a save says so
                raise
            await asyncio.wait(calls, timeout=LOSS_TIMEOUT_S)
            for call in calls:
                if call.done() and isinstance(lost := call.exception(), LearnerDeadError):
                    raise lost from None
            raise
        finally:
            for call in calls:
                call.cancel()

    async def _rank(self, rank: int, ref: Awaitable[T]) -> T:
        return await unwrapped(ref, LearnerDeadError, f"learner-{rank} on {self._nodes[rank]}")


def merged(updates: Sequence[WeightUpdate | None]) -> WeightUpdate:
    """Return the update of rank 0 with the meeting points of all ranks."""
    first = next(update for update in updates if update is not None)
    if "connect" not in first.payload:
        return first
    places = {rank: place for update in updates if update is not None for rank, place in update.payload["connect"]["places"].items()}
    return replace(first, payload={**first.payload, "connect": {**first.payload["connect"], "places": places}})


_last: list[tuple[WeightUpdate, Any]] = []
"""The last update, and the cluster's reference to it."""


def stored(update: WeightUpdate) -> Any:
    """Return the cluster's reference to an update, which is written once."""
    if not _last or _last[0][0] is not update:
        _last[:] = [(update, ray.put(update))]
    return _last[0][1]


async def _learner(ref: Awaitable[T]) -> T:
    return await unwrapped(ref, LearnerDeadError, "a learner rank")


async def unwrapped(ref: Awaitable[T], lost: type[Exception], who: str) -> T:
    """Await an actor's answer; its own exception comes back as itself, a lost process as `lost`."""
    try:
        return await ref
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise lost(f"{who} is gone: {_first_line(error)}") from None
    except RayError as error:
        raise ClusterError(f"{who} did not answer: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    """Return Ray's message; for an actor that could not be made, the exception raised, which stands last in the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"it could not be made: {lines[-1]}" if "creation task" in lines[0] else lines[0]
