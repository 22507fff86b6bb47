"""Errors, stalls and cancellation: the run ends at once, says why, and leaves nothing running."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator

import anyio
import pytest

from agentrl.core.callbacks import Event, StepEnd
from agentrl.core.errors import EngineDeadError, LearnerError, LedgerError, StallError, TooManyFailuresError, WeightSyncError
from agentrl.core.protocols import TrainResult, WeightUpdate
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest, Task
from agentrl.flow.driver import first_cause
from tests.unit.flow.fakes import Recorder, Scene, ScriptedLearner, ScriptedWorker, failed_member, flow_of, group_summary

SIZES = flow_of(num_steps=5, groups_per_step=3, n_samples_per_prompt=2, max_staleness=1)


def real_time() -> Scene:
    """A run in real time whose groups never end, except the first ones."""
    worker = ScriptedWorker(duration=lambda t: 0.01 if t.group_id < 3 else 3600.0, load_s=0.0)
    return Scene(SIZES, workers=[worker], learner=ScriptedLearner(train_s=lambda step: 0.01))


def break_worker(scene: Scene) -> None:
    def die(group_request: GroupRequest) -> None:
        raise EngineDeadError("planted")

    scene.workers[0].outcome = die


def break_learner(scene: Scene) -> None:
    class Broken(ScriptedLearner):
        async def train(self, step: int, groups: object) -> TrainResult:
            raise LearnerError("planted")

    scene.learner = Broken()


def break_publication(scene: Scene) -> None:
    scene.workers[0].reported = lambda version: version + 7


def break_filter(scene: Scene) -> None:
    def keep(summary: GroupSummary) -> str | None:
        raise KeyError("planted")

    scene.keep = keep


def break_observer(scene: Scene) -> None:
    class Broken(Recorder):
        async def notify(self, event: Event) -> None:
            if isinstance(event, StepEnd):
                raise OSError("planted")

    scene.observer = Broken()


def break_tasks(scene: Scene) -> None:
    def tasks() -> Iterator[Task]:
        yield Task("fine")
        raise RuntimeError("planted")

    scene.tasks = tasks()


def break_hook(scene: Scene) -> None:
    async def hook(step: int) -> None:
        raise ArithmeticError("planted")

    scene.after_step = [hook]


def break_answer(scene: Scene) -> None:
    class Confused(ScriptedWorker):
        async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
            return group_summary(GroupRequest(group_id=99, task=group_request.task, n_samples_per_prompt=2, version=0), (0, 0)), "ref"

    scene.workers = [Confused()]


def break_export(scene: Scene) -> None:
    class Off(ScriptedLearner):
        async def export_weights(self, version: int) -> WeightUpdate:
            return WeightUpdate(version=version + 1, transport="scripted")

    scene.learner = Off(train_s=lambda step: 0.01)


FAULTS: list[tuple[Callable[[Scene], None], type[Exception], str]] = [
    (break_worker, EngineDeadError, "die"),
    (break_learner, LearnerError, "train"),
    (break_publication, WeightSyncError, "publish"),
    (break_filter, KeyError, "keep"),
    (break_observer, OSError, "notify"),
    (break_tasks, RuntimeError, "tasks"),
    (break_hook, ArithmeticError, "hook"),
    (break_answer, LedgerError, "run_attempt"),
    (break_export, WeightSyncError, "publish"),
]


@pytest.mark.parametrize(("inject", "error", "place"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_an_error_anywhere_ends_the_run_at_once_with_its_own_traceback(inject: Callable[[Scene], None], error: type, place: str) -> None:
    scene = real_time()
    inject(scene)
    left: list[str] = []

    async def main() -> None:
        try:
            await scene.go()
        finally:
            left.extend(task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()})

    begin = time.monotonic()
    with pytest.raises(error) as caught:
        anyio.run(main)
    assert time.monotonic() - begin < 1.0
    assert place in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert left == []
    assert not scene.workers[0].live


def test_cancellation_leaves_nothing_running() -> None:
    scene, left = real_time(), []

    async def main() -> None:
        run = asyncio.create_task(scene.go())
        await asyncio.sleep(0.1)
        assert scene.workers[0].live
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        left.extend(asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(main())
    assert left == []
    assert not scene.workers[0].live
    assert len(scene.learner.steps) == 1


def test_a_group_that_cleans_up_is_waited_for() -> None:
    cleaned: list[int] = []

    class Tidy(ScriptedWorker):
        async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
            try:
                return await super().run_group(group_request)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.05)
                cleaned.append(group_request.group_id)

    scene = real_time()
    scene.workers = [Tidy(duration=lambda t: 0.0 if t.group_id == 5 else 3600.0)]
    break_filter(scene)
    with pytest.raises(KeyError):
        anyio.run(scene.go)
    assert sorted(cleaned) == list(range(6))


def test_a_stall_says_who_waits_for_what() -> None:
    scene = Scene(SIZES, workers=[ScriptedWorker(duration=lambda t: 1e9 if t.group_id == 4 else 1.0)])
    with pytest.raises(StallError) as caught:
        scene.run()
    text = str(caught.value)
    for part in (
        "--stall-timeout-s 600",
        "train: the 3 oldest groups to be accepted (step 2), for 60",
        "admit: a free slot",
        "publish: a trained step",
        "collect: a group to finish",
        "the oldest is group 4 after 60",
        "workers: engine-0: ready, 2 live episodes",
        "slots in use: 6 of 6; accepted groups waiting: 5; live weights: version 1",
        "group-4",
        "watchdog",
    ):
        assert part in text, text


def test_a_hanging_learner_is_named() -> None:
    scene = Scene(SIZES, learner=ScriptedLearner(train_s=lambda step: 1e9 if step else 1.0))
    with pytest.raises(StallError, match=r"train: the learner to train step 2, for 6"):
        scene.run()


def test_slow_progress_is_no_stall() -> None:
    scene = Scene(SIZES, workers=[ScriptedWorker(duration=lambda t: 500.0)], learner=ScriptedLearner(train_s=lambda step: 590.0))
    assert scene.run().steps == 5


def test_the_first_cause_is_kept_whole_and_the_others_are_named() -> None:
    cause, other = ValueError("first"), OSError("second")
    group = BaseExceptionGroup("outer", [BaseExceptionGroup("inner", [cause]), other])
    assert first_cause(group) is cause
    assert cause.__notes__ == ["Then also: OSError: second"]


def test_a_run_in_which_everything_fails_ends_whatever_rate_is_allowed() -> None:
    worker = ScriptedWorker(outcome=lambda group_request: [failed_member("KeyError: broken")] * group_request.n_samples_per_prompt)
    scene = Scene(flow_of(num_steps=2, groups_per_step=2, n_samples_per_prompt=2, max_failure_rate=1.0), workers=[worker])
    with pytest.raises(TooManyFailuresError, match=r"64 of the last 64 attempts at groups failed, so there is(.|\n)*KeyError: broken"):
        scene.run()
    assert len(worker.seen) < 80
