"""Routing of groups and publication of weights over several workers."""

from __future__ import annotations

import anyio
import pytest

from agentrl.core.errors import EngineDeadError, WeightSyncError
from agentrl.core.protocols import WeightUpdate
from agentrl.core.types import GroupRequest, Task
from agentrl.flow.pool import RolloutPool
from tests.unit.flow.fakes import ScriptedWorker

pytestmark = pytest.mark.anyio
UPDATE = WeightUpdate(version=3, transport="scripted")


def group_request(group_id: int, n_samples_per_prompt: int = 4) -> GroupRequest:
    return GroupRequest(group_id=group_id, task=Task("x"), n_samples_per_prompt=n_samples_per_prompt, version=0)


def pool_of(*workers: ScriptedWorker) -> RolloutPool:
    return RolloutPool({f"engine-{i}": worker for i, worker in enumerate(workers)})


async def test_a_group_goes_to_the_worker_with_the_fewest_episodes() -> None:
    workers = [ScriptedWorker(duration=lambda t: 0.01 * (t.group_id + 1)) for _ in range(2)]
    pool = pool_of(*workers)
    async with anyio.create_task_group() as tasks:
        for group_id, size in enumerate([8, 2, 2, 2]):
            tasks.start_soon(pool.run_group, group_request(group_id, size))
            await anyio.wait_all_tasks_blocked()
        assert pool.load == {"engine-0": 8, "engine-1": 6}
    assert [t.group_id for t in workers[0].seen] == [0]
    assert [t.group_id for t in workers[1].seen] == [1, 2, 3]
    assert pool.load == {"engine-0": 0, "engine-1": 0}


async def test_a_failed_or_cancelled_group_leaves_no_load() -> None:
    def die(_: GroupRequest) -> float:
        raise EngineDeadError("gone")

    pool = pool_of(ScriptedWorker(duration=die))
    with pytest.raises(EngineDeadError):
        await pool.run_group(group_request(0))
    slow = pool_of(ScriptedWorker(duration=lambda t: 100.0))
    with anyio.move_on_after(0.01):
        await slow.run_group(group_request(0))
    assert pool.load == slow.load == {"engine-0": 0}


async def test_publication_loads_all_workers_at_once() -> None:
    workers = [ScriptedWorker(load_s=0.05) for _ in range(20)]
    with anyio.fail_after(0.8):
        await pool_of(*workers).publish(UPDATE)
    assert all(worker.version == 3 for worker in workers)


async def test_a_worker_with_another_version_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match=r"version 3 are not live on 1 of 2 workers \(engine-1: reports version 2\)"):
        await pool_of(ScriptedWorker(), ScriptedWorker(reported=lambda version: version - 1)).publish(UPDATE)


async def test_the_other_workers_finish_loading_when_one_fails() -> None:
    def fail(version: int) -> int:
        raise EngineDeadError("killed")

    slow = ScriptedWorker(load_s=0.1)
    with pytest.raises(WeightSyncError, match="engine-0: EngineDeadError: killed") as caught:
        await pool_of(ScriptedWorker(load_s=0.0, reported=fail), slow).publish(UPDATE)
    assert slow.loads == [3]
    assert isinstance(caught.value.__cause__, EngineDeadError)


async def test_stats_are_kept_apart_by_worker() -> None:
    stats = await pool_of(ScriptedWorker(tokens=5), ScriptedWorker(tokens=7)).stats()
    assert {name: s.tokens for name, s in stats.items()} == {"engine-0": 5, "engine-1": 7}


async def test_close_reaches_every_worker_and_reports_the_first_error() -> None:
    class Stuck(ScriptedWorker):
        async def close(self) -> None:
            raise OSError("cannot close")

    last = ScriptedWorker()
    with pytest.raises(OSError, match="cannot close"):
        await pool_of(Stuck(), last).close()
    assert last.closed == 1


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        RolloutPool({})
