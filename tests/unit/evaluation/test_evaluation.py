"""Evaluations on scripted workers: what they say, and that training does not notice them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import EngineDeadError, StallError, TooManyFailuresError, WeightSyncError
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import GroupRequest, Task
from agentrl.evaluation.evaluations import EvalPlan, Evaluations, check_failures, evaluate, kind_of, outcome_of
from agentrl.flow.pool import RolloutPool
from agentrl.flow.worker_slots import Supervision
from agentrl.resolve.parts import eval_plan
from tests.unit.flow.fakes import Recorder, ScriptedWorker, failed_member, group_summary, member, run_virtual

TASKS = [Task(f"question {i}", id=str(i), metadata={"kind": "odd" if i % 2 else "even"}) for i in range(6)]


def settings_of(**changes: Any) -> EvalPlan:
    return changed(eval_plan(TrainConfig()), **{"eval_samples": 2, "num_recorded": 0, **changes})


SETTINGS = settings_of()


def played(tasks: Sequence[Task] = TASKS, settings: EvalPlan = SETTINGS, version: int = 0, **worker: Any) -> Any:
    scripted = ScriptedWorker(**worker)
    outcomes = run_virtual(lambda: evaluate(RolloutPool({"engine-0": scripted}), tasks, settings, version=version))
    return outcomes, scripted


def test_every_task_is_played_once_and_told_in_order() -> None:
    outcomes, worker = played(duration=lambda group_request: 10.0 - group_request.group_id)
    assert [outcome.task_id for outcome in outcomes] == [task.id for task in TASKS]
    assert [outcome.kind for outcome in outcomes] == ["even", "odd"] * 3
    assert sorted(group_request.task.id for group_request in worker.seen) == [task.id for task in TASKS]
    assert {(group_request.n_samples_per_prompt, group_request.attempt) for group_request in worker.seen} == {(2, 0)}
    assert [episode.reward for episode in outcomes[0].episodes] == [0.0, 1.0]


def test_no_more_episodes_than_allowed_run_at_once() -> None:
    running, most = 0, 0

    class Worker(ScriptedWorker):
        async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
            nonlocal running, most
            running += group_request.n_samples_per_prompt
            most = max(most, running)
            try:
                return await super().run_group(group_request)
            finally:
                running -= group_request.n_samples_per_prompt

    pool = RolloutPool({"engine-0": Worker()})
    run_virtual(lambda: evaluate(pool, TASKS, settings_of(max_num_seqs=5), version=0))
    assert most == 4


def test_a_failure_is_told_apart_and_is_no_zero() -> None:
    members = {"1": [failed_member(), member(1.0)], "2": [failed_member(), failed_member("OSError: gone")]}
    outcomes, _ = played(outcome=lambda group_request: members.get(group_request.task.id))
    assert [len(outcome.episodes) for outcome in outcomes] == [2, 1, 0, 2, 2, 2]
    assert outcomes[2].failures == ("env_error: ValueError: broken", "env_error: OSError: gone")
    assert [episode.reward for episode in outcomes[1].episodes] == [1.0]


def test_weights_of_another_version_are_an_error() -> None:
    with pytest.raises(WeightSyncError, match=r"version 3 was to be evaluated.*sampled by versions \(2, 2\)"):
        run_virtual(lambda: evaluate(RolloutPool({"engine-0": ScriptedWorker(version=2)}), TASKS, SETTINGS, version=3))


def test_an_evaluation_that_hangs_ends_with_a_diagnosis() -> None:
    with pytest.raises(StallError, match=r"6 tasks with version 0(.|\n)*tasks done: 0"):
        played(settings=settings_of(stall_timeout_s=5.0), duration=lambda group_request: 1e9)


def test_a_worker_that_breaks_ends_it_with_its_own_error() -> None:
    class Broken(ScriptedWorker):
        async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
            raise ConnectionError("gone") from OSError("why")

    with pytest.raises(ConnectionError, match="gone") as caught:
        run_virtual(lambda: evaluate(RolloutPool({"engine-0": Broken()}), TASKS, SETTINGS, version=0))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_worker_that_is_lost_is_replaced_and_its_tasks_are_played_again() -> None:
    class Dies(ScriptedWorker):
        async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
            if len(self.seen) >= 2:
                raise EngineDeadError("killed")
            return await super().run_group(group_request)

    async def respawn(name: str) -> ScriptedWorker:
        return ScriptedWorker()

    def pool() -> RolloutPool:
        return RolloutPool({"engine-0": Dies(duration=lambda group_request: 1.0)}, Supervision(respawn=respawn, max_restarts=1))

    outcomes = run_virtual(lambda: evaluate(pool(), TASKS, SETTINGS, version=0, supervise=True))
    assert [len(outcome.episodes) for outcome in outcomes] == [2] * 6
    with pytest.raises(EngineDeadError):
        run_virtual(lambda: evaluate(pool(), TASKS, SETTINGS, version=0))


def test_an_episode_of_several_agents_has_the_mean_of_those_that_are_trained() -> None:
    def agent(name: str, reward: float, *, frozen: bool = False) -> MemberSummary:
        return member(reward, episode_id="0", agent=name, frozen=frozen)

    summary = group_summary(
        GroupRequest(group_id=0, task=TASKS[0], n_samples_per_prompt=1, version=0), (0, 0), [agent("a", 1.0), agent("b", 0.0)]
    )
    assert [episode.reward for episode in outcome_of(TASKS[0], summary).episodes] == [0.5]
    each = outcome_of(TASKS[0], summary).agents
    assert {name: [episode.reward for episode in episodes] for name, episodes in each.items()} == {"a": [1.0], "b": [0.0]}
    summary = group_summary(
        GroupRequest(group_id=0, task=TASKS[0], n_samples_per_prompt=1, version=0), (0, 0), [agent("a", 1.0), agent("b", 0.0, frozen=True)]
    )
    assert outcome_of(TASKS[0], summary).agents == {}
    (episode,) = outcome_of(TASKS[0], summary).episodes
    assert (episode.reward, episode.tokens) == (1.0, 10)


def test_the_kind_of_a_task() -> None:
    task = Task("x", metadata={"source": "gsm8k", "level": 3})
    assert [kind_of(task), kind_of(task, "level"), kind_of(task, "topic"), kind_of(Task("x"))] == ["gsm8k", "3", "", ""]


def test_too_many_failures_are_an_error_and_few_are_not() -> None:
    outcomes, _ = played(outcome=lambda group_request: [failed_member("OSError: gone")] * 2 if int(group_request.task.id) < 4 else None)
    with pytest.raises(TooManyFailuresError, match=r"8 of 12 episodes of the evaluation failed(.|\n)*8 x env_error: OSError: gone"):
        check_failures(outcomes, 0.5)
    check_failures(outcomes, 0.7)
    with pytest.raises(TooManyFailuresError):
        check_failures(outcomes[:4], 1.0)


def test_when_an_evaluation_is_due() -> None:
    def steps(every: int) -> list[int]:
        evaluations = Evaluations(
            RolloutPool({"engine-0": ScriptedWorker()}), TASKS, SETTINGS, every=every, num_steps=10, observer=Recorder()
        )
        return [step for step in range(1, 11) if evaluations.due(step)]

    assert (steps(0), steps(4), steps(5)) == ([], [4, 8, 10], [5, 10])
