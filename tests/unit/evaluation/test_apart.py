"""Evaluations on engines of their own: the right weights, in rows that say so, and nobody waits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.errors import EngineDeadError, WeightSyncError
from agentrl.core.protocols import Membership, RolloutWorker, WeightUpdate
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest
from agentrl.evaluation.best import Best, read_best
from agentrl.flow.apart import ApartPool
from agentrl.flow.driver import RunResult
from agentrl.flow.pool import RolloutPool
from agentrl.flow.worker_slots import Supervision
from tests.unit.evaluation.test_evaluated_runs import TASKS, Learner, Scene, Worker
from tests.unit.flow.fakes import run_virtual


def due_of(scene: Scene) -> list[int]:
    return [step for step in range(1, scene.num_steps + 1) if step % scene.every == 0 or step == scene.num_steps]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@given(
    every=st.integers(1, 4),
    load_s=st.floats(0.0, 8.0),
    train_s=st.floats(0.0, 8.0),
    eval_s=st.floats(0.1, 40.0),
    engines=st.integers(1, 3),
)
@settings(max_examples=12, deadline=None)
def test_each_evaluation_is_of_its_step_and_in_one_row_that_says_so(
    staleness: int, every: int, load_s: float, train_s: float, eval_s: float, engines: int
) -> None:
    evaluators = [Worker(load_s=load_s, eval_s=eval_s) for _ in range(engines)]
    scene = Scene(every, staleness, learner=Learner(train_s=lambda step: train_s), evaluators=evaluators)
    result = scene.run()
    due = due_of(scene)
    assert [event.step for event in scene.results] == due
    assert not [item for worker in scene.workers for item in worker.evaluated]
    played = [item for worker in evaluators for item in worker.evaluated]
    assert len(played) == len(due) * len(TASKS)
    assert all(before == after == request.version for request, before, after in played)
    assert all(worker.loads == due for worker in evaluators)
    rows = [row for row in scene.observer.steps if "eval/reward" in row]
    assert [row["eval/step"] for row in rows] == due
    assert all(row["eval/reward"] == row["eval/step"] / 2 and row["step"] >= row["eval/step"] for row in rows)
    assert all(row["eval/engines"] == engines for row in rows)
    assert rows[-1]["step"] == scene.num_steps == rows[-1]["eval/step"]
    assert (result.counts.submitted, result.counts.trained, result.counts.in_flight) == (18, 18, 0)
    assert scene.learner.trained_ids == list(range(18))
    assert max(row["staleness/max"] for row in scene.observer.steps) <= staleness


@pytest.mark.parametrize("staleness", [0, 1])
def test_neither_learner_nor_engines_notice_an_evaluation(staleness: int) -> None:
    def times(every: int, eval_s: float = 1.0) -> list[float]:
        slow = Learner(train_s=lambda step: 10.0)
        scene = Scene(every, staleness, num_steps=12, learner=slow, evaluators=[Worker(eval_s=eval_s, load_s=3.0)])
        scene.run()
        return [row["time_s"] for row in scene.observer.steps]

    alone = times(every=0)
    assert times(every=4, eval_s=10.0)[:-1] == alone[:-1]  # 20 s each, of two steps and more
    assert times(every=4, eval_s=30.0)[3:] > alone[3:]  # longer than until the next: that one waits


def test_the_figures_come_with_the_step_that_ends_after_them() -> None:
    scene = Scene(6, 1, num_steps=12, learner=Learner(train_s=lambda step: 10.0), evaluators=[Worker(eval_s=10.0)])
    scene.run()
    found = {row["step"]: row["eval/step"] for row in scene.observer.steps if "eval/step" in row}
    assert found == {9: 6.0, 12: 12.0}  # 20 s of evaluation: two steps
    waits = [row.get("eval/wait_s", 0.0) for row in scene.observer.steps]
    assert waits == [0.0] * 12


def test_the_best_model_is_that_of_the_step_that_was_measured(tmp_path: Path) -> None:
    values = {2: 0.5, 4: 0.9, 6: 0.1}

    class Scored(Worker):
        def members(self, group_request: GroupRequest, version: int) -> Any:
            from tests.unit.flow.fakes import member

            return [member(values[version])] * 2

    scene = Scene(2, 1, run_dir=tmp_path, evaluators=[Scored(eval_s=5.0)])
    scene.run()
    assert read_best(tmp_path) == Best(step=4, metric="eval/reward", value=0.9)
    assert (tmp_path / "best" / "version").read_text() == "4"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_run_that_is_stopped_gives_its_evaluation_up(tmp_path: Path) -> None:
    scene = Scene(2, 1, evaluators=[Worker(eval_s=1000.0)], run_dir=tmp_path)

    async def main() -> RunResult:
        async def ask() -> None:
            await anyio.sleep(40.0)
            scene.stop.ask()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            return await scene.go()

    result = run_virtual(main)
    assert (result.stopped, scene.results, list(tmp_path.iterdir())) == (True, [], [])
    assert result.seconds < 100.0


def test_an_error_of_an_evaluation_ends_the_run() -> None:
    class Broken(Worker):
        async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
            raise RuntimeError("no good")

    with pytest.raises(RuntimeError, match="no good"):
        Scene(2, 1, num_steps=100, evaluators=[Broken()]).run()


class Dying(Worker):
    """Dies at its first group; what takes its place works."""

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
        await anyio.sleep(1.0)
        raise EngineDeadError("killed")


def test_a_lost_engine_is_replaced_with_the_weights_of_its_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    successors: list[Worker] = []

    async def respawn(name: str) -> RolloutWorker:
        assert name == "engine-1"
        await anyio.sleep(30.0)  # steps of others go on
        successors.append(Worker())
        return successors[-1]

    scene = Scene(3, 1, num_steps=9, evaluators=[Dying()], supervision=Supervision(respawn=respawn))
    scene.run()
    assert [event.step for event in scene.results] == [3, 6, 9]
    assert successors[0].loads == [3, 6, 9]
    assert [row["eval/reward"] for row in scene.observer.steps if "eval/reward" in row] == [1.5, 3.0, 4.5]


def test_without_an_engine_of_their_own_later_evaluations_use_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def respawn(name: str) -> RolloutWorker:
        raise EngineDeadError("no machine")

    with caplog.at_level(logging.WARNING):
        scene = Scene(3, 1, num_steps=9, evaluators=[Dying()], supervision=Supervision(respawn=respawn, max_restarts=1))
        scene.run()
    assert [event.step for event in scene.results] == [6, 9]
    assert "the evaluation of step 3 has no figures" in caplog.text
    assert {request.version for worker in scene.workers for request, _, _ in worker.evaluated} == {6, 9}


@dataclass
class Together:
    """Sends weights to groups of engines; the learner is beyond `version` when it trains again."""

    version: int = 0
    groups: list[Membership] = field(default_factory=list)

    def alone(self, version: int, members: Membership) -> AbstractAsyncContextManager[WeightUpdate | None]:
        @asynccontextmanager
        async def send() -> Any:
            self.groups.append(members)
            yield WeightUpdate(version=version, transport="nccl", members=members) if version == self.version else None

        return send()

    async def again(self, version: int, members: Membership) -> WeightUpdate:
        raise AssertionError

    async def abandon_weights(self, reason: str) -> None:
        pass

    def ended(self) -> None:
        pass


def pools(workers: Sequence[Worker], supervision: Supervision | None = None) -> tuple[RolloutPool, ApartPool, Together]:
    trained, exports = RolloutPool({"engine-0": Worker()}), Together()
    trained.form_groups(exports)
    return trained, ApartPool({f"engine-{1 + i}": worker for i, worker in enumerate(workers)}, trained, supervision), exports


def test_engines_that_take_weights_together_form_a_group_of_their_own() -> None:
    async def main() -> None:
        trained, apart, exports = pools([Worker(), Worker()])
        before = trained.membership()
        exports.version = 4
        await trained.publish(WeightUpdate(version=4, transport="nccl", members=before))
        assert apart.takes_together
        await apart.take(apart.current(4))
        assert [worker.loads for worker in apart_workers(apart)] == [[4], [4]]
        assert exports.groups == [Membership(before.epoch + 1, ("engine-1", "engine-2"))]
        assert trained.membership().epoch > exports.groups[0].epoch  # the others meet anew
        with pytest.raises(WeightSyncError, match="version 3 was to be taken, and the engines hold version 4"):
            apart.current(3)
        exports.version = 5
        with pytest.raises(WeightSyncError, match="the learner no longer holds version 4"):
            await apart.take(apart.current(4))

    run_virtual(main)


def apart_workers(pool: ApartPool) -> list[Any]:
    return [slot.worker for slot in pool._slots.values()]


def test_what_replaces_an_engine_that_takes_weights_together_waits_for_the_next() -> None:
    async def main() -> None:
        successor = Worker()

        async def respawn(name: str) -> RolloutWorker:
            return successor

        _, apart, exports = pools([Dying()], Supervision(respawn=respawn))
        exports.version = 2
        apart._trained.update = WeightUpdate(version=2, transport="nccl", members=Membership(1, ("engine-0",)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(apart.supervise)
            await anyio.sleep(0.1)
            await apart.take(apart.current(2))
            request = GroupRequest(group_id=0, task=TASKS[0], n_samples_per_prompt=2, version=2)
            with pytest.raises(EngineDeadError, match="no engine for evaluations holds the weights"), anyio.fail_after(100.0):
                await apart.run_group(request)
            assert not apart.gone
            exports.version = 3
            apart._trained.update = WeightUpdate(version=3, transport="nccl", members=Membership(1, ("engine-0",)))
            await apart.take(apart.current(3))
            assert successor.loads == [3]
            assert (await apart.run_group(request))[0].group_id == 0
            tasks.cancel_scope.cancel()

    run_virtual(main)
