"""Whole runs on scripted workers and learner: order, retries, filtering, ends."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest

from agentrl.core.errors import NothingToTrainError, TooManyFailuresError
from agentrl.core.summaries import MemberSummary
from agentrl.core.types import GroupRequest, Status, Task
from agentrl.flow.sizes import FlowPlan
from agentrl.flow.state import SafePoint
from tests.unit.flow.fakes import Scene, ScriptedLearner, ScriptedWorker, failed_member, flow_of, member


def sizes(num_steps: int = 4, groups: int = 3, staleness: int = 0, **changes: float) -> FlowPlan:
    values = {
        "num_steps": num_steps,
        "groups_per_step": groups,
        "n_samples_per_prompt": 2,
        "max_staleness": staleness,
        "advantage_estimator": "group_norm",
    }
    return flow_of(**{**values, **changes})  # type: ignore[arg-type]


def first(count: int) -> Iterator[Task]:
    return (Task(prompt=str(i), position=i) for i in range(count))


def test_a_synchronous_run_takes_turns() -> None:
    scene = Scene(sizes(num_steps=3))
    result = scene.run()
    assert scene.learner.steps == [["ref 0", "ref 1", "ref 2"], ["ref 3", "ref 4", "ref 5"], ["ref 6", "ref 7", "ref 8"]]
    assert [t.version for t in scene.workers[0].seen] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert result.seconds == pytest.approx(3 * (1.0 + 1.0 + 0.1))  # generate, train, load: nothing overlaps
    assert all(row["staleness/max"] == 0 for row in scene.observer.steps)
    assert (result.steps, result.ended) == (3, "all 3 steps done")


def test_an_asynchronous_run_overlaps_generation_and_training() -> None:
    scene = Scene(sizes(num_steps=20, staleness=1))
    result = scene.run()
    assert result.seconds < 1.0 + 20 * 1.15
    assert all(row["staleness/max"] <= 1 for row in scene.observer.steps)
    assert scene.workers[0].loads == list(range(1, 21))


def test_the_next_step_trains_while_weights_are_published_and_versions_stay_in_order() -> None:
    worker = ScriptedWorker(load_s=0.9, duration=lambda t: 0.1)
    scene = Scene(sizes(num_steps=6, staleness=3), workers=[worker])
    result = scene.run()
    assert worker.loads == [1, 2, 3, 4, 5, 6]
    assert result.seconds < 6 * (1.0 + 0.9)
    assert all(row["staleness/max"] <= 3 for row in scene.observer.steps)


def test_an_export_waits_until_the_previous_version_is_live() -> None:
    worker, exported = ScriptedWorker(load_s=5.0), []

    class Learner(ScriptedLearner):
        async def export_weights(self, version: int):  # type: ignore[no-untyped-def]
            exported.append((version, worker.version))
            return await super().export_weights(version)

    Scene(sizes(staleness=4), workers=[worker], learner=Learner()).run()
    assert exported == [(1, 0), (2, 1), (3, 2), (4, 3)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_task_is_drawn_beyond_need_and_nothing_is_in_flight_at_the_end(staleness: int) -> None:
    drawn: list[int] = []

    def tasks() -> Iterator[Task]:
        for i in range(10**6):
            drawn.append(i)
            yield Task(prompt=str(i), position=i)

    scene = Scene(sizes(staleness=staleness), tasks=tasks(), keep=lambda s: "odd" if s.group_id % 2 else None)
    result = scene.run()
    assert scene.learner.trained_ids == list(range(0, 24, 2))
    assert (result.counts.in_flight, result.counts.submitted) == (0, len(drawn))
    assert len(drawn) == 23


def test_a_failed_group_is_tried_again_under_the_same_id() -> None:
    def outcome(group_request: GroupRequest) -> list[MemberSummary] | None:
        return [failed_member(), member()] if (group_request.group_id, group_request.attempt) == (1, 0) else None

    scene = Scene(sizes(num_steps=1), workers=[ScriptedWorker(outcome=outcome)])
    counts = scene.run().counts
    assert [(t.group_id, t.attempt) for t in scene.workers[0].seen] == [(0, 0), (1, 0), (2, 0), (1, 1)]
    assert (counts.submitted, counts.trained) == (3, 3)
    assert scene.observer.steps[0]["failures/retries"] == 1
    assert scene.observer.steps[0]["failures/env_error"] == 1
    assert scene.learner.trained_ids == [0, 1, 2]


def test_a_group_that_keeps_failing_is_dropped_and_replaced() -> None:
    def outcome(group_request: GroupRequest) -> list[MemberSummary] | None:
        return [member(None, Status.TIMEOUT, error="step: 60 s"), member()] if group_request.group_id == 1 else None

    scene = Scene(sizes(max_attempts=3), workers=[ScriptedWorker(outcome=outcome)])
    result = scene.run()
    assert [t.attempt for t in scene.workers[0].seen if t.group_id == 1] == [0, 1, 2]
    assert result.counts.dropped == {"timeout": 1}
    assert scene.learner.trained_ids == [0, *range(2, 13)]
    assert scene.observer.steps[-1]["dropped/timeout"] == 1


def test_members_that_failed_in_a_fine_group_are_left_out_of_the_figures() -> None:
    scene = Scene(sizes(num_steps=1), workers=[ScriptedWorker(outcome=lambda t: [member(1.0), failed_member(), member(0.5)])])
    scene.run()
    row = scene.observer.steps[0]
    assert (row["reward/mean"], row["episode/count"], row["failures/env_error"]) == (0.75, 6, 3)
    assert row["failures/groups"] == 0


def test_too_many_failures_end_the_run_with_their_causes() -> None:
    scene = Scene(sizes(), workers=[ScriptedWorker(outcome=lambda t: [failed_member("ZeroDivisionError: in step")] * 2)])
    with pytest.raises(TooManyFailuresError, match=r"8 of the last 8 attempts at groups failed(.|\n)*16 x ZeroDivisionError: in step"):
        scene.run()


def test_a_filter_that_rejects_everything_ends_the_run() -> None:
    scene = Scene(sizes(), keep=lambda s: "zero_variance")
    with pytest.raises(NothingToTrainError, match="0 of the last 512"):
        scene.run()
    assert scene.learner.steps == []


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_when_tasks_run_out_the_rest_is_trained_as_a_smaller_step(staleness: int) -> None:
    scene = Scene(sizes(num_steps=50, staleness=staleness), tasks=first(8), keep=lambda s: "third" if s.group_id == 2 else None)
    result = scene.run()
    assert scene.learner.steps == [["ref 0", "ref 1", "ref 3"], ["ref 4", "ref 5", "ref 6"], ["ref 7"]]
    assert result.ended == "tasks ran out after 3 of 50 steps; the last step had 1 of 3 groups"
    assert (result.counts.trained, result.counts.filtered, result.counts.in_flight) == (7, {"third": 1}, 0)


def test_when_tasks_run_out_evenly_there_is_no_smaller_step() -> None:
    assert Scene(sizes(num_steps=50), tasks=first(6)).run().ended == "tasks ran out after 2 of 50 steps"


def test_nothing_to_train_on_is_an_error_that_says_why() -> None:
    with pytest.raises(NothingToTrainError, match="not a single task"):
        Scene(sizes(), tasks=first(0)).run()
    with pytest.raises(NothingToTrainError, match=r"all 5 groups were filtered \(dull: 5\)"):
        Scene(sizes(), tasks=first(5), keep=lambda s: "dull").run()
    broken = [ScriptedWorker(outcome=lambda t: [failed_member("OSError: no disk")] * 2)]
    with pytest.raises(TooManyFailuresError, match=r"2 of 2 failed(.|\n)*OSError: no disk"):
        Scene(sizes(), tasks=first(2), workers=broken).run()


def test_hooks_run_in_order_while_the_learner_is_idle() -> None:
    calls: list[tuple[str, int, int]] = []
    scene = Scene(sizes(staleness=1))

    async def save(point: SafePoint) -> None:
        calls.append(("save", point.step, len(scene.learner.steps)))

    async def look(point: SafePoint) -> None:
        calls.append(("look", point.step, len(scene.learner.steps)))

    scene.after_step = [save, look]
    scene.run()
    assert calls == [(name, step, step) for step in range(1, 5) for name in ("save", "look")]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_what_a_hook_says_is_in_the_metrics_of_its_step_and_its_weights_stay_live(staleness: int) -> None:
    worker = ScriptedWorker(load_s=0.7)
    scene = Scene(sizes(staleness=staleness), workers=[worker])

    async def look(point: SafePoint) -> dict[str, float]:
        await point.until_live()
        before = worker.version
        await anyio.sleep(20.0)
        return {"seen/before": before, "seen/after": worker.version}

    async def mute(point: SafePoint) -> None:
        return None

    scene.after_step = [look, mute]
    scene.run()
    assert [(row["step"], row["seen/before"], row["seen/after"]) for row in scene.observer.steps] == [(i, i, i) for i in range(1, 5)]
    assert all(row["staleness/max"] <= staleness for row in scene.observer.steps)


def test_step_metrics() -> None:
    def outcome(group_request: GroupRequest) -> list[MemberSummary]:
        same = group_request.group_id % 3 == 0
        values = [1.0, 1.0] if same else [0.0, 1.0]
        return [
            member(values[0], num_tokens=10, truncated=True, metrics={"guesses": 2.0}, timings={"env_s": 0.25}),
            member(values[1], num_tokens=30, metrics={"guesses": 4.0, "bonus": 1.0}, timings={"env_s": 0.75}),
        ]

    worker = ScriptedWorker(outcome=outcome, load_s=0.5)
    scene = Scene(sizes(num_steps=2), workers=[worker], learner=ScriptedLearner(train_s=lambda step: 2.5))
    scene.run()
    row = scene.observer.steps[1]
    expected = {
        "step": 2.0,
        "time_s": 8.0,
        "reward/mean": 4 / 6,
        "score/mean": 4 / 6,
        "reward/std": (2 / 9) ** 0.5,
        "reward/unfiltered_mean": 4 / 6,
        "group/zero_variance": 1 / 3,
        "group/pass_rate": 1.0,
        "episode/tokens_mean": 20.0,
        "episode/tokens_max": 30.0,
        "episode/truncated": 0.5,
        "episode/overflowed": 0.0,
        "episode/turns_mean": 2.0,
        "episode/env_s": 0.5,
        "env/guesses": 3.0,
        "env/bonus": 1.0,
        "tokens": 120.0,
        "tokens_per_s": 120 / 4.0,
        "idle/learner": 1 - 2.5 / 4.0,
        "idle/generator": 1 - 3 * 1.0 / 4.0,
        "publish/seconds": 0.5,
        "publish/pause_s": 0.5,
        "queue/wait_s": 0.0,
        "queue/depth": 0.0,
        "staleness/mean": 0.0,
        "staleness/admission_mean": 0.0,
        "staleness/admission_share_0": 1.0,
        "loss/policy": 0.5,
        "ledger/submitted": 6,
        "ledger/trained": 6,
        "ledger/in_flight": 0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_the_pass_rate_is_that_of_the_ledger() -> None:
    scene = Scene(sizes(num_steps=1), keep=lambda s: "odd" if s.group_id % 2 else None)
    counts = scene.run().counts
    assert scene.observer.steps[0]["group/pass_rate"] == counts.trained / (counts.trained + counts.filtered["odd"]) == 3 / 5


def test_the_observer_sees_every_attempt_and_every_step() -> None:
    scene = Scene(sizes(num_steps=2))
    scene.run()
    assert [s.group_id for s in scene.observer.groups] == list(range(6))
    assert [row["step"] for row in scene.observer.steps] == [1, 2]
    assert scene.observer.stages == ["first groups", "first training step"]
