"""Runs that are evaluated on the way: the right weights, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.callbacks import BestModelSaved, EvaluationEnd
from agentrl.core.errors import ConfigError, TooManyFailuresError
from agentrl.core.files import check_directory
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import GroupRequest, Task
from agentrl.evaluation.apart import EvaluationsApart
from agentrl.evaluation.best import Best, BestModel, read_best
from agentrl.evaluation.evaluations import Evaluations, open_evaluations
from agentrl.flow.apart import ApartPool
from agentrl.flow.driver import RunResult, train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.state import AfterStep, StopRequest
from agentrl.flow.worker_slots import Supervision
from agentrl.resolve.parts import eval_plan, flow_plan
from agentrl.track.index import read_index
from tests.unit.flow.fakes import (
    Recorder,
    ScriptedLearner,
    ScriptedWorker,
    endless_tasks,
    failed_member,
    group_summary,
    member,
    run_virtual,
)
from tests.unit.flow.test_train import sizes

TASKS = [Task(f"question {i}", id=str(i)) for i in range(5)]


@dataclass
class Worker(ScriptedWorker):
    """Tells groups that are evaluated from those to train on, and notes under which weights each began and ended."""

    evaluated: list[tuple[GroupRequest, int, int]] = field(default_factory=list)
    eval_s: float = 3.0

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
        if group_request.eval_sampling is None:
            return await super().run_group(group_request)
        before = self.version
        await anyio.sleep(self.eval_s)
        self.evaluated.append((group_request, before, self.version))
        summary = group_summary(group_request, (before, self.version), self.members(group_request, before))
        name = f"{group_request.eval_sampling.name}-{group_request.group_id}"
        records = tuple({"trajectory_id": f"{name}-{i}", "episode_id": name, "version": before} for i in range(group_request.record))
        return replace(summary, records=records), "no reference"

    def members(self, group_request: GroupRequest, version: int) -> Sequence[MemberSummary] | None:
        return [member(float(version)), member(0.0)]


@dataclass
class Learner(ScriptedLearner):
    """Saves a file that says which version it is."""

    saved: list[int] = field(default_factory=list)

    async def save_model(self, path: str) -> None:
        self.saved.append(len(self.steps))
        (Path(path) / "version").write_text(str(len(self.steps)))


@dataclass
class Scene:
    """A run that is evaluated every `every` steps."""

    every: int
    staleness: int = 1
    num_steps: int = 6
    run_dir: Path | None = None
    metric: str = "eval/reward"
    resumed: bool = False
    recorded: int = 0
    beside: bool = False
    evaluators: list[Worker] = field(default_factory=list)  # engines of their own for evaluations
    supervision: Supervision | None = None  # of these
    hooks: list[Any] = field(default_factory=list)  # further ones, after the evaluations
    workers: list[Worker] = field(default_factory=lambda: [Worker()])
    learner: Learner = field(default_factory=Learner)
    observer: Recorder = field(default_factory=Recorder)
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def results(self) -> list[EvaluationEnd]:
        return [event for event in self.observer.events if isinstance(event, EvaluationEnd)]

    async def go(self) -> RunResult:
        pool = RolloutPool({f"engine-{i}": worker for i, worker in enumerate(self.workers)})
        evaluations = Evaluations(
            pool,
            TASKS,
            changed(eval_plan(TrainConfig()), eval_samples=2, max_num_seqs=6, num_recorded=self.recorded),
            every=self.every,
            num_steps=self.num_steps,
            run_dir=self.run_dir if self.recorded else None,
            best=BestModel(self.run_dir, self.learner, self.metric, resumed=self.resumed) if self.run_dir else None,
            observer=self.observer,
            beside=self.beside,
        )
        return await train(
            settings=sizes(num_steps=self.num_steps, staleness=self.staleness),
            pool=pool,
            learner=self.learner,
            tasks=endless_tasks(),
            observer=self.observer,
            after_step=[self.apart(evaluations, pool), *self.hooks],
            stop=self.stop,
        )

    def apart(self, evaluations: Evaluations, pool: RolloutPool) -> AfterStep:
        if not self.evaluators:
            return evaluations
        workers = {f"engine-{i}": worker for i, worker in enumerate(self.evaluators, len(self.workers))}
        return EvaluationsApart(evaluations, ApartPool(workers, pool, self.supervision), num_engines=len(workers), num_steps=self.num_steps)

    def run(self) -> RunResult:
        return run_virtual(self.go)


@pytest.mark.parametrize(("staleness", "beside"), [(0, False), (0, True), (1, True), (3, True)])
@given(
    every=st.integers(1, 4),
    load_s=st.floats(0.0, 8.0),
    train_s=st.floats(0.0, 8.0),
    eval_s=st.floats(0.1, 20.0),
    seconds=st.lists(st.floats(0.1, 5.0), min_size=3, max_size=3),
    engines=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_every_token_of_an_evaluation_is_of_the_step_it_is_named_after(
    staleness: int, beside: bool, every: int, load_s: float, train_s: float, eval_s: float, seconds: list[float], engines: int
) -> None:
    workers = [Worker(load_s=load_s, eval_s=eval_s, duration=lambda t: seconds[t.group_id % 3]) for _ in range(engines)]
    scene = Scene(every, staleness, workers=workers, learner=Learner(train_s=lambda step: train_s), beside=beside)
    result = scene.run()
    due = [step for step in range(1, 7) if step % every == 0 or step == 6]
    assert [event.step for event in scene.results] == due
    played = [item for worker in workers for item in worker.evaluated]
    assert len(played) == len(due) * len(TASKS)
    for group_request, before, after in played:
        assert group_request.eval_sampling is not None
        assert before == after == group_request.version == int(group_request.eval_sampling.name.removeprefix("eval-"))
    assert {row["step"] for row in scene.observer.steps if "eval/reward" in row} == set(due)
    assert all(row["eval/reward"] == row["step"] / 2 for row in scene.observer.steps if "eval/reward" in row)
    assert (result.counts.submitted, result.counts.trained, result.counts.in_flight) == (18, 18, 0)
    assert scene.learner.trained_ids == list(range(18))
    assert max(row["staleness/max"] for row in scene.observer.steps) <= staleness


@pytest.mark.parametrize("recorded", [0, 1, 2])
def test_as_many_episodes_of_each_task_are_recorded_apart_as_are_asked_for(tmp_path: Path, recorded: int) -> None:
    Scene(3, run_dir=tmp_path, recorded=recorded).run()
    path = tmp_path / "eval_trajectories.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    expected = [f"eval-{step}-{task}-{member}" for step in (3, 6) for task in range(len(TASKS)) for member in range(recorded)]
    assert sorted(row["trajectory_id"] for row in rows) == sorted(expected)
    assert [values[2] for values in read_index(path)] == [row["trajectory_id"] for row in rows]
    assert not (tmp_path / "trajectories.jsonl").exists()


@pytest.mark.parametrize(("beside", "steps", "written"), [(False, 2, []), (True, 3, [2])])
def test_a_run_that_is_stopped_does_not_wait_for_its_evaluation(tmp_path: Path, beside: bool, steps: int, written: list[int]) -> None:
    scene = Scene(2, staleness=1, workers=[Worker(eval_s=100.0)], run_dir=tmp_path, beside=beside)

    async def main() -> RunResult:
        async def ask() -> None:
            await anyio.sleep(40.0)  # by now the evaluation after step 2 is under way
            scene.stop.ask()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            return await scene.go()

    result = run_virtual(main)
    assert (result.stopped, result.steps, scene.results, scene.learner.saved) == (True, steps, [], written)
    assert [(row["step"], "eval/reward" in row) for row in scene.observer.steps] == [(step, False) for step in range(1, steps + 1)]
    assert result.seconds < 50.0
    assert result.counts.submitted == result.counts.trained + result.counts.in_flight == 12
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_stopped_does_not_wait_for_its_last_evaluation() -> None:
    scene = Scene(6, staleness=1, workers=[Worker(eval_s=1000.0)], beside=True)

    async def main() -> RunResult:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            return await scene.go()

    async def ask() -> None:
        await anyio.sleep(100.0)  # all steps are done long before
        scene.stop.ask()

    result = run_virtual(main)
    assert (result.stopped, result.steps, scene.results) == (True, 6, [])
    assert result.seconds < 500.0


def test_training_does_not_notice_an_evaluation() -> None:
    def trained(every: int) -> tuple[list[Any], list[Any], list[Any]]:
        scene = Scene(every, staleness=0)
        scene.run()
        timed = ("idle/", "time", "tokens_per_s", "queue/", "eval/", "publish/")
        rows = [{k: v for k, v in row.items() if not k.startswith(timed)} for row in scene.observer.steps]
        group_requests = [(t.group_id, t.task.id, t.task.position, t.version, t.attempt) for t in scene.workers[0].seen]
        return rows, group_requests, scene.learner.steps

    assert trained(every=2) == trained(every=0)


def test_generation_goes_on_beside_an_evaluation_of_an_asynchronous_run() -> None:
    worker = Worker(eval_s=30.0)
    scene = Scene(every=3, staleness=1, workers=[worker])
    begun: list[bool] = []
    worker.duration = lambda group_request: begun.append(True) or 1.0  # type: ignore[func-returns-value]
    scene.run()
    assert scene.observer.steps[3]["time/step_s"] > 30.0  # the learner waited
    assert scene.observer.steps[3]["queue/wait_s"] > 20.0  # for the evaluation, and not for groups


def test_what_a_stopped_run_left_to_be_done_beside_a_step_is_not_begun() -> None:
    scene = Scene(1, staleness=1, workers=[Worker(eval_s=1000.0)], beside=True)

    async def ask(point: Any) -> None:
        scene.stop.ask()
        await anyio.sleep(1.0)

    scene.hooks.append(ask)
    result = scene.run()
    assert (result.stopped, result.steps, scene.results) == (True, 1, [])
    assert result.seconds < 500.0


def test_the_learner_trains_beside_an_evaluation() -> None:
    """What is left of the evaluation after the step beside it delays the export, and nothing else."""

    def times(eval_s: float, beside: bool) -> tuple[list[float], list[float], float]:
        worker = Worker(eval_s=eval_s, load_s=1.0)
        scene = Scene(every=3, staleness=1, workers=[worker], learner=Learner(train_s=lambda step: 10.0), beside=beside)
        seconds = scene.run().seconds
        assert [event.step for event in scene.results] == [3, 6]
        assert worker.loads == [1, 2, 3, 4, 5, 6]  # each version once
        return [row["time/step_s"] for row in scene.observer.steps], [row.get("eval/wait_s", -1.0) for row in scene.observer.steps], seconds

    (steps, waits, seconds), (waiting, none, slower) = times(4.0, True), times(4.0, False)  # 5 tasks, 3 at once: 8 s
    assert waits == [-1.0, -1.0, -1.0, 0.0, -1.0, -1.0]
    assert none == [-1.0] * 6
    assert waiting[3] - steps[3] == pytest.approx(9.0)  # the publication and the evaluation
    assert slower - seconds == pytest.approx(9.0)
    steps, waits, _ = times(8.0, True)
    assert waits[3] == pytest.approx(7.0)  # 1 s of publication and 16 s of evaluation, less the step's 10 s
    assert steps[4] == pytest.approx(17.0)


def test_synchronous_training_does_not_notice_an_evaluation_beside_it() -> None:
    def trained(every: int) -> tuple[list[Any], list[Any]]:
        scene = Scene(every, staleness=0, beside=True)
        scene.run()
        return [(t.group_id, t.task.id, t.version, t.attempt) for t in scene.workers[0].seen], scene.learner.steps

    assert trained(every=2) == trained(every=0)


@pytest.mark.parametrize(("changes", "beside"), [({"asynchronous": True}, True), ({"max_staleness": 2}, True), ({}, False)])
def test_the_learner_goes_on_in_asynchronous_runs(changes: dict[str, Any], beside: bool) -> None:
    config = changed(TrainConfig(), **changes)
    learner, pool = Learner(), RolloutPool({"engine-0": Worker()})
    evaluations = open_evaluations(eval_plan(config), flow_plan(config), TASKS, pool, learner, Recorder(), resumed=False)
    assert evaluations.beside is beside


@pytest.mark.parametrize("beside", [False, True])
def test_the_best_model_is_kept_with_what_it_is_best_in(tmp_path: Path, beside: bool) -> None:
    values = {1: 0.5, 2: 0.8, 3: 0.8, 4: 0.6, 5: 0.9, 6: 0.1}

    class Scored(Worker):
        def members(self, group_request: GroupRequest, version: int) -> Sequence[MemberSummary]:
            return [member(values[version])] * 2

    scene = Scene(1, workers=[Scored()], run_dir=tmp_path, beside=beside)
    scene.run()
    assert scene.learner.saved == ([1, 2, 3, 4, 5, 6] if beside else [1, 2, 5])
    assert read_best(tmp_path) == Best(step=5, metric="eval/reward", value=0.9)
    assert (tmp_path / "best" / "version").read_text() == "5"
    assert [row["eval/best_step"] for row in scene.observer.steps] == [1, 2, 2, 2, 5, 5]
    saved = [event for event in scene.observer.events if isinstance(event, BestModelSaved)]
    assert [(event.step, event.value, event.path) for event in saved] == [(step, values[step], tmp_path / "best") for step in (1, 2, 5)]
    assert [event.metrics["eval/best"] for event in scene.results] == [0.5, 0.8, 0.8, 0.8, 0.9, 0.9]
    check_directory(tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_resumed_run_goes_on_from_the_best_so_far(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "best.json").write_text(json.dumps({"step": 4, "metric": "eval/reward", "value": 2.0}))
    scene = Scene(1, run_dir=tmp_path, resumed=True)
    scene.run()  # the reward is half the version: 3.0 in the end
    assert scene.learner.saved == [5, 6]
    assert read_best(tmp_path) == Best(step=6, metric="eval/reward", value=3.0)
    for other in (Scene(1, run_dir=tmp_path, metric="eval/score", resumed=True), Scene(1, run_dir=tmp_path)):
        other.run()  # best in something else, or another run's: nothing to go on from
        assert other.learner.saved[0] == 1


def test_a_figure_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval/reward/hard.*There are eval/.*eval/reward,"):
        Scene(1, run_dir=tmp_path, metric="eval/reward/hard").run()


def test_a_figure_that_failures_leave_out_does_not_end_the_run(tmp_path: Path) -> None:
    class Failing(Worker):
        def members(self, group_request: GroupRequest, version: int) -> Sequence[MemberSummary] | None:
            return [failed_member(), member(1.0, score=None)]

    scene = Scene(1, run_dir=tmp_path, metric="eval/score", workers=[Failing()])
    scene.run()
    assert scene.learner.saved == []
    assert [row["eval/failed_episodes"] for row in scene.observer.steps] == [5] * 6


def test_failures_are_counted_in_the_metrics_and_too_many_end_the_run() -> None:
    class Failing(Worker):
        def members(self, group_request: GroupRequest, version: int) -> Sequence[MemberSummary] | None:
            return [failed_member(), failed_member()] if int(group_request.task.id) < version else [member(1.0), member(1.0)]

    scene = Scene(1, workers=[Failing()])
    with pytest.raises(TooManyFailuresError, match="6 of 10 episodes of the evaluation failed"):
        scene.run()
    assert [(row["eval/failed_tasks"], row["eval/tasks"], row["eval/reward"]) for row in scene.observer.steps] == [(1, 4, 1.0), (2, 3, 1.0)]
