"""What an evaluation asks of its workers, and what it makes of their groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.core.errors import ConfigError, TooManyFailuresError, WeightSyncError
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import GroupRequest, Status, Task, derive_seed
from agentrl.evaluation.assessment import TaskOutcome
from agentrl.evaluation.evaluations import (
    EvalPlan,
    Evaluations,
    check_failures,
    check_kept_kind,
    evaluate,
    kind_of,
    open_evaluations,
    outcome_of,
)
from agentrl.evaluation.plan import EvalConfig
from agentrl.flow.plan import TrainingConfig
from tests.unit.flow.fakes import Recorder, flow_of, member

TASKS = [Task("p", id=name, position=place) for place, name in enumerate("abc")]
PLAN = EvalPlan(eval=EvalConfig(eval_samples=2, eval_temperature=0.5, eval_pass_score=0.5), seed=9, num_engines=2, max_num_seqs=6)


class Pool:
    """Workers that answer by a script, and note what they were asked."""

    def __init__(self, members: Callable[[int], Sequence[MemberSummary]], versions: tuple[int, int] | None = (4, 4)) -> None:
        self.members, self.versions, self.asked = members, versions, list[GroupRequest]()
        self.playing = self.most = 0

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, None]:
        self.asked.append(group_request)
        self.playing += 1
        self.most = max(self.most, self.playing)
        await anyio.sleep(0.01 * (3 - group_request.group_id))  # the first to begin is the last to end
        self.playing -= 1
        members = tuple(self.members(group_request.group_id))
        return GroupSummary(group_id=group_request.group_id, members=members, versions=self.versions, seconds=1.0), None


def played(pool: Pool) -> Any:
    return evaluate(pool, TASKS, PLAN, version=4, name="eval-4")  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_draws_are_those_of_evaluations_and_not_of_training() -> None:
    pool = Pool(lambda number: [member(float(number))] * 2)
    outcomes = await played(pool)
    assert [outcome.values(0.5, [])["reward"] for outcome in outcomes] == [0.0, 1.0, 2.0]
    assert [(each.group_id, each.task.id, each.n_samples_per_prompt, each.version) for each in pool.asked] == [
        (0, "a", 2, 4),
        (1, "b", 2, 4),
        (2, "c", 2, 4),
    ]
    for each in pool.asked:
        trial = each.eval_sampling
        assert trial is not None
        assert (trial.name, trial.seed, trial.temperature) == ("eval-4", derive_seed(9, "eval"), 0.5)
    assert PLAN.max_concurrent_tasks == 6


@pytest.mark.anyio
@pytest.mark.parametrize("versions", [(3, 4), (4, 5), (3, 3)])
async def test_tokens_of_other_weights_end_it(versions: tuple[int, int]) -> None:
    with pytest.raises(WeightSyncError, match="version 4 was to be evaluated"):
        await played(Pool(lambda number: [member()] * 2, versions))


@pytest.mark.anyio
async def test_a_task_whose_episodes_all_failed_has_no_version() -> None:
    outcomes = await played(Pool(lambda number: [member(None, Status.TIMEOUT, error="late")] * 2, None))
    assert [outcome.failures for outcome in outcomes] == [("timeout: late",) * 2] * 3


def test_an_episode_of_several_agents_is_one() -> None:
    agents = [
        member(1.0, agent="x", episode_id="e", score=None, num_tokens=3, num_turns=1),
        member(0.0, agent="y", episode_id="e", score=0.25, num_tokens=4, num_turns=2, truncated=True),
        member(9.0, agent="z", episode_id="e", frozen=True),
    ]
    unscored = [member(None, Status.NOT_SCORED, episode_id="n", agent=name) for name in ("x", "y")]
    late = [member(None, Status.TIMEOUT, episode_id="t", agent=name, error="late") for name in ("x", "y")]
    summary = GroupSummary(group_id=0, members=(*agents, *unscored, *late), versions=(4, 4), seconds=1.0)
    found = outcome_of(Task("p", id="a", metadata={"source": "s", "level": 2}), summary, "level")
    (episode,) = found.episodes
    assert (episode.reward, episode.score, episode.tokens, episode.turns, episode.truncated) == (0.5, 0.25, 7, 3, True)
    assert (found.kind, found.failures) == ("2", ("timeout: late",))
    assert {name: [each.reward for each in own] for name, own in found.agents.items()} == {"x": [1.0], "y": [0.0]}
    assert kind_of(Task("p", metadata={"source": "s", "kind": "k"})) == "k"


def test_an_episode_without_a_score_is_no_episode_of_score_0() -> None:
    summary = GroupSummary(group_id=0, members=(member(1.0, score=None),), versions=(4, 4), seconds=1.0)
    assert outcome_of(TASKS[0], summary).scores == []


@pytest.mark.parametrize(("failed", "fails"), [(1, False), (2, True)])
def test_failures_are_a_share_of_all_episodes(failed: int, fails: bool) -> None:
    members = tuple([member()] * 2 + [member(None, Status.TIMEOUT)] * failed)
    outcome = outcome_of(TASKS[0], GroupSummary(group_id=0, members=members, versions=(4, 4), seconds=1.0))
    if not fails:
        check_failures([outcome], 0.4)
        return
    with pytest.raises(TooManyFailuresError, match="2 of 4 episodes"):
        check_failures([outcome], 0.4)
    with pytest.raises(TooManyFailuresError, match="1 of 1 episodes"):
        check_failures([TaskOutcome(task_id="a", failures=("late",))], 1.0)


@pytest.mark.anyio
async def test_figures_are_filed_under_the_step_whose_weights_were_played(tmp_path: Path) -> None:
    observer = Recorder()
    pool: Any = Pool(lambda number: [member(number / 2)] * 2)
    evaluations = Evaluations(pool, TASKS, PLAN, every=2, num_steps=5, observer=observer, run_dir=tmp_path)
    assert [step for step in range(8) if evaluations.due(step)] == [0, 2, 4, 5, 6]
    found = await evaluations.evaluate(4)
    assert (found["eval/step"], found["eval/reward"], found["eval/tasks"]) == (4.0, 0.5, 3.0)
    assert found["eval/pass@1"] == pytest.approx(2 / 3)
    assert 0.0 <= found["eval/seconds"] < 5.0
    row = json.loads((tmp_path / "evaluations.jsonl").read_text())
    assert (row["step"], row["by_task"]["c"]["reward"]) == (4, 1.0)
    assert all(each.eval_sampling.name == "eval-4" for each in pool.asked)


@pytest.mark.anyio
async def test_engines_of_their_own_play_as_many_tasks_as_they_have_room_for() -> None:
    shared, own = (Pool(lambda number: [member()] * 2) for _ in range(2))
    evaluations = Evaluations(shared, TASKS, replace(PLAN, max_num_seqs=1), every=1, num_steps=5, observer=Recorder())  # type: ignore[arg-type]
    await evaluations.evaluate(4)
    await evaluations.on(own, 6).evaluate(4)  # type: ignore[arg-type]
    assert (shared.most, own.most) == (1, 3)


@pytest.mark.parametrize(("tasks", "due"), [([], []), (TASKS, [2, 4, 5])])
def test_without_tasks_no_evaluation_is_ever_due(tasks: list[Task], due: list[int]) -> None:
    pool: Any = Pool(lambda number: [])
    run = flow_of(eval_every=2, num_steps=5)
    opened = open_evaluations(PLAN, run, tasks, pool, pool, Recorder(), resumed=False)
    assert [step for step in range(1, 6) if opened.due(step)] == due


def test_a_kind_of_all_tasks_has_no_figure_of_its_own() -> None:
    easy, hard = (Task("p", metadata={"kind": kind}) for kind in ("easy", "hard"))
    kept = TrainingConfig(keep_best="eval/score/easy")
    check_kept_kind([easy, hard], kept, "")
    for tasks, remedy in (([easy, easy], "All tasks are of one kind"), ([hard, Task("p")], "Its kinds are hard, other")):
        with pytest.raises(ConfigError, match=remedy):
            check_kept_kind(tasks, kept, "")
