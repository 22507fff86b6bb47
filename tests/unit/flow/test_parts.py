"""Slots, queue, ledger, health and settings, each on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio
import pytest

from agentrl.algo.plan import AlgoConfig
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import LedgerError, NothingToTrainError, StalenessError, TooManyFailuresError
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest, Status, Task
from agentrl.flow.ledger import Health, Ledger, failure_reason
from agentrl.flow.plan import FlowConfig
from agentrl.flow.queue import Accepted, GroupQueue, Release, Slots
from agentrl.resolve.parts import flow_plan, track_plan
from agentrl.track.plan import RecordConfig
from tests.unit.flow.fakes import failed_member, flow_of, group_summary, member, run_virtual

pytestmark = pytest.mark.anyio
SETTINGS = replace(flow_of(num_steps=4, groups_per_step=2, n_samples_per_prompt=4), min_pass_rate=0.1)


def group_request(group_id: int) -> GroupRequest:
    return GroupRequest(group_id=group_id, task=Task("x"), n_samples_per_prompt=2, version=0)


def accepted(group_id: int, versions: tuple[int, int] | None = (0, 0)) -> Accepted:
    return Accepted(
        group_request(group_id), f"ref {group_id}", GroupSummary(group_id=group_id, members=(), versions=versions, seconds=1.0), 0.0
    )


def summary(*members: object) -> GroupSummary:
    return group_summary(group_request(0), (0, 0), members)  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", [Release.FILTERED, Release.DROPPED, Release.TRAINED])
async def test_a_full_house_waits_for_a_release(reason: Release) -> None:
    slots, order = Slots(capacity=2, total=10), []

    async def third() -> None:
        assert await slots.acquire(2)
        order.append("acquired")

    assert await slots.acquire(0)
    assert await slots.acquire(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(third)
        await anyio.wait_all_tasks_blocked()
        order.append("released")
        slots.release(1, reason)
    assert order == ["released", "acquired"]
    assert slots.in_use == 2


async def test_no_more_groups_are_admitted_than_the_run_can_train() -> None:
    slots = Slots(capacity=4, total=2)
    assert await slots.acquire(0)
    assert await slots.acquire(1)
    with anyio.move_on_after(0.01) as timeout:
        await slots.acquire(2)
    assert timeout.cancelled_caught
    slots.release(0, Release.FILTERED)
    assert await slots.acquire(2)
    slots.release(1, Release.TRAINED)
    slots.release(2, Release.OVERSAMPLED)
    assert not await slots.acquire(3)


async def test_slots_refuse_double_use() -> None:
    slots = Slots(capacity=2, total=4)
    await slots.acquire(0)
    with pytest.raises(LedgerError, match="second slot"):
        await slots.acquire(0)
    slots.release(0, Release.DROPPED)
    with pytest.raises(LedgerError, match="does not hold"):
        slots.release(0, Release.DROPPED)


async def test_the_queue_waits_for_the_head_of_the_line() -> None:
    queue = GroupQueue(max_staleness=1, count=2)
    for group_id in range(4):
        queue.admit(group_id)
    for group_id in (3, 1):
        queue.accept(accepted(group_id))
    with anyio.move_on_after(0.01) as timeout:
        await queue.take(0)
    assert timeout.cancelled_caught
    assert queue.depth == 2
    queue.discard(0)
    queue.accept(accepted(2))
    assert [group.ref for group in (await queue.take(0)).groups] == ["ref 1", "ref 2"]
    assert queue.depth == 1


async def test_a_closed_queue_yields_what_is_left_and_then_nothing() -> None:
    queue = GroupQueue(max_staleness=0, count=2)
    queue.admit(0)
    queue.admit(1)
    queue.accept(accepted(0))
    queue.close()
    with anyio.move_on_after(0.01) as timeout:
        await queue.take(0)
    assert timeout.cancelled_caught  # group 1 may still be accepted
    queue.discard(1)
    assert [group.ref for group in (await queue.take(0)).groups] == ["ref 0"]
    assert (await queue.take(0)).groups == []
    with pytest.raises(LedgerError, match="closed"):
        queue.admit(2)


async def test_a_step_takes_the_first_to_finish_of_the_oldest_and_gives_up_the_rest() -> None:
    queue = GroupQueue(max_staleness=0, count=2, oversampled=2)
    for group_id in range(6):
        queue.admit(group_id)
    queue.accept(replace(accepted(5), accepted_s=0.0))  # not among the oldest four
    queue.accept(replace(accepted(3), accepted_s=1.0))
    with anyio.move_on_after(0.01) as timeout:
        await queue.take(0)
    assert timeout.cancelled_caught
    for time_s, group_id in ((2.0, 0), (3.0, 2)):
        queue.accept(replace(accepted(group_id), accepted_s=time_s))
    taken = await queue.take(0)
    assert [group.group_request.group_id for group in taken.groups] == [0, 3]
    assert taken.oversampled == [1, 2]
    assert [queue.waits_for(group_id) for group_id in range(6)] == [False, False, False, False, True, False]
    assert queue.depth == 1
    queue.accept(accepted(4))
    with anyio.move_on_after(0.01) as timeout:
        await queue.take(0)  # two are accepted, but with a line shorter than what a step removes, slots would be free meanwhile
    assert timeout.cancelled_caught
    queue.close()
    assert [group.group_request.group_id for group in (await queue.take(0)).groups] == [4, 5]


@pytest.mark.parametrize(("versions", "fine"), [((1, 2), True), ((2, 3), True), ((0, 3), False), ((3, 4), False), (None, False)])
async def test_lag_is_checked_again_when_groups_are_taken(versions: tuple[int, int] | None, fine: bool) -> None:
    queue = GroupQueue(max_staleness=2, count=1)
    queue.admit(0)
    queue.accept(accepted(0, versions))
    if fine:
        assert len((await queue.take(3)).groups) == 1
    else:
        with pytest.raises(StalenessError, match="group 0"):
            await queue.take(3)


def test_a_group_is_resolved_once() -> None:
    queue = GroupQueue(max_staleness=0, count=2)
    queue.admit(5)
    queue.discard(5)
    with pytest.raises(LedgerError, match="twice"):
        queue.accept(accepted(5))
    queue.admit(7)
    with pytest.raises(LedgerError, match="cannot be admitted"):
        queue.admit(6)


def test_the_ledger_counts_every_group_once() -> None:
    ledger = Ledger()
    for group_id in range(6):
        ledger.submit(group_id)
    ledger.train([0, 2])
    ledger.filter(1, "too easy")
    ledger.drop(3, "timeout")
    counts = ledger.check()
    assert counts.metrics() == {
        "ledger/submitted": 6,
        "ledger/trained": 2,
        "ledger/filtered": 1,
        "ledger/dropped": 1,
        "ledger/in_flight": 2,
        "filtered/too easy": 1,
        "dropped/timeout": 1,
    }


@pytest.mark.parametrize("act", [lambda x: x.train([0]), lambda x: x.filter(0, "r"), lambda x: x.drop(9, "r"), lambda x: x.submit(0)])
def test_the_ledger_refuses_what_does_not_add_up(act: Callable[[Ledger], None]) -> None:
    ledger = Ledger()
    ledger.submit(0)
    ledger.drop(0, "engine_error")
    with pytest.raises(LedgerError):
        act(ledger)


def test_a_lost_group_is_found_by_the_check() -> None:
    ledger = Ledger()
    ledger.submit(0)
    ledger._in_flight.clear()
    with pytest.raises(LedgerError, match="1 groups submitted and 0 accounted for"):
        ledger.check()


def test_failures_stop_the_run_only_when_enough_was_seen() -> None:
    health = Health(SETTINGS)
    fine, broken = (
        summary(member()),
        summary(failed_member("KeyError: 'x'"), failed_member("OSError: gone"), failed_member("KeyError: 'x'")),
    )
    for _ in range(7):
        health.attempt(broken, failed=True)
    with pytest.raises(TooManyFailuresError, match=r"7 of the last 8(.|\n)*14 x KeyError: 'x'\n  7 x OSError: gone"):
        health.attempt(fine, failed=False)


def test_half_of_the_attempts_may_fail_and_old_ones_are_forgotten() -> None:
    health = Health(SETTINGS)
    for index in range(200):
        health.attempt(summary(failed_member()), failed=index % 2 == 1)
    assert health.failure_rate == 0.5
    for _ in range(64):
        health.attempt(summary(member()), failed=False)
    assert health.failure_rate == 0.0


def test_a_filter_that_rejects_nearly_all_stops_the_run() -> None:
    health = Health(SETTINGS)
    for passed in [True] * 52 + [False] * 460:  # a little more than 0.1 of 512
        health.verdict(None if passed else "zero_variance")
    with pytest.raises(NothingToTrainError, match=r"only 51 of the last 512 .*zero_variance: 461.*--flat-groups train"):
        health.verdict("zero_variance")


def test_the_reason_of_a_failure_is_its_most_frequent_status() -> None:
    late = member(None, Status.TIMEOUT)
    assert failure_reason(summary(late, late, failed_member(), member())) == "timeout"
    assert failure_reason(summary(member(num_tokens=0))) == "no_tokens"


def test_settings_follow_the_configuration() -> None:
    config = TrainConfig(flow=FlowConfig(asynchronous=True, max_attempts=3), record=RecordConfig(record="all"))
    built = flow_plan(config)
    assert (built.max_staleness, built.num_slots, built.min_members) == (1, 2 * config.flow.groups_per_step, 2)
    assert (built.flow.max_attempts, track_plan(config).record_budget().promise(0, 1)) == (3, config.sampling.n_samples_per_prompt)
    oversampled = flow_plan(TrainConfig(flow=FlowConfig(oversample=0.3, max_staleness=2)))  # of 16 groups
    assert (oversampled.oversampled_groups, oversampled.groups_removed_per_step, oversampled.num_slots) == (5, 21, 63)
    assert flow_plan(TrainConfig(algo=AlgoConfig(advantage_estimator="reinforce"))).min_members == 1


def test_virtual_time_finds_deadlocks() -> None:
    async def forever() -> None:
        await anyio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(forever)
