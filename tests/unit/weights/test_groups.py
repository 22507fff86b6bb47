"""Groups that lose members: real processes, real sockets and vLLM's store; only the channel is none of a GPU."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from agentrl.core.errors import EngineDeadError, TransferAbandonedError, WeightSyncError
from agentrl.core.protocols import EngineStats, Membership, WeightUpdate
from agentrl.flow.exports import JointLearner
from agentrl.flow.pool import RolloutPool
from agentrl.flow.worker_slots import Supervision
from agentrl.weights import groups
from agentrl.weights.groups import POLL_S, POLLS_PER_S, Group, host, join, poll_s
from tests.group_support import Engine, connect_sockets, sender
from tests.unit.flow.fakes import ScriptedLearner, ScriptedWorker

FORK = multiprocessing.get_context("fork")
CPU = torch.device("cpu")
BUCKET = 4000


def weights(version: int) -> list[tuple[str, Tensor]]:
    torch.manual_seed(version)
    return [(f"layer.{index}", torch.randn(500)) for index in range(16)]


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in sorted(tensors))).hexdigest()


def serve(connection: Any, name: str, kind: str, begun: Any) -> None:
    """An engine in a process of its own, which says that it has loaded a first bucket, and is slow from then on."""
    engine = Engine(name, kind)
    load = engine._load

    def loading(pairs: Any) -> None:
        load(pairs)
        begun.set()

    engine._load = loading  # type: ignore[method-assign]
    while (update := connection.recv()) is not None:
        engine.slow_s = 0.05 if update.version == 2 else 0.0
        reason = engine.take(update)
        connection.send((reason, digest(engine.loaded.items())))


class ProcessWorker(ScriptedWorker):
    """The handle of an engine in a process."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.name = name
        self.begun, (self._connection, theirs) = FORK.Event(), FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(theirs, name, kind, self.begun), daemon=True)
        self.process.start()
        theirs.close()
        self.holds = ""

    async def load_weights(self, update: WeightUpdate) -> int:
        self.begun.clear()
        reason, self.holds = await asyncio.to_thread(self._ask, update)
        if reason:
            raise TransferAbandonedError(reason)
        self.version = update.version
        return update.version

    async def stats(self) -> EngineStats:
        if not self.process.is_alive():
            raise EngineDeadError("killed")
        return await super().stats()

    def _ask(self, update: WeightUpdate) -> Any:
        try:
            self._connection.send(update)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineDeadError(f"its process is gone: {error}") from error

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Sending(ScriptedLearner):
    """A learner of one rank with a real sender."""

    def __init__(self, kind: str, timeout_s: float) -> None:
        super().__init__()
        self.sender = sender(kind, bucket_bytes=BUCKET, timeout_s=timeout_s)
        self.exports: list[tuple[int, Membership | None]] = []

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        self.exports.append((version, members))
        update = await asyncio.to_thread(self.sender.send, weights(version), version, members)
        assert update is not None
        return update

    async def abandon_weights(self, reason: str) -> None:
        await asyncio.to_thread(self.sender.abandon, reason)


class Play:
    """A supervised pool of engines in processes, and a learner that sends to them."""

    def __init__(self, engines: int, kind: str = "nccl", timeout_s: float = 20.0, load_s: float = 60.0) -> None:
        self.kind, self.made = kind, [ProcessWorker(f"engine-{index}", kind) for index in range(engines)]
        self.learner = Sending(kind, timeout_s)
        supervision = Supervision(respawn=self.respawn, check_every_s=0.05, load_timeout_s=load_s)
        self.pool = RolloutPool({f"engine-{index}": worker for index, worker in enumerate(self.made)}, supervision)
        self.joint = JointLearner(self.learner, self.pool, version=0)

    async def respawn(self, name: str) -> ProcessWorker:
        for worker in self.made:
            if worker.name == name:
                worker.process.kill()
        self.made.append(ProcessWorker(name, self.kind))
        return self.made[-1]

    async def publish(self, version: int) -> None:
        await self.pool.publish(await self.joint.export_weights(version))

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():  # noqa: ASYNC110
            await anyio.sleep(0.01)

    def run(self, scene: Callable[[], Any]) -> None:
        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.pool.supervise)
                await anyio.sleep(0.01)
                with anyio.fail_after(100):
                    await scene()
                tasks.cancel_scope.cancel()

        try:
            anyio.run(main)
        finally:
            for worker in self.made:
                worker.end()
            self.learner.sender.close()


def members(play: Play) -> list[tuple[int, tuple[str, ...]]]:
    return [(version, found.engines) for version, found in play.learner.exports if found is not None]


