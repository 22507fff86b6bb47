"""Any task of the driver that raises ends the run, at once and with its own traceback; no task is left without such a test."""

from __future__ import annotations

import asyncio
import importlib
import re
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from agentrl.flow.checkpoint import Progress
from agentrl.flow.driver import RunResult, train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.state import SafePoint
from agentrl.flow.worker_slots import Supervision
from tests.faults.report import Saw
from tests.unit.flow.fakes import Recorder, ScriptedLearner, ScriptedWorker, endless_tasks, flow_of

PLACES = {
    "admit": "agentrl.flow.driver.admit",
    "collect": "agentrl.flow.driver.collect",
    "train": "agentrl.flow.driver.train_steps",
    "publish": "agentrl.flow.driver.publish",
    "attempts": "agentrl.flow.driver.run_attempts",
    "group-*": "agentrl.flow.loops.run_attempt",
    "watchdog": "agentrl.flow.driver.watch_for_stall",
    "save": "agentrl.flow.loops._save",
    "stop": "agentrl.flow.driver.stop_when_asked",
    "supervise": "agentrl.flow.pool.RolloutPool.supervise",
    "supervise engine-*": "agentrl.flow.pool.RolloutPool._keep",
}
"""Name of a task -> the function that it runs."""


class Disk:
    """Saves nothing."""

    def due(self, step: int) -> bool:
        return True

    def metrics(self) -> dict[str, float]:
        return {}

    @asynccontextmanager
    async def saving(self, progress: Progress) -> AsyncIterator[None]:
        await anyio.sleep(0.001)
        yield


async def go() -> RunResult:
    """A run with everything in it, in real time and without end."""

    async def respawn(name: str) -> ScriptedWorker:
        return ScriptedWorker()

    async def hook(point: SafePoint) -> None:
        await point.until_live()

    workers = [ScriptedWorker(duration=lambda group_request: 0.01, load_s=0.001) for _ in range(2)]
    pool = RolloutPool({f"engine-{i}": worker for i, worker in enumerate(workers)}, Supervision(respawn=respawn, check_every_s=0.05))
    return await train(
        settings=flow_of(num_steps=10**6, groups_per_step=2, n_samples_per_prompt=2, max_staleness=1),
        pool=pool,
        learner=ScriptedLearner(train_s=lambda step: 0.01),
        tasks=endless_tasks(),
        observer=Recorder(),
        after_step=[hook],
        checkpoints=Disk(),  # type: ignore[arg-type]
    )


def pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


@pytest.mark.row(19, "task {name} raises half a second into the run")
@pytest.mark.parametrize("name", PLACES)
def test_a_background_task_that_raises_ends_the_run(name: str, monkeypatch: pytest.MonkeyPatch, saw: Saw) -> None:
    begin, hit, left = time.monotonic(), [0.0], list[str]()

    async def planted(*args: object, **kwargs: object) -> None:
        await anyio.sleep(max(0.0, begin + 0.5 - time.monotonic()))
        hit[0] = time.monotonic()
        raise ZeroDivisionError("planted")

    owner, _, attribute = PLACES[name].rpartition(".")
    module, _, cls = owner.rpartition(".")
    holder = getattr(importlib.import_module(module), cls) if cls[0].isupper() else importlib.import_module(owner)
    monkeypatch.setattr(holder, attribute, planted)

    async def main() -> None:
        try:
            await go()
        finally:
            left.extend(task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()})

    with pytest.raises(ZeroDivisionError, match="planted") as caught:
        anyio.run(main)
    seconds = time.monotonic() - hit[0]
    assert seconds < 5.0
    assert "planted" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert left == []
    saw(f"ended {seconds * 1000:.0f} ms later with that traceback; no task left")


@pytest.mark.row(19, "(nothing: the names of all tasks of a healthy run)")
def test_every_background_task_is_tested(saw: Saw) -> None:
    names: set[str] = set()

    async def main() -> None:
        run = asyncio.create_task(go(), name="run")
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < 0.5 or (passed < 10.0 and not names >= set(PLACES)):
            await anyio.lowlevel.checkpoint()
            names.update(pattern(task.get_name()) for task in asyncio.all_tasks() - {asyncio.current_task(), run})
        run.cancel()

    anyio.run(main)
    unnamed = {"Task-*"}  # parts of a wait that is one of the others', such as the loads of one publication
    assert names - unnamed == set(PLACES)
    saw(f"{len(PLACES)} kinds of task, each of them tested")
