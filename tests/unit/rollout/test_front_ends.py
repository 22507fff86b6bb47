"""Rollout workers that share an engine: balance, replacement of one that is lost, the load that they report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from agentrl.core.errors import EngineDeadError, EngineError, RolloutWorkerDeadError
from agentrl.core.protocols import EngineStats, LoadSums, WeightUpdate
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest, Task
from agentrl.rollout.front_ends import FrontEnds, combined
from tests.unit.flow.fakes import group_summary

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Worker:
    """Runs groups until it is let go or lost."""

    name: str
    sums: LoadSums = field(default_factory=LoadSums)
    error: Exception | None = None
    groups: list[int] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    started: bool = False
    closed: bool = False

    async def start(self) -> None:
        self.started = True

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
        self.groups.append(group_request.group_id)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return group_summary(group_request, (0, 0)), self.name

    async def load_weights(self, update: WeightUpdate) -> int:
        raise AssertionError("weights go to the engine")

    async def stats(self) -> EngineStats:
        if self.error is not None:
            raise self.error
        return EngineStats(tokens=-1, sums=self.sums, tool_parser="own")

    async def close(self) -> None:
        self.closed = True


@dataclass
class Process:
    """The engine of the workers."""

    respawned: list[Worker] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    failure: Exception | None = None
    updates: list[int] = field(default_factory=list)
    closed: bool = False

    async def load_weights(self, update: WeightUpdate) -> int:
        self.updates.append(update.version)
        return update.version

    async def stats(self) -> EngineStats:
        return EngineStats(tokens=7)

    async def close(self) -> None:
        self.closed = True

    async def release(self, worker: Worker) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.released.append(worker.name)

    async def respawn(self) -> Worker:
        if self.failure is not None:
            raise self.failure
        self.respawned.append(Worker(f"new-{len(self.respawned)}"))
        self.respawned[-1].go.set()
        return self.respawned[-1]


def front_ends(number: int = 2, max_restarts: int = 3) -> tuple[FrontEnds, list[Worker], Process]:
    workers, process = [Worker(f"old-{index}") for index in range(number)], Process()
    return FrontEnds(process, workers, max_restarts), workers, process


def group_request(group_id: int, samples: int = 4) -> GroupRequest:
    return GroupRequest(group_id=group_id, task=Task("", id=str(group_id)), n_samples_per_prompt=samples, version=0)


async def begun(
    shared: FrontEnds, workers: Sequence[Worker], group_requests: Sequence[GroupRequest]
) -> list[asyncio.Task[tuple[GroupSummary, str]]]:
    tasks = []
    for each in group_requests:
        tasks.append(asyncio.create_task(shared.run_group(each)))
        while not any(each.group_id in worker.groups for worker in workers):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return tasks


async def test_groups_go_to_the_worker_with_the_fewest_episodes() -> None:
    shared, workers, _ = front_ends(3)
    await shared.start()
    tasks = await begun(
        shared, workers, [group_request(0, 8), group_request(1, 2), group_request(2, 4), group_request(3, 4), group_request(4, 1)]
    )
    assert [worker.groups for worker in workers] == [[0], [1, 3], [2, 4]]
    workers[0].go.set()
    assert (await tasks[0])[1] == "old-0"
    tasks += await begun(shared, workers, [group_request(5)])
    assert workers[0].groups == [0, 5]
    for worker in workers:
        worker.go.set()
    await asyncio.gather(*tasks)
    assert all(worker.started for worker in workers)


async def test_weights_and_counters_are_the_engines() -> None:
    shared, workers, process = front_ends()
    assert await shared.load_weights(WeightUpdate(version=5, transport="scripted")) == 5
    workers[0].sums = LoadSums(seconds=10.0, kv_usage=5.0, waiting=20.0, episodes=80.0)
    workers[1].sums = LoadSums(seconds=10.0, kv_usage=5.0, waiting=20.0, episodes=40.0)
    stats = await shared.stats()
    assert stats.tool_parser == "own"
    assert (process.updates, stats.tokens) == ([5], 7)
    assert stats.sums == LoadSums(seconds=10.0, kv_usage=5.0, waiting=20.0, episodes=120.0)


def test_load_is_combined_over_the_longest_time() -> None:
    one, other = LoadSums(seconds=6.0, kv_usage=4.0, waiting=8.0, episodes=16.0), LoadSums(seconds=2.0, kv_usage=2.0, episodes=6.0)
    assert combined([one, other]) == LoadSums(seconds=6.0, kv_usage=4.5, waiting=6.0, episodes=22.0)
    assert combined([]) == combined([LoadSums()]) == LoadSums()


async def test_the_groups_of_a_lost_worker_run_on_the_others_and_it_is_replaced() -> None:
    shared, workers, process = front_ends()
    tasks = await begun(shared, workers, [group_request(0), group_request(1), group_request(2)])
    workers[0].sums = LoadSums(seconds=1.0, episodes=4.0)
    await shared.stats()
    workers[0].error = RolloutWorkerDeadError("killed")
    workers[0].go.set()
    workers[1].go.set()
    answers = await asyncio.gather(*tasks)
    assert [summary.group_id for summary, _ in answers] == [0, 1, 2]
    assert "old-0" not in [name for _, name in answers]
    assert set(process.released) == {"old-0"}
    while not process.respawned:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert len(process.respawned) == 1
    assert (await shared.stats()).sums.episodes == 4.0  # those of the lost one stay
    await shared.close()
    assert (workers[1].closed, process.respawned[0].closed, process.closed) == (True, True, True)


async def test_a_worker_that_is_lost_while_idle_is_found_by_a_look_at_the_counters() -> None:
    shared, workers, process = front_ends()
    workers[1].error = RolloutWorkerDeadError("killed")
    assert (await shared.stats()).tokens == 7
    while not process.respawned:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert process.released == ["old-1"]


async def test_the_loss_of_the_engine_is_not_that_of_a_worker() -> None:
    shared, workers, process = front_ends()
    workers[0].error = EngineDeadError("the engine is gone")
    workers[0].go.set()
    with pytest.raises(EngineDeadError, match="the engine is gone"):
        await shared.run_group(group_request(0))
    assert process.released == []


@pytest.mark.parametrize("failure", [None, EngineError("no memory")])
async def test_without_a_worker_left_the_engine_counts_as_lost(failure: Exception | None) -> None:
    shared, workers, process = front_ends(2, max_restarts=0 if failure is None else 1)
    process.failure = failure
    for worker in workers:
        worker.error = RolloutWorkerDeadError("killed")
        worker.go.set()
    with pytest.raises(EngineDeadError, match="every rollout worker") as caught:
        await shared.run_group(group_request(0))
    assert not isinstance(caught.value, RolloutWorkerDeadError)
    assert sorted(process.released) == ["old-0", "old-1"]
