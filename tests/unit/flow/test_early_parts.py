"""A step's first groups are trained on while its last are still under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import anyio
import pytest

from agentrl.core.errors import EngineDeadError, LearnerError, StallError
from agentrl.core.protocols import TrainResult
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Task, Ticket
from agentrl.flow import FlowSettings, RunResult, train
from agentrl.flow.simulation.learner import LearnerModel, SimulatedLearner
from agentrl.flow.simulation.virtual_time import run_virtual
from agentrl.flow.stop import StopRequest
from agentrl.rollout.pool import RolloutPool
from agentrl.rollout.seat import Supervision
from tests.unit.flow.fakes import Recorder, Scene, ScriptedLearner, ScriptedWorker, endless_tasks, group_summary

SETTINGS = FlowSettings(num_steps=4, groups_per_step=3, num_samples=2, learner_parts=3)
TIMED = ("time", "idle/", "wait_s", "per_s", "seconds")


def late_last(ticket: Ticket) -> float:
    """The last group of each step takes five seconds, the others one."""
    return 5.0 if ticket.group_id % 3 == 2 else 1.0


def scene(settings: FlowSettings, duration: Callable[[Ticket], float] = late_last, train_s: float = 3.0) -> Scene:
    return Scene(settings, workers=[ScriptedWorker(duration=duration)], learner=ScriptedLearner(train_s=lambda step: train_s))


def untimed(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not any(word in name for word in TIMED)}


def test_what_is_there_is_trained_before_the_last_group_comes() -> None:
    whole, parts = scene(replace(SETTINGS, learner_parts=1)), scene(SETTINGS)
    assert whole.run().seconds == pytest.approx(4 * (5.0 + 3.0 + 0.1))
    assert parts.run().seconds == pytest.approx(4 * (5.0 + 1.0 + 0.1))  # two of the three seconds are hidden
    for row in parts.observer.steps:
        assert row["time/train_early_s"] == pytest.approx(2.0)
        assert row["time/train_s"] == row["time/learner_s"] == pytest.approx(3.0)
        assert row["queue/wait_s"] == pytest.approx((0.0 + 1.0 + 0.0) / 3)
        assert row["idle/learner"] == pytest.approx(1.0 - 3.0 / row["time/step_s"])
    assert all("time/train_early_s" not in row for row in whole.observer.steps)


class Telling(ScriptedLearner):
    """Writes down when it begins to train on what; an observer of groups may write beside it."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(train_s=lambda step: 3.0)
        self.events = events

    async def train_part(self, step: int, groups: Sequence[str], *, first: bool, last: bool) -> TrainResult:
        self.events.append("train " + " ".join(ref.removeprefix("ref ") for ref in groups))
        return await super().train_part(step, groups, first=first, last=last)


def test_the_order_of_events() -> None:
    events: list[str] = []

    class Watching(Recorder):
        def on_group(self, summary: GroupSummary) -> None:
            events.append(f"group {summary.group_id} is there")

    run = Scene(
        replace(SETTINGS, num_steps=1), [ScriptedWorker(duration=lambda t: (1.0, 5.0, 9.0)[t.group_id])], Telling(events), Watching()
    )
    run.run()
    assert events == ["group 0 is there", "train 0", "group 1 is there", "train 1", "group 2 is there", "train 2"]


def test_an_engine_that_dies_after_the_first_parts_takes_nothing_from_them() -> None:
    """The groups that it had are run again elsewhere; what is trained is in the queue."""

    class Dying(ScriptedWorker):
        async def run_group(self, ticket: Ticket) -> tuple[GroupSummary, str]:
            result = await super().run_group(ticket)
            if ticket.group_id == 2:
                raise EngineDeadError("planted")
            return result

    events: list[str] = []
    workers = [Dying(duration=late_last), ScriptedWorker(duration=late_last)]

    async def respawn(name: str) -> ScriptedWorker:
        return ScriptedWorker(duration=late_last)

    async def go() -> RunResult:
        pool = RolloutPool({f"engine-{i}": worker for i, worker in enumerate(workers)}, Supervision(respawn=respawn))
        return await train(settings=SETTINGS, pool=pool, learner=Telling(events), tasks=endless_tasks(), observer=Recorder())

    result = run_virtual(go)
    assert events == [f"train {number}" for number in range(12)]
    assert (result.counts.trained, result.counts.in_flight) == (12, 0)
    assert [ticket.group_id for worker in workers for ticket in worker.seen].count(2) == 2


def test_a_learner_that_fails_in_a_part_ends_the_run() -> None:
    class Broken(ScriptedLearner):
        async def train_part(self, step: int, groups: Sequence[str], *, first: bool, last: bool) -> TrainResult:
            if len(self.parts) == 1:
                raise LearnerError("planted")
            return await super().train_part(step, groups, first=first, last=last)

    run = Scene(SETTINGS, [ScriptedWorker(duration=late_last)], Broken())
    with pytest.raises(LearnerError, match="planted"):
        run.run()
    assert run.learner.steps == []


