"""Environments that hang, die, always fail, or return what is no reward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.config.sections import changed
from agentrl.core.errors import TooManyFailuresError
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import Group, GroupRequest, Status, Task
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.faults.report import Saw
from tests.scripted_engine import ScriptedEngine
from tests.unit.flow.fakes import Scene, ScriptedWorker, failed_member, flow_of
from tests.unit.rollout.scenes import PATIENT
from tests.unit.rollout.templates import tokenizer

ENV = """
import asyncio, os, signal, time
import numpy as np
from agentrl import AgentInstance, StepResult

class One(AgentInstance):
    '''One episode of a group, whichever is first, does what the label says.'''

    def first(self, state):
        try:
            os.close(os.open(state.label["claim"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def step(self, state):
        if self.first(state):
            if state.label["act"] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3)
        return StepResult(0.5, terminated=True)

class AsyncOne(One):
    async def step(self, state):
        if self.first(state):
            await asyncio.sleep(1000)
        return StepResult(0.5, terminated=True)

class Odd(AgentInstance):
    def step(self, state):
        return StepResult(eval(state.label), terminated=True)
"""
GOOD = "0.5"
NAN = ["float('nan')", "float('inf')", "-float('inf')", "np.nan", "10**400", "1e39"]
BAD = [*NAN, "None", "'good'", "np.ones(3)", "[]", "[1.0, 2.0]", "1j"]


@asynccontextmanager
async def worker_on(folder: Path, name: str, *, isolated: bool = False, step_s: float = 1.0) -> AsyncIterator[EpisodeWorker]:
    tokenizer("chatml").save_pretrained(folder / "model")
    (folder / "env.py").write_text(ENV)
    limits = {"reset_timeout_s": 20.0, "step_timeout_s": step_s, "env_isolation": "process" if isolated else "none"}
    settings = replace(changed(PATIENT, model=str(folder / "model"), **limits), close_timeout_s=1.0)
    worker = EpisodeWorker(ScriptedEngine(), load_agent(f"{folder / 'env.py'}:{name}"), settings)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


async def play(worker: EpisodeWorker, label: str | Mapping[str, str], members: int = 4) -> tuple[GroupSummary, Group]:
    return await worker.run_group(GroupRequest(group_id=1, task=Task("x", label=label, id="t"), n_samples_per_prompt=members, version=0))


def only_one_failed(summary: GroupSummary, status: Status) -> MemberSummary:
    (failed,) = [member for member in summary.members if not member.trainable]
    assert failed.status is status
    assert failed.reward is None
    assert [(member.status, member.reward) for member in summary.trainable] == [(Status.FINISHED, 0.5)] * 3
    return failed


@pytest.mark.anyio
@pytest.mark.row(6, "one of 4 episodes sleeps in its step, class {name}")
@pytest.mark.parametrize("name", ["One", "AsyncOne"])
async def test_a_step_that_never_returns_ends_at_its_deadline(tmp_path: Path, name: str, saw: Saw) -> None:
    async with worker_on(tmp_path, name) as worker:
        before, begin = asyncio.all_tasks(), time.monotonic()
        summary, _ = await play(worker, {"claim": str(tmp_path / "claim"), "act": "hang"})
        seconds, left = time.monotonic() - begin, asyncio.all_tasks() - before
    only_one_failed(summary, Status.TIMEOUT)
    assert 1.0 <= seconds < 1.0 + 1.0
    assert not left
    saw(f"deadline 1 s, over after {seconds:.2f} s; 3 siblings finished, 0 tasks left")


@pytest.mark.anyio
@pytest.mark.row(8, "the process of one of 4 isolated episodes is ended by SIGKILL, twice in a row")
async def test_an_environment_process_that_dies_is_one_failed_episode(tmp_path: Path, saw: Saw) -> None:
    async with worker_on(tmp_path, "One", isolated=True, step_s=10.0) as worker:
        for number in range(2):
            summary, _ = await play(worker, {"claim": str(tmp_path / f"claim{number}"), "act": "die"})
            assert "SIGKILL" in str(only_one_failed(summary, Status.ENV_ERROR).error)
        healthy, _ = await play(worker, {"claim": str(tmp_path / "claim0"), "act": "die"})
    assert [member.reward for member in healthy.members] == [0.5] * 4
    saw("env_error that names SIGKILL for 1 of 4, 3 siblings finished, 0 rewards of 0; the next 4 episodes got new processes")


@pytest.mark.row(9, "2 of 10 tasks fail every time")
def test_a_task_that_always_fails_is_dropped_with_its_reason(saw: Saw) -> None:
    tasks = (Task(prompt=str(i % 10), position=i) for i in range(10**6))

    def outcome(group_request: GroupRequest) -> list[MemberSummary] | None:
        return [failed_member()] * 2 if group_request.task.prompt in ("3", "7") else None

    flow = flow_of(num_steps=20, groups_per_step=4, n_samples_per_prompt=2, max_staleness=1)
    scene = Scene(flow, workers=[ScriptedWorker(outcome=outcome)], tasks=tasks)
    counts = scene.run().counts
    attempts = [group_request.attempt for group_request in scene.workers[0].seen if group_request.task.prompt in ("3", "7")]
    assert counts.trained == 80
    assert counts.dropped == {"env_error": 20}
    assert (attempts.count(0), attempts.count(1), max(attempts)) == (20, 20, 1)
    assert scene.learner.trained_ids == [group_id for group_id in range(100) if group_id % 10 not in (3, 7)]
    saw(f"{sum(counts.dropped.values())} groups dropped as env_error after 2 attempts each, 80 others trained in order")


@pytest.mark.row(9, "every task fails every time")
def test_failures_everywhere_end_the_run(saw: Saw) -> None:
    worker = ScriptedWorker(outcome=lambda group_request: [failed_member()])
    scene = Scene(flow_of(num_steps=20, groups_per_step=4, n_samples_per_prompt=2), workers=[worker])
    with pytest.raises(TooManyFailuresError, match=r"--max-failure-rate(.|\n)*ValueError: broken"):
        scene.run()
    saw(f"TooManyFailuresError after {len(scene.workers[0].seen)} attempts, with the most frequent causes")
    assert len(scene.workers[0].seen) <= 16


@pytest.mark.anyio
@pytest.mark.row(10, "rewards NaN, inf, None, text, arrays, lists, complex, 1e39, 10**400")
async def test_what_is_no_reward_stops_at_the_boundary(tmp_path: Path, saw: Saw) -> None:
    async with worker_on(tmp_path, "Odd", step_s=10.0) as worker:
        for value in BAD:
            summary, group = await play(worker, value, members=2)
            assert summary.num_trainable == 0, value
            for trajectory in group.trajectories:
                assert trajectory.status is Status.ENV_ERROR
                assert trajectory.reward is None
                message = str(trajectory.error)
                assert message.startswith("env.py: Odd.step returned reward = "), message
                shown = repr(eval(value, {"np": np}))
                assert shown[:10] in message
        good, _ = await play(worker, GOOD)
    assert [member.reward for member in good.members] == [0.5] * 4
    saw(f"{len(BAD)} of {len(BAD)} refused with file, method and value; 0 reach an advantage")
