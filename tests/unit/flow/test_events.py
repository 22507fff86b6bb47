"""The events of a run: their order and what they say, callbacks that fail, are slow or ask for the end, and going on afterwards."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from agentrl.config.mapping import to_json
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.callbacks import Callback, CheckpointWritten, GroupJudged, RunEnd, StepEnd
from agentrl.core.errors import CallbackError, TooManyFailuresError
from agentrl.core.types import Status
from agentrl.flow.checkpoint import Progress, latest_checkpoint, read_checkpoint
from agentrl.flow.driver import RunResult, train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.saving import Checkpoints
from agentrl.flow.state import StopRequest
from agentrl.resolve.parts import track_plan
from agentrl.track.callbacks import CallbackLike, UserCallbacks
from agentrl.track.jsonl import read_lines
from agentrl.track.tracker import open_tracker
from tests.simulation import run_virtual
from tests.unit.flow.fakes import Scene, ScriptedLearner, ScriptedWorker, endless_tasks, failed_member, flow_of, member

SIZES = flow_of(num_steps=4, groups_per_step=2, n_samples_per_prompt=2)


@pytest.mark.parametrize(
    ("outcome", "verdicts"),
    [
        ([member(1.0), member(0.0)], [("kept", 0, "")]),
        ([member(1.0), member(1.0)], [("filtered", 0, "too good")]),
        ([failed_member(), failed_member()], [("retried", 0, "env_error"), ("dropped", 1, "env_error")]),
        ([member(None, Status.NOT_SCORED)] * 2, [("filtered", 0, "not_scored")]),
        ([member(None, Status.NOT_SCORED), failed_member()], [("retried", 0, "env_error"), ("dropped", 1, "env_error")]),
    ],
)
def test_a_group_is_told_with_what_became_of_it(outcome: list[Any], verdicts: list[tuple[str, int, str]]) -> None:
    first = ScriptedWorker(outcome=lambda group_request: outcome if group_request.group_id == 0 else None)
    scene = Scene(
        SIZES, workers=[first], keep=lambda summary: "too good" if summary.members[1].reward == 1.0 and not summary.group_id else None
    )
    scene.run()
    judged = [event for event in scene.observer.events if isinstance(event, GroupJudged)]
    assert [(event.verdict, event.attempt, event.reason) for event in judged if event.group_id == 0] == verdicts
    told = judged[0]
    assert (told.task_id, told.rewards, told.kept) == ("0", tuple(m.reward for m in outcome), verdicts[0][0] == "kept")
    assert told.statuses == tuple(m.status for m in outcome)
    assert [event.step for event in scene.observer.events if isinstance(event, StepEnd)] == [1, 2, 3, 4]


def test_a_group_that_ends_the_run_is_told_before() -> None:
    worker = ScriptedWorker(outcome=lambda group_request: [failed_member()] * 2)
    scene = Scene(flow_of(num_steps=4, groups_per_step=8, n_samples_per_prompt=2), workers=[worker])
    with pytest.raises(TooManyFailuresError):
        scene.run()
    assert len(scene.observer.groups) == 8


def run(folder: Path, *callbacks: CallbackLike, progress: Progress | None = None, staleness: int = 0, **track: Any) -> RunResult:
    """Train 6 steps in real time, with a checkpoint only where the run is stopped."""
    config = changed(TrainConfig(), num_steps=6, tensorboard=False, record="none", **track)
    settings = flow_of(num_steps=6, groups_per_step=2, n_samples_per_prompt=2, max_staleness=staleness)
    learner = ScriptedLearner(train_s=lambda step: 0.01, steps=[[] for _ in range(progress.step if progress else 0)])

    worker = ScriptedWorker(duration=lambda group_request: 0.01, load_s=0.0, version=progress.step if progress else 0)

    async def go() -> RunResult:
        stop = StopRequest()
        tracker = open_tracker(
            track_plan(config), folder, title="t", callbacks=callbacks, ask_stop=stop.ask, console=Console(file=io.StringIO(), width=100)
        )
        status, reason = "failed", None
        try:
            await tracker.begin(json.loads(to_json(config)), read_lines(folder / "metrics.jsonl"))
            result = await train(
                settings=settings,
                pool=RolloutPool({"engine-0": worker}),
                learner=learner,
                tasks=endless_tasks(),
                observer=tracker,
                progress=progress,
                checkpoints=Checkpoints(folder, learner, every=0, num_steps=6, keep=2, config="{}"),
                stop=stop,
            )
            status, reason = "interrupted" if result.stopped else "finished", result.stop_reason or None
            return result
        finally:
            await tracker.finish(status=status, stop_reason=reason)

    return anyio.run(go)


class StopsAfterTwo(Callback):
    """Asks for the end after step 2, and keeps what it is told."""

    def __init__(self) -> None:
        self.begun: tuple[bool, int] = (False, -1)
        self.steps: list[int] = []
        self.checkpoints: list[tuple[int, bool]] = []
        self.ended = ""

    async def on_run_begin(self, event: Any) -> None:
        self.begun = event.resumed, event.step

    def on_step_end(self, event: StepEnd) -> dict[str, float]:
        self.steps.append(event.step)
        if event.step == 2:
            self.stop("two are enough")
        return {"my/double": 2.0 * event.step}

    def on_checkpoint(self, event: CheckpointWritten) -> None:
        self.checkpoints.append((event.step, (event.path / "manifest.json").is_file()))

    async def on_run_end(self, event: RunEnd) -> None:
        self.ended = event.status


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_a_callback_stops_is_saved_and_goes_on(tmp_path: Path, staleness: int) -> None:
    first = StopsAfterTwo()
    result = run(tmp_path, first, staleness=staleness)
    assert (result.stopped, result.stop_reason, first.ended) == (True, "StopsAfterTwo: two are enough", "interrupted")
    assert result.ended == f"stopped after {result.steps} of 6 steps by StopsAfterTwo: two are enough"
    assert result.steps in ((2,) if staleness == 0 else (2, 3, 4))  # steps of milliseconds may end before the callback was heard
    assert first.steps == list(range(1, result.steps + 1))
    assert first.checkpoints == [(result.steps, True)]
    saved = latest_checkpoint(tmp_path)
    assert saved is not None
    second = StopsAfterTwo()
    over = run(tmp_path, second, progress=read_checkpoint(saved)[0], staleness=staleness)
    assert (over.stopped, over.steps, second.ended) == (False, 6, "finished")
    assert (second.begun, second.steps) == ((True, result.steps), list(range(result.steps + 1, 7)))
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["my/double"]) for row in rows] == [(step, 2.0 * step) for step in range(1, 7)]


def test_a_wish_to_stop_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    class Late(Callback):
        def on_step_end(self, event: StepEnd) -> None:
            if event.step == 6:
                self.stop("late")

    result = run(tmp_path, Late)
    assert (result.stopped, result.stop_reason, result.steps) == (False, "", 6)


@pytest.mark.parametrize("method", ["on_run_begin", "on_group_judged", "on_step_end", "on_metrics"])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_callback_that_raises_ends_the_run_with_its_name(tmp_path: Path, method: str, is_async: bool) -> None:
    ended: list[str] = []

    def broken(self: Callback, event: object) -> None:
        raise KeyError("planted")

    async def broken_async(self: Callback, event: object) -> None:
        raise KeyError("planted")

    def on_run_end(self: Callback, event: RunEnd) -> None:
        ended.append(event.status)

    cls = type("Broken", (Callback,), {method: broken_async if is_async else broken, "on_run_end": on_run_end})
    with pytest.raises(CallbackError, match=rf"callback Broken.{method} raised KeyError: 'planted' \(test_events.py, line \d+, in broken"):
        run(tmp_path, cls)
    assert ended == ["failed"]


def test_a_callback_that_hangs_in_the_middle_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Callback):
        async def on_group_judged(self, event: GroupJudged) -> None:
            if event.group_id == 3:
                await anyio.sleep_forever()

    monkeypatch.setattr("agentrl.track.tracker.UserCallbacks", partial(UserCallbacks, timeout_s=0.2))
    with pytest.raises(CallbackError, match=r"Hangs.on_group_judged did not return within 0.2 s"):
        run(tmp_path, Hangs)


def test_groups_that_are_given_up_while_a_callback_looks_at_them_are_counted_once() -> None:
    """Oversampled groups: a callback that takes long holds the judging of groups up, and the step goes on without them."""
    scene = Scene(flow_of(num_steps=3, groups_per_step=2, n_samples_per_prompt=2, oversample=1.0))
    notify = scene.observer.notify

    async def slowly(event: Any) -> None:
        await notify(event)
        if isinstance(event, GroupJudged):
            await anyio.sleep(3.0)

    scene.observer.notify = slowly  # type: ignore[method-assign]
    result = scene.run()
    counts = result.counts
    assert (counts.trained, counts.in_flight) == (6, 0)
    assert counts.submitted == counts.trained + sum(counts.dropped.values())


def test_a_simulated_run_tells_the_same_events() -> None:
    scene = Scene(SIZES)
    assert run_virtual(scene.go).steps == 4
    assert [type(event).__name__ for event in scene.observer.events] == ["GroupJudged", "GroupJudged", "StepEnd"] * 4
