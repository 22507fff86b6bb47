"""Killed or stopped at any time and continued from the last checkpoint, again and again: every task once, none skipped."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from unittest.mock import patch

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.types import GroupRequest, Task
from agentrl.env.sampling import Sampling, TaskSampler
from agentrl.env.tasks import TaskSource
from agentrl.flow.checkpoint import Progress, repeated_tasks
from agentrl.flow.driver import RunResult, train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.state import StopRequest
from tests.property.test_flow_staleness import Script, bounded, scripts
from tests.unit.flow.fakes import Recorder, ScriptedLearner, ScriptedWorker, run_virtual

NUM_TASKS = 7


class Disk:
    """Keeps the newest complete checkpoint, as JSON, and how many metrics were handed on by then."""

    def __init__(self, every: int, save_s: float, observer: Recorder) -> None:
        self.every, self.save_s, self.observer = every, save_s, observer
        self.saved = json.dumps(Progress().to_json())

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def metrics(self) -> dict[str, float]:
        return {}

    @asynccontextmanager
    async def saving(self, progress: Progress) -> AsyncIterator[None]:
        await anyio.sleep(self.save_s)
        yield
        await anyio.sleep(self.save_s)
        assert len(self.observer.steps) >= progress.step  # a crash from now on loses no metrics
        self.saved = json.dumps(progress.to_json())

    @property
    def progress(self) -> Progress:
        return Progress.from_json(json.loads(self.saved))


class Killed(Exception):
    pass


def run_in_parts(
    script: Script,
    staleness: int,
    size: int,
    num_steps: int,
    ends: list[tuple[float, bool]],
    every: int,
    sampling: Sampling | None = None,
) -> tuple[RunResult, ScriptedLearner, dict[int, GroupRequest], Recorder]:
    learner, observer, seen = ScriptedLearner(train_s=script.train_s), Recorder(), dict[int, GroupRequest]()
    disk = Disk(every, 0.2, observer)

    async def part(limit_s: float, killed: bool) -> RunResult:
        worker = ScriptedWorker(duration=script.duration, outcome=script.outcome, load_s=0.3)
        tasks = TaskSource(lambda: [Task(str(i)) for i in range(NUM_TASKS)], origin="test", seed=script.seed, sampling=sampling)
        progress = disk.progress
        del learner.steps[progress.step :], observer.steps[progress.step :]
        repeat = repeated_tasks(tasks, progress)
        stop = StopRequest()
        if not killed:
            asyncio.get_running_loop().call_later(limit_s, stop.ask)
        with anyio.move_on_after(limit_s if killed else math.inf):
            result = await train(
                settings=bounded(staleness, size, num_steps), pool=RolloutPool({"engine-0": worker}), learner=learner, tasks=tasks,
                observer=observer, keep=script.keep, progress=progress, repeat=repeat, checkpoints=disk, stop=stop,  # type: ignore[arg-type]
            )  # fmt: skip
            if result.stopped:
                assert disk.progress.step == result.steps == len(learner.steps) == len(observer.steps)
                assert not worker.live
            seen.update({group_request.group_id: group_request for group_request in worker.seen})
            return result
        seen.update({group_request.group_id: group_request for group_request in worker.seen})
        raise Killed

    for limit_s, killed in ends:
        try:
            result = run_virtual(lambda limit_s=limit_s, killed=killed: part(limit_s, killed))
        except Killed:
            continue
        if not result.stopped:
            return result, learner, seen, observer
    return run_virtual(lambda: part(math.inf, True)), learner, seen, observer


@pytest.mark.parametrize("staleness", [0, 1, 3])
@given(
    script=scripts,
    size=st.integers(1, 4),
    num_steps=st.integers(1, 8),
    ends=st.lists(st.tuples(st.floats(0.1, 40.0), st.booleans()), min_size=1, max_size=10),
    every=st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_every_task_is_trained_filtered_or_dropped_exactly_once(
    staleness: int, script: Script, size: int, num_steps: int, ends: list[tuple[float, bool]], every: int
) -> None:
    result, learner, seen, observer = run_in_parts(script, staleness, size, num_steps, ends, every)
    counts = result.counts
    fates = [script.fate(group_id) for group_id in range(counts.submitted)]
    assert learner.trained_ids == [group_id for group_id, fate in enumerate(fates) if fate == "trained"]
    assert [len(step) for step in learner.steps] == [size] * num_steps
    assert (counts.trained, counts.filtered.get("unwanted", 0), sum(counts.dropped.values()), counts.in_flight) == (
        *(fates.count(fate) for fate in ("trained", "filtered", "dropped")),
        0,
    )
    for group_id in range(counts.submitted):  # group n is the nth task of the endless order, whenever it ran
        assert divmod(group_id, NUM_TASKS) == (seen[group_id].task.epoch, seen[group_id].task.position)
    assert [row["step"] for row in observer.steps] == list(range(1, num_steps + 1))
    assert max(row["staleness/max"] for row in observer.steps) <= staleness
    if staleness == 0:
        uninterrupted = run_in_parts(script, 0, size, num_steps, [], every)
        names = [name for name in observer.steps[0] if name.startswith(("ledger", "failures", "reward", "group/pass_rate"))]
        for mine, other in zip(observer.steps, uninterrupted[3].steps, strict=True):
            assert [mine.get(name) for name in names] == [other.get(name) for name in names]


@pytest.mark.parametrize("staleness", [0, 2])
@given(
    script=scripts,
    rule=st.sampled_from(["curriculum", "failures", "learnability"]),
    size=st.integers(1, 4),
    num_steps=st.integers(1, 8),
    ends=st.lists(st.tuples(st.floats(0.1, 40.0), st.booleans()), min_size=1, max_size=10),
    every=st.integers(1, 3),
)
@settings(max_examples=30, deadline=None)
def test_draws_by_pass_rate_survive_interruptions(
    staleness: int, script: Script, rule: str, size: int, num_steps: int, ends: list[tuple[float, bool]], every: int
) -> None:
    """Each draw of a task is closed once, whenever it ran; synchronous runs draw the very tasks of an uninterrupted one."""
    sampling = Sampling(rule=rule, exploration=0.2)
    result, learner, seen, _ = run_in_parts(script, staleness, size, num_steps, ends, every, sampling)
    submitted = range(result.counts.submitted)
    assert learner.trained_ids == [group_id for group_id in submitted if script.fate(group_id) == "trained"]
    draws: dict[int, list[int]] = {}
    for group_id in submitted:
        task = seen[group_id].task
        assert task.id == str(task.position)
        draws.setdefault(task.position, []).append(task.epoch)
    assert all(sorted(epochs) == list(range(len(epochs))) for epochs in draws.values())
    if rule == "curriculum":
        counts = [len(draws.get(position, [])) for position in range(NUM_TASKS)]
        assert max(counts) - min(counts) <= 1
    if staleness == 0:
        uninterrupted = run_in_parts(script, 0, size, num_steps, [], every, sampling)[2]
        assert [seen[group_id].task for group_id in submitted] == [uninterrupted[group_id].task for group_id in submitted]


@given(script=scripts, size=st.integers(1, 4), num_steps=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_every_group_that_is_trained_or_filtered_tells_the_sampler_once(script: Script, size: int, num_steps: int) -> None:
    told: list[int] = []
    outcome = TaskSampler.outcome

    def tell(sampler: TaskSampler, index: int, group_id: int, scores: Sequence[float]) -> None:
        told.append(group_id)
        outcome(sampler, index, group_id, scores)

    with patch.object(TaskSampler, "outcome", tell):
        result = run_in_parts(script, 0, size, num_steps, [], 1, Sampling(rule="failures", exploration=0.2))[0]
    fates = {group_id: script.fate(group_id) for group_id in range(result.counts.submitted)}
    assert sorted(told) == [group_id for group_id, fate in fates.items() if fate in ("trained", "filtered")]
