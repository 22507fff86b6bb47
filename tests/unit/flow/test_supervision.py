"""Lost workers: what they were running runs again, and nobody works with old weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import anyio
import pytest

from agentrl.core.errors import ConfigError, EngineDeadError, EngineError, WeightSyncError
from agentrl.core.protocols import EngineStats, WeightUpdate
from agentrl.core.types import GroupRequest, Task
from agentrl.flow.pool import RolloutPool
from agentrl.flow.worker_slots import Supervision
from tests.unit.flow.fakes import ScriptedWorker, run_virtual


def update_to(version: int) -> WeightUpdate:
    return WeightUpdate(version=version, transport="scripted")


def group_request(group_id: int) -> GroupRequest:
    return GroupRequest(group_id=group_id, task=Task("x"), n_samples_per_prompt=4, version=0)


@dataclass
class Worker(ScriptedWorker):
    """Can be killed, and hang."""

    killed: anyio.Event = field(default_factory=anyio.Event)
    fault: str = ""
    silent: bool = False
    stalled: bool = False

    async def run_group(self, group_request: GroupRequest):
        if self.killed.is_set():
            raise EngineDeadError("killed")
        async with anyio.create_task_group() as tasks:
            outcome = []

            async def work() -> None:
                outcome.append(await ScriptedWorker.run_group(self, group_request))
                tasks.cancel_scope.cancel()

            async def die() -> None:
                await self.killed.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(work)
            tasks.start_soon(die)
        if not outcome:
            raise EngineDeadError("killed")
        return outcome[0]

    async def load_weights(self, update: WeightUpdate) -> int:
        if self.killed.is_set():
            raise EngineDeadError("killed")
        return await super().load_weights(update)

    async def stats(self) -> EngineStats:
        if self.killed.is_set():
            raise EngineDeadError("killed")
        if self.silent:
            await anyio.sleep_forever()
        stats = await super().stats()
        return replace(stats, fault=self.fault, busy_s=anyio.current_time() if self.stalled else stats.busy_s)


@dataclass
class Factory:
    """Starts workers in place of lost ones."""

    start_s: float = 5.0
    make: Callable[[], Worker] = Worker
    made: list[Worker] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    async def respawn(self, name: str) -> Worker:
        await anyio.sleep(self.start_s)
        if self.errors:
            raise self.errors.pop(0)
        self.made.append(self.make())
        return self.made[-1]


def supervised(scene, workers: list[Worker], factory: Factory, **limits):  # type: ignore[no-untyped-def]
    """Run `scene(pool)` while the pool is supervised, on virtual time."""

    async def main() -> None:
        pool = RolloutPool({f"engine-{i}": worker for i, worker in enumerate(workers)}, Supervision(respawn=factory.respawn, **limits))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.supervise)
            await anyio.sleep(0.01)
            with anyio.fail_after(10_000):
                await scene(pool)
            tasks.cancel_scope.cancel()

    run_virtual(main)


def test_the_groups_of_a_killed_worker_run_on_another_one_once_each() -> None:
    workers = [Worker(), Worker()]
    answers: list[int] = []

    async def scene(pool: RolloutPool) -> None:
        async def run(group_id: int) -> None:
            summary, _ = await pool.run_group(group_request(group_id))
            answers.append(summary.group_id)

        async with anyio.create_task_group() as tasks:
            for group_id in range(6):
                tasks.start_soon(run, group_id)
            await anyio.sleep(0.5)
            assert len(workers[0].seen) == 3
            workers[0].killed.set()
        assert sorted(answers) == list(range(6))
        assert pool.metrics() == {"engine/live": 1.0, "engine/restarts": 1.0, "engine/groups_run_again": 3.0}
        assert anyio.current_time() < 3  # nobody waited for the new worker
        await anyio.sleep(10)
        assert pool.metrics()["engine/live"] == 2.0

    supervised(scene, workers, Factory())


def test_with_one_worker_groups_wait_for_its_successor() -> None:
    worker, factory = Worker(), Factory()

    async def scene(pool: RolloutPool) -> None:
        async def kill() -> None:
            await anyio.sleep(0.5)
            worker.killed.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            summary, _ = await pool.run_group(group_request(7))
        assert summary.group_id == 7
        assert 5.5 < anyio.current_time() < 8
        assert [t.group_id for t in factory.made[0].seen] == [7]

    supervised(scene, [worker], factory)


def test_a_successor_works_only_with_the_current_weights() -> None:
    workers, factory = [Worker(), Worker()], Factory(start_s=5)

    async def scene(pool: RolloutPool) -> None:
        await pool.publish(update_to(1))
        workers[1].killed.set()
        await pool.publish(update_to(2))  # meets the dead worker, and is done with the other
        assert workers[0].version == 2
        assert pool.metrics()["engine/live"] == 1
        await pool.publish(update_to(3))
        await anyio.sleep(20)
        assert pool.metrics()["engine/live"] == 2
        assert factory.made[0].loads == [3]
        assert not factory.made[0].seen

    supervised(scene, workers, factory)


def test_a_publication_that_fails_everywhere_ends_when_a_new_worker_holds_the_weights() -> None:
    def broken(version: int) -> int:
        raise WeightSyncError("half loaded")

    factory = Factory(start_s=5)

    async def scene(pool: RolloutPool) -> None:
        await pool.publish(update_to(1))
        assert factory.made[0].loads == [1]
        assert anyio.current_time() > 5
        assert (await pool.run_group(group_request(0)))[0].versions == (1, 1)

    supervised(scene, [Worker(reported=broken)], factory)


def test_a_new_worker_that_reports_another_version_is_given_nothing() -> None:
    makes = [Worker(reported=lambda version: version - 1), Worker()]
    worker, factory = Worker(), Factory(make=lambda: makes.pop(0))

    async def scene(pool: RolloutPool) -> None:
        await pool.publish(update_to(4))
        worker.killed.set()
        await pool.run_group(group_request(0))
        assert not factory.made[0].seen
        assert factory.made[1].loads == [4]
        assert pool.metrics()["engine/restarts"] == 2

    supervised(scene, [worker], factory)


def test_when_every_worker_is_given_up_the_run_ends_with_the_reasons() -> None:
    factory = Factory(start_s=1, errors=[EngineError("no memory"), EngineError("no memory")])
    worker = Worker()

    async def scene(pool: RolloutPool) -> None:
        worker.killed.set()
        with pytest.raises(EngineDeadError, match=r"engine-0: given up \(EngineError: no memory; it was replaced 2 times"):
            await pool.run_group(group_request(0))
        assert anyio.current_time() < 60
        with pytest.raises(EngineDeadError, match="no rollout worker is left"):
            await pool.publish(update_to(1))

    supervised(scene, [worker], factory, max_restarts=2)


@pytest.mark.parametrize("sign", ["fault", "silent", "stalled"])
def test_a_worker_that_seems_alive_is_set_aside(sign: str) -> None:
    worker, factory = Worker(duration=lambda t: 1e6), Factory()

    async def scene(pool: RolloutPool) -> None:
        async def break_it() -> None:
            await anyio.sleep(1)
            setattr(worker, sign, "three requests failed" if sign == "fault" else True)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(break_it)
            await pool.run_group(group_request(0))
        assert len(factory.made) == 1
        assert not worker.live  # the group it was running was taken back
        assert anyio.current_time() < 130

    supervised(scene, [worker], factory, stuck_s=60.0, answer_timeout_s=10.0)


def test_an_engine_without_requests_and_one_that_finishes_them_are_left_alone() -> None:
    idle, busy, factory = Worker(), Worker(duration=lambda t: 50.0), Factory()

    async def scene(pool: RolloutPool) -> None:
        for group_id in range(20):
            slot = pool._slots["engine-1"]
            await pool._run_on(slot, group_request(group_id))
        assert not factory.made

    supervised(scene, [idle, busy], factory, stuck_s=60.0)


def test_without_supervision_a_loss_is_an_error() -> None:
    worker = Worker()
    worker.killed.set()

    async def main() -> None:
        with pytest.raises(EngineDeadError, match="killed"):
            await RolloutPool({"engine-0": worker}).run_group(group_request(0))

    run_virtual(main)


class Blocked(Worker):
    """Neither runs a group nor answers."""

    async def run_group(self, group_request: GroupRequest):
        await anyio.sleep_forever()

    async def stats(self) -> EngineStats:
        await anyio.sleep_forever()
        return EngineStats()


def test_user_code_that_blocks_a_worker_is_named_and_not_restarted_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    place = "slow.py, line 10, in Slow.reset (`time.sleep(10000)`) blocks the event loop that all episodes share"
    factory = Factory(make=Blocked)

    async def scene(pool: RolloutPool) -> None:
        with pytest.raises(EngineDeadError, match=re.escape(place)):
            await pool.run_group(group_request(0))
        assert len(factory.made) == 1
        warned = [record.getMessage() for record in caplog.records if "does not go on" in record.getMessage()]
        assert warned == [f"engine-0 does not go on: {place}"] * 2  # once for each worker

    async def find_block(name: str) -> str:
        return place

    supervised(scene, [Blocked()], factory, find_block=find_block)


def test_a_worker_that_cannot_be_asked_for_user_code_is_lost_as_before() -> None:
    async def find_block(name: str) -> str:
        raise EngineDeadError("gone")

    async def scene(pool: RolloutPool) -> None:
        with pytest.raises(EngineDeadError, match="did not answer 3 times: TimeoutError"):
            await pool.run_group(group_request(0))

    supervised(scene, [Blocked()], Factory(make=Blocked), find_block=find_block, max_restarts=1)


def test_workers_join_with_the_current_weights_and_leave_without_losing_a_group() -> None:
    factory, retired = Factory(start_s=3.0), list[str]()

    async def retire(name: str) -> None:
        retired.append(name)

    async def scenario() -> None:
        first = Worker(duration=lambda t: 10.0)
        pool = RolloutPool({"engine-0": first}, Supervision(respawn=factory.respawn, retire=retire))
        with pytest.raises(ConfigError, match="does not generate at the moment"):
            pool.scale(2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.supervise)
            await anyio.wait_all_tasks_blocked()
            await pool.publish(update_to(4))
            assert pool.scale(1) == "engines: 1 to 1; nothing changes"
            assert pool.scale(3) == "engines: 1 to 3; joining: engine-1, engine-2"
            await anyio.sleep(1)
            assert list(pool.load) == ["engine-0"]
            await anyio.sleep(3)
            assert list(pool.load) == ["engine-0", "engine-1", "engine-2"]
            assert [worker.loads for worker in factory.made] == [[4], [4]]
            async with anyio.create_task_group() as groups:
                for group_id in range(3):
                    groups.start_soon(pool.run_group, group_request(group_id))
                await anyio.sleep(1)
                assert set(pool.load.values()) == {4}
                assert pool.scale(1) == "engines: 3 to 1; leaving: engine-1, engine-2"
                await anyio.sleep(1)
                assert pool.load == {"engine-0": 12}  # their groups began anew here
            assert retired == ["engine-1", "engine-2"]
            assert pool.metrics()["engine/groups_run_again"] == 2
            assert pool.scale(2) == "engines: 1 to 2; joining: engine-3"
            pool.scale(1)  # before it is there
            await anyio.sleep(10)
            assert list(pool.load) == ["engine-0"]
            assert retired[2:] == ["engine-3"]
            tasks.cancel_scope.cancel()

    run_virtual(scenario)


def test_a_worker_that_cannot_join_is_given_up_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    factory = Factory(start_s=1.0, errors=[EngineError("no room")])

    async def scenario() -> None:
        pool = RolloutPool({"engine-0": Worker()}, Supervision(respawn=factory.respawn))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.supervise)
            await anyio.wait_all_tasks_blocked()
            pool.scale(2)
            await anyio.sleep(5)
            assert list(pool.load) == ["engine-0"]
            assert "engine-1 could not join: EngineError: no room" in caplog.text
            assert pool.scale(2) == "engines: 1 to 2; joining: engine-2"
            await anyio.sleep(5)
            assert list(pool.load) == ["engine-0", "engine-2"]
            tasks.cancel_scope.cancel()

    run_virtual(scenario)


def test_more_engines_than_there_is_room_for_are_refused_unless_the_cluster_grows() -> None:
    factory = Factory(start_s=1.0)

    async def scenario() -> None:
        pool = RolloutPool({"engine-0": Worker()}, Supervision(respawn=factory.respawn, room=lambda: 2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.supervise)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(ConfigError, match=r"1 engines are there, and the cluster has room for 2 more. Give at most 3"):
                pool.scale(50)
            assert pool.scale(3) == "engines: 1 to 3; joining: engine-1, engine-2"
            assert pool.scale(4, grows=True) == "engines: 3 to 4; joining: engine-3"
            assert pool.scale(1).startswith("engines: 4 to 1")
            tasks.cancel_scope.cancel()

    run_virtual(scenario)


def test_without_supervision_nobody_joins() -> None:
    with pytest.raises(ConfigError, match="cannot join or leave"):
        RolloutPool({"engine-0": Worker()}).scale(2)