def test_only_what_was_trained_before_the_last_group_is_called_early() -> None:
    run = scene(SETTINGS, duration=lambda t: 1.5 if t.group_id % 3 == 2 else 1.0)
    run.run()
    assert run.observer.steps[0]["time/train_early_s"] == pytest.approx(0.5)
    late_first = scene(SETTINGS, duration=lambda t: 5.0 if t.group_id % 3 == 0 else 1.0)
    late_first.run()
    assert late_first.observer.steps[0]["time/train_early_s"] == 0.0


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_a_synchronous_run_says_the_same_in_parts(parts: int) -> None:
    def duration(ticket: Ticket) -> float:
        return 1.0 + ticket.group_id * 37 % 11

    def filtered(summary: GroupSummary) -> str | None:
        return "odd" if summary.group_id % 4 == 1 else None

    runs = [scene(replace(SETTINGS, groups_per_step=7, learner_parts=count), duration) for count in (1, parts)]
    for run in runs:
        run.keep = filtered
    results = [run.run() for run in runs]
    assert runs[0].learner.steps == runs[1].learner.steps
    assert results[0].counts == results[1].counts
    assert [untimed(row) for row in runs[0].observer.steps] == [untimed(row) for row in runs[1].observer.steps]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_groups_are_trained_in_order_of_admission_within_the_bound(staleness: int) -> None:
    settings = replace(SETTINGS, num_steps=20, max_staleness=staleness, groups_per_step=6)
    run = scene(settings, duration=lambda t: 1.0 + t.group_id * 37 % 11)
    result = run.run()
    assert run.learner.trained_ids == list(range(120))
    assert max(row["staleness/max"] for row in run.observer.steps) <= staleness
    assert (result.counts.trained, result.counts.in_flight) == (120, 0)


def test_parts_are_cut_by_position_whatever_comes_first() -> None:
    events: list[str] = []
    worker = ScriptedWorker(duration=lambda t: 9.0 - t.group_id % 5)
    Scene(replace(SETTINGS, groups_per_step=5, num_steps=2), [worker], Telling(events)).run()
    assert events == ["train 0", "train 1 2", "train 3 4", "train 5", "train 6 7", "train 8 9"]


@pytest.mark.parametrize(("tasks", "last"), [(7, 1), (8, 2), (9, 3)])
def test_a_last_smaller_step_is_ended(tasks: int, last: int) -> None:
    def few() -> Iterator[Task]:
        return (Task(prompt=str(i), position=i) for i in range(tasks))

    run = scene(replace(SETTINGS, num_steps=10))
    run.tasks = few()
    result = run.run()
    assert [len(step) for step in run.learner.steps] == [3, 3, last]
    assert (result.steps, result.counts.trained, result.counts.in_flight) == (3, tasks, 0)


def test_a_group_that_is_filtered_after_its_step_has_begun_is_replaced() -> None:
    run = scene(replace(SETTINGS, num_steps=2))
    run.keep = lambda summary: "late" if summary.group_id == 2 else None
    result = run.run()
    assert run.learner.steps == [["ref 0", "ref 1", "ref 3"], ["ref 4", "ref 5", "ref 6"]]
    assert result.counts.filtered == {"late": 1}


def test_a_stop_gives_up_the_step_that_is_not_complete_and_resumption_repeats_it() -> None:
    run = scene(SETTINGS)
    stop = StopRequest()

    async def go() -> RunResult:
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                await anyio.sleep(6.1 + 3.5)  # in step 2, after its first parts
                assert run.learner.parts
                stop.ask()

            tasks.start_soon(ask)
            pool = RolloutPool({"engine-0": run.workers[0]})
            return await train(
                settings=run.settings, pool=pool, learner=run.learner, tasks=endless_tasks(), observer=run.observer, stop=stop
            )

    result = run_virtual(go)
    assert (result.steps, result.stopped) == (1, True)
    assert (result.counts.trained, result.counts.in_flight) == (3, 3)  # the first groups of step 2 too


def test_a_learner_that_hangs_in_a_part_is_named() -> None:
    run = scene(replace(SETTINGS, learner_parts=2), train_s=1e9)
    with pytest.raises(StallError, match=r"train: the learner to train step 1, part 1 of 2, for 6"):
        run.run()
    late = scene(SETTINGS, duration=lambda t: 1e9 if t.group_id == 1 else 1.0)
    with pytest.raises(StallError, match=r"train: the 2 oldest groups to be accepted \(step 1, part 2 of 3\), for "):
        late.run()


@pytest.mark.parametrize(
    ("groups", "parts", "spare", "ends"), [(16, 4, 0, [4, 8, 12, 16]), (5, 3, 0, [1, 3, 5]), (2, 4, 0, [1, 2]), (8, 4, 2, [8])]
)
def test_no_part_is_empty_and_spare_groups_make_one(groups: int, parts: int, spare: int, ends: list[int]) -> None:
    assert replace(SETTINGS, groups_per_step=groups, learner_parts=parts, spare_groups=spare).part_ends == ends


def test_the_simulated_learner_takes_as_long_in_parts_as_at_once() -> None:
    async def seconds(parts: int) -> float:
        learner = SimulatedLearner(LearnerModel(step_s=2.0, token_s=0.1, overhead_s=0.5, noise=lambda rng: rng.uniform(0.5, 2.0)))
        tickets = [Ticket(group_id=i, task=Task("x"), num_samples=2 + i, version=0) for i in range(4)]
        groups = [group_summary(ticket, (0, 0)) for ticket in tickets]
        if parts == 1:
            return (await learner.train(0, groups)).seconds
        results = [await learner.train_part(0, groups[i : i + 1], first=i == 0, last=i == 3) for i in range(4)]
        return sum(result.seconds for result in results)

    assert run_virtual(lambda: seconds(1)) == pytest.approx(run_virtual(lambda: seconds(4)))
