"""Only the learner's part of a checkpoint keeps the next step waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.flow.checkpoint import Progress, latest_checkpoint
from agentrl.flow.driver import train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.saving import Checkpoints
from agentrl.flow.state import SafePoint
from tests.simulation import run_virtual
from tests.unit.flow.fakes import Recorder, ScriptedLearner, ScriptedWorker, endless_tasks, flow_of


class SlowDisk:
    """The learner's part takes a while, the rest takes longer."""

    def __init__(self, learner_s: float, rest_s: float) -> None:
        self.learner_s, self.rest_s = learner_s, rest_s
        self.written: list[tuple[float, float]] = []
        self.busy = False

    def due(self, step: int) -> bool:
        return True

    def metrics(self) -> dict[str, float]:
        return {}

    @asynccontextmanager
    async def saving(self, progress: Progress) -> AsyncIterator[None]:
        assert not self.busy
        self.busy = True
        await anyio.sleep(self.learner_s)
        begin = asyncio.get_running_loop().time()
        yield
        await anyio.sleep(self.rest_s)
        self.written.append((begin, asyncio.get_running_loop().time()))
        self.busy = False


@pytest.mark.parametrize(("rest_s", "pause_s"), [(0.5, 0.25), (30.0, 30.25)])
def test_the_next_step_begins_before_the_checkpoint_is_complete(rest_s: float, pause_s: float) -> None:
    disk, learner = SlowDisk(0.25, rest_s), ScriptedLearner(train_s=lambda step: 1.0)
    settings = flow_of(num_steps=4, groups_per_step=2, n_samples_per_prompt=2, max_staleness=3)
    worker = ScriptedWorker(duration=lambda group_request: 0.01, load_s=0.01)
    pool = RolloutPool({"engine-0": worker})
    result = run_virtual(
        lambda: train(
            settings=settings, pool=pool, learner=learner, tasks=endless_tasks(), observer=Recorder(),
            checkpoints=disk,  # type: ignore[arg-type]
        )
    )  # fmt: skip
    assert result.steps == len(disk.written) == 4  # the last one is waited for
    (_, first_ends), (second_begins, _), *_ = learner.spans
    assert second_begins - first_ends == pytest.approx(0.25, abs=0.05)
    assert second_begins < disk.written[0][1]
    # One that takes longer than a step keeps the next one waiting, so that they do not pile up.
    (_, second_ends), (third_begins, _) = learner.spans[1:3]
    assert third_begins - second_ends == pytest.approx(max(0.25, pause_s - 1.0), abs=0.1)


def test_a_checkpoint_is_complete_when_what_runs_beside_the_next_step_has_ended() -> None:
    """So a run that is killed in an evaluation is resumed before the step that was measured, and measures it again."""
    disk, learner = SlowDisk(0.25, 0.5), ScriptedLearner(train_s=lambda step: 1.0)
    settings = flow_of(num_steps=4, groups_per_step=2, n_samples_per_prompt=2, max_staleness=3)
    pool = RolloutPool({"engine-0": ScriptedWorker(duration=lambda group_request: 0.01, load_s=0.01)})
    ended: list[float] = []

    async def work() -> dict[str, float]:
        await anyio.sleep(20.0)
        ended.append(asyncio.get_running_loop().time())
        return {"late": 1.0}

    async def hook(point: SafePoint) -> None:
        if point.step == 2:
            point.beside(work)

    recorder = Recorder()
    run_virtual(
        lambda: train(
            settings=settings, pool=pool, learner=learner, tasks=endless_tasks(), observer=recorder, after_step=[hook],
            checkpoints=disk,  # type: ignore[arg-type]
        )
    )  # fmt: skip
    second_begun, second_complete = disk.written[1]
    assert second_begun < ended[0] <= second_complete - 0.5
    assert learner.spans[2][0] < ended[0] < learner.spans[3][0]  # one step was trained meanwhile, and not another
    assert [row.get("late") for row in recorder.steps] == [None, 1.0, None, None]


@pytest.mark.anyio
async def test_a_run_that_is_cancelled_finishes_the_checkpoint_that_it_has_begun_to_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, complete = threading.Event(), Checkpoints._complete

    def slowly(self: Checkpoints, *args: Any) -> None:
        begun.set()
        time.sleep(0.2)
        complete(self, *args)

    monkeypatch.setattr(Checkpoints, "_complete", slowly)
    checkpoints = Checkpoints(tmp_path, ScriptedLearner(), every=1, num_steps=9, keep=2, config="{}")

    async def save() -> None:
        async with checkpoints.saving(Progress(step=1)):
            pass

    async with anyio.create_task_group() as group:
        group.start_soon(save)
        assert await asyncio.to_thread(begun.wait, 10)
        group.cancel_scope.cancel()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00000001"


@pytest.mark.anyio
async def test_a_run_that_is_cancelled_while_the_learner_writes_leaves_nothing(tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(ScriptedLearner):
        async def save_checkpoint(self, path: str, step: int) -> None:
            await asyncio.to_thread(write, Path(path))

    def write(folder: Path) -> None:
        begun.set()
        assert goes_on.wait(10)
        (folder / "late").mkdir(parents=True)
        (folder / "late" / "part").write_text("x")

    checkpoints = Checkpoints(tmp_path, Slow(), every=1, num_steps=9, keep=2, config="{}")

    async def save() -> None:
        async with checkpoints.saving(Progress(step=1)):
            raise AssertionError("it was cancelled before")

    async with anyio.create_task_group() as group:
        group.start_soon(save)
        assert await asyncio.to_thread(begun.wait, 10)
        group.cancel_scope.cancel()
        asyncio.get_running_loop().call_later(0.2, goes_on.set)
    assert goes_on.is_set()
    assert list((tmp_path / "checkpoints").iterdir()) == []