@pytest.mark.timeout(120)
@pytest.mark.row(5, "SIGKILL of one of three members of a group in the middle of a broadcast")
@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_a_member_that_is_killed_in_a_publication_is_replaced_and_the_others_have_the_weights(kind: str) -> None:
    play = Play(3 if kind == "nccl" else 1, kind)
    victim = play.made[1 if kind == "nccl" else 0]
    others = [worker for worker in play.made if worker is not victim]
    everybody = tuple(f"engine-{index}" for index in range(len(play.made)))

    async def kill() -> None:
        await play.until(victim.begun.is_set)
        os.kill(victim.process.pid or 0, signal.SIGKILL)

    async def scene() -> None:
        await play.publish(1)
        assert {worker.holds for worker in play.made} == {digest(weights(1))}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            await play.publish(2)
        assert [worker.holds for worker in others] == [digest(weights(2))] * len(others)
        await play.until(lambda: play.pool.metrics()["engine/live"] == len(everybody))
        assert play.made[-1].holds == digest(weights(2))  # alone, since the learner was idle
        await play.publish(3)
        assert {worker.holds for worker in (*others, play.made[-1])} == {digest(weights(3))}

    play.run(scene)
    survivors = [(2, tuple(name for name in everybody if name != "engine-1"))] if others else []
    alone = [(2, (f"engine-{1 if others else 0}",))]
    assert members(play) == [(1, everybody), (2, everybody), *survivors, *alone, (3, everybody)]
    epochs = [found.epoch for _, found in play.learner.exports if found is not None]
    assert epochs[0] == epochs[1]
    assert epochs[1:] == sorted(set(epochs[1:]))


@pytest.mark.timeout(120)
def test_a_member_that_hangs_is_lost_at_the_deadline() -> None:
    play = Play(2, timeout_s=1.0, load_s=4.0)

    async def stop() -> None:
        await play.until(play.made[1].begun.is_set)
        os.kill(play.made[1].process.pid or 0, signal.SIGSTOP)

    async def scene() -> None:
        await play.publish(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            await play.publish(2)
        assert play.made[0].holds == digest(weights(2))
        await play.until(lambda: play.pool.metrics()["engine/live"] == 2)
        assert play.made[-1].holds == digest(weights(2))  # on a busy machine it may be the second that was started

    play.run(scene)
    assert members(play)[1:3] == [(2, ("engine-0", "engine-1")), (2, ("engine-0",))]


def test_a_transfer_that_no_member_is_to_blame_for_is_tried_again_and_then_ends_the_run() -> None:
    learner = Sending("nccl", timeout_s=5.0)

    class GivingUp(ScriptedWorker):
        async def load_weights(self, update: WeightUpdate) -> int:
            raise TransferAbandonedError("the network is down")

    async def main() -> None:
        pool = RolloutPool({"engine-0": GivingUp(), "engine-1": GivingUp()})
        joint = JointLearner(learner, pool, version=0)
        with pytest.raises(WeightSyncError, match="the network is down"):
            await pool.publish(await joint.export_weights(1))

    anyio.run(main)
    assert len(learner.exports) == 3
    assert len({found for _, found in learner.exports}) == 3  # each in a group of its own
    learner.sender.close()


def test_whoever_waits_for_members_that_never_come_is_told_in_time() -> None:
    with pytest.raises(TransferAbandonedError, match=r"1 workers of engines did not arrive within 0\.2 s"):
        host(socket.create_server(("127.0.0.1", 0)), 1, connect_sockets, CPU, 0.2)
    with pytest.raises(TransferAbandonedError, match="the learner ended"):
        host(socket.create_server(("127.0.0.1", 0)), 1, connect_sockets, CPU, 30.0, lambda: "the learner ended")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(TransferAbandonedError, match="nobody forms a group"):
        join("127.0.0.1", port, 1, 2, connect_sockets, CPU, 0.3)


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_an_engine_that_fails_to_load_is_to_blame_and_the_sender_knows_why(kind: str) -> None:
    learner, engine = sender(kind), Engine("engine-0", kind)

    def broken(pairs: Any) -> None:
        raise ValueError("no such parameter")

    engine._load = broken  # type: ignore[method-assign]
    update = learner.send(weights(1), 1, Membership(1, ("engine-0",)))
    assert update is not None
    with pytest.raises(ValueError, match="no such parameter"):
        engine.take(update)
    with pytest.raises(WeightSyncError, match="ValueError: no such parameter"):
        learner.settle()
    learner.close()


def test_members_look_at_the_store_no_more_often_the_more_they_are() -> None:
    assert poll_s(2) == POLL_S
    for size in (64, 1025, 8193):
        assert size / poll_s(size) <= POLLS_PER_S
    assert Group(None, None, 1025)._poll_s == poll_s(1025)  # type: ignore[arg-type]


def test_members_of_a_group_know_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    joined: list[Group] = []
    others = [
        threading.Thread(target=lambda rank=rank: joined.append(join("127.0.0.1", port, rank, 3, connect, CPU, 20.0))) for rank in (1, 2)
    ]

    def connect(store: Any, rank: int, size: int, device: torch.device) -> Any:
        return None

    monkeypatch.setattr(groups, "POLLS_PER_S", 10)
    for thread in others:
        thread.start()
    first = host(listener, 2, connect, CPU, 20.0)
    for thread in others:
        thread.join()
    assert [group._poll_s for group in (first, *joined)] == [0.3] * 3
