"""What is written down when nothing progresses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio
import pytest

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import EngineDeadError, StallError
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest, Task
from agentrl.evaluation.evaluations import evaluate
from agentrl.flow.driver import train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.stall import StallReport
from agentrl.resolve.parts import eval_plan
from tests.unit.flow.fakes import Recorder, ScriptedLearner, ScriptedWorker, endless_tasks, flow_of, run_virtual

SIZES = flow_of(num_steps=3, groups_per_step=2, n_samples_per_prompt=2, max_staleness=1)


class Stuck(ScriptedWorker):
    """Its group number 3 waits for what never comes."""

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
        if group_request.group_id == 3:
            await self.wait_for_godot()
        return await super().run_group(group_request)

    async def wait_for_godot(self) -> None:
        await anyio.sleep_forever()


def run_stuck(report: StallReport) -> str:
    async def main() -> None:
        pool = RolloutPool({"engine-0": Stuck()})
        await train(settings=SIZES, pool=pool, learner=ScriptedLearner(), tasks=endless_tasks(), observer=Recorder(), report=report)

    with pytest.raises(StallError) as caught:
        run_virtual(main)
    return str(caught.value)


def others() -> Mapping[str, Awaitable[str]]:
    async def answer() -> str:
        return "thread MainThread of the engine"

    async def hang() -> str:
        await asyncio.sleep(1e9)
        return ""

    async def fail() -> str:
        raise EngineDeadError("a rollout worker is gone")

    return {"engine-0": answer(), "engine-1": hang(), "learner-0": fail()}


def test_a_stalled_run_writes_down_what_every_process_does_and_its_error_names_the_file(tmp_path: Path) -> None:
    error = run_stuck(StallReport(tmp_path, others, answer_timeout_s=3.0))
    (path,) = tmp_path.glob("stall-*.txt")
    assert f"Stacks of all threads and tasks: {path}" in error
    text = path.read_text()
    for part in (
        "train: the 2 oldest groups to be accepted (step 2)",
        "== driver\nprocess ",
        "thread MainThread",
        "task group-3",
        "in Stuck.wait_for_godot",
        "== engine-0\nthread MainThread of the engine",
        "== engine-1\ndid not answer within 3 s",
        "== learner-0\ncould not answer: EngineDeadError: a rollout worker is gone",
    ):
        assert part in text, text


def unanswerable() -> Mapping[str, Awaitable[str]]:
    raise RuntimeError("the cluster is closed")


def test_a_report_that_cannot_be_made_does_not_hide_the_stall(tmp_path: Path) -> None:
    error = run_stuck(StallReport(tmp_path / "gone", unanswerable))
    assert "who waits for what" in error.lower()
    assert "could not be written to" in error


def waiting(deadlines: list[float]) -> Callable[[GroupRequest], float]:
    return lambda group_request: deadlines[group_request.group_id] if group_request.group_id < len(deadlines) else 1.0


def test_a_long_wait_is_warned_of_once_at_half_the_time_out(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        worker = ScriptedWorker(duration=waiting([1.0, 400.0, 1.0, 450.0]))
        await train(
            settings=SIZES, pool=RolloutPool({"engine-0": worker}), learner=ScriptedLearner(), tasks=endless_tasks(), observer=Recorder()
        )

    with caplog.at_level(logging.WARNING):
        run_virtual(main)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1, warnings
    assert "nothing has finished for 300.0 s; the run ends after 600 s (--stall-timeout-s)" in warnings[0]
    assert "train: the 2 oldest groups to be accepted (step 1)" in warnings[0]


def test_every_stall_is_warned_of_and_a_run_that_goes_on_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def main(durations: list[float]) -> None:
        worker = ScriptedWorker(duration=waiting(durations))
        settings = flow_of(num_steps=3, groups_per_step=2, n_samples_per_prompt=2)
        await train(
            settings=settings, pool=RolloutPool({"engine-0": worker}), learner=ScriptedLearner(), tasks=endless_tasks(), observer=Recorder()
        )

    with caplog.at_level(logging.WARNING):
        run_virtual(lambda: main([299.0] * 6))
        assert not caplog.records
        run_virtual(lambda: main([400.0] * 6))
    assert len(caplog.records) == 3


def test_a_stalled_evaluation_is_written_down_too(tmp_path: Path) -> None:
    async def main() -> None:
        tasks = [Task(f"task {number}", id=str(number)) for number in range(5)]
        settings = changed(eval_plan(TrainConfig()), eval_samples=2)
        await evaluate(RolloutPool({"engine-0": Stuck()}), tasks, settings, version=0, report=StallReport(tmp_path))

    with pytest.raises(StallError, match=r"Stacks of all threads and tasks: .*stall-"):
        run_virtual(main)
    (path,) = tmp_path.glob("stall-*.txt")
    assert "in Stuck.wait_for_godot" in path.read_text()
