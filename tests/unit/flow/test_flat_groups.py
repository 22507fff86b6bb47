"""`--flat-groups drop`: a step goes on without the groups of which nothing is learned, and no other is played in their place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.core.callbacks import GroupJudged, StepEnd
from agentrl.core.errors import NothingToTrainError
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest
from agentrl.flow.plan import FlowConfig
from agentrl.flow.queue import Accepted, GroupQueue, Release, Slots
from tests.unit.flow.fakes import Scene, ScriptedWorker
from tests.unit.flow.test_parts import accepted
from tests.unit.flow.test_train import first, sizes

pytestmark = pytest.mark.anyio


def odd(summary: GroupSummary) -> str | None:
    return "zero_variance" if summary.group_id % 2 else None


def test_a_step_trains_what_is_left_of_its_groups() -> None:
    scene = Scene(sizes(num_steps=3, flat_groups="drop"), keep=odd)
    result = scene.run()
    assert scene.learner.steps == [["ref 0", "ref 2"], ["ref 4"], ["ref 6", "ref 8"]]
    assert (result.counts.submitted, result.counts.trained, result.counts.filtered) == (9, 5, {"zero_variance": 4})
    assert result.ended == "all 3 steps done"
    assert [request.version for request in scene.workers[0].seen] == [0] * 3 + [1] * 3 + [2] * 3
    rows = scene.observer.steps
    assert [row["group/count"] for row in rows] == [2, 1, 2]
    assert [row["group/pass_rate"] for row in rows] == pytest.approx([2 / 3, 1 / 3, 2 / 3])
    assert [row["ledger/filtered"] for row in rows] == [1, 3, 4]
    judged = [event for event in scene.observer.events if isinstance(event, GroupJudged)]
    assert [(event.verdict, event.reason) for event in judged[:2]] == [("kept", ""), ("filtered", "zero_variance")]
    assert [event.groups for event in scene.observer.events if isinstance(event, StepEnd)] == [(0, 2), (4,), (6, 8)]


def test_with_resample_other_groups_take_their_place() -> None:
    scene = Scene(sizes(num_steps=3, flat_groups="resample"), keep=odd)
    assert scene.run().counts.trained == 9
    assert scene.learner.steps[0] == ["ref 0", "ref 2", "ref 4"]


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("oversample", [0.0, 0.5])
def test_slots_of_groups_that_are_left_out_bound_the_staleness(staleness: int, oversample: float) -> None:
    worker = ScriptedWorker(duration=lambda request: 0.2 + request.group_id * 7 % 5 / 3)
    settings = sizes(num_steps=12, staleness=staleness, flat_groups="drop", oversample=oversample)
    scene = Scene(settings, workers=[worker], keep=odd)
    result = scene.run()
    counts = result.counts
    assert all(row["staleness/max"] <= staleness for row in scene.observer.steps)
    assert (result.steps, counts.in_flight) == (12, 0)
    assert counts.submitted == counts.trained + sum(counts.filtered.values()) + sum(counts.dropped.values())
    assert counts.submitted == 12 * settings.groups_removed_per_step
    assert all(number % 2 == 0 for number in scene.learner.trained_ids)


def test_a_step_without_anything_to_train_on_takes_the_next_groups() -> None:
    scene = Scene(sizes(num_steps=2, flat_groups="drop"), keep=lambda s: "zero_variance" if s.group_id < 4 else None)
    result = scene.run()
    assert scene.learner.steps == [["ref 4", "ref 5"], ["ref 6", "ref 7", "ref 8"]]
    assert [request.version for request in scene.workers[0].seen] == [0] * 6 + [1] * 3
    assert (result.steps, result.counts.filtered, result.counts.submitted) == (2, {"zero_variance": 4}, 9)


def test_a_line_of_rejected_groups_gives_its_oversampled_ones_up_too() -> None:
    settings = sizes(num_steps=2, flat_groups="drop", oversample=0.3)
    worker = ScriptedWorker(duration=lambda request: 9.0 if request.group_id == 3 else 1.0)
    scene = Scene(settings, workers=[worker], keep=lambda s: "zero_variance" if s.group_id < 3 else None)
    result = scene.run()
    assert scene.learner.steps[0] == ["ref 4", "ref 5", "ref 6"]
    assert (result.steps, result.counts.trained, result.counts.filtered) == (2, 6, {"zero_variance": 3})
    assert result.counts.dropped == {"oversampled": 3}


def test_a_run_of_which_nothing_is_ever_learned_ends() -> None:
    with pytest.raises(NothingToTrainError, match="0 of the last 512"):
        Scene(sizes(flat_groups="drop"), keep=lambda s: "zero_variance").run()
    with pytest.raises(NothingToTrainError, match=r"all 5 groups were filtered \(zero_variance: 5\)"):
        Scene(sizes(flat_groups="drop"), tasks=first(5), keep=lambda s: "zero_variance").run()


def test_tasks_that_run_out_leave_a_smaller_step() -> None:
    scene = Scene(sizes(num_steps=9, flat_groups="drop"), tasks=first(8), keep=odd)
    result = scene.run()
    assert scene.learner.steps == [["ref 0", "ref 2"], ["ref 4"], ["ref 6"]]
    assert result.ended == "tasks ran out after 3 of 9 steps; the last step had 2 of 3 groups"


async def test_a_step_prefers_groups_that_teach_something_to_rejected_ones() -> None:
    queue = GroupQueue(1, 1, 1)
    for number in range(2):
        queue.admit(number)
    queue.accept(replace(accepted(0), rejected="zero_variance"))
    queue.accept(replace(accepted(1), accepted_s=1.0))
    taken = await queue.take(0)
    assert ([group.group_request.group_id for group in taken.groups], taken.oversampled, taken.rejected) == ([1], [0], [])


async def test_a_group_that_is_left_out_may_be_of_any_version() -> None:
    queue = GroupQueue(0, 2)
    for number in range(2):
        queue.admit(number)
        queue.accept(replace(accepted(number, versions=(number * 2, number * 2)), rejected="zero_variance" if number else ""))
    taken = await queue.take(0)
    assert [group.rejected for group in taken.rejected] == ["zero_variance"]


async def test_a_group_that_was_left_out_counts_for_the_run() -> None:
    slots = Slots(capacity=2, total=2)
    for number in range(2):
        assert await slots.acquire(number)
        slots.release(number, Release.LEFT_OUT)
    assert not await slots.acquire(2)


def test_accepted_groups_are_not_rejected_unless_it_is_said() -> None:
    assert Accepted(GroupRequest, "ref", accepted(0).summary, 0.0).rejected == ""  # type: ignore[arg-type]
    assert FlowConfig().flat_groups == "train"
