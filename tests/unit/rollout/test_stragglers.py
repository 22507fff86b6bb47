"""Groups that are closed without their last episodes: when, with what on record, and what it saves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from agentrl import Task
from agentrl.core.summaries import GroupSummary, summarize
from agentrl.core.types import FinishReason, Group, GroupRequest, Status, Trajectory, Turn, floats, ints
from agentrl.rollout.episode import episode_id
from agentrl.rollout.episode_plan import StragglerPolicy
from agentrl.rollout.group import Trajectories, run_group
from tests.unit.flow.fakes import Recorder, Scene, ScriptedWorker, flow_of, run_virtual

PATIENCE = StragglerPolicy(quorum=0.75, factor=3.0, least=2)
GROUP_REQUEST = GroupRequest(group_id=3, task=Task("a"), n_samples_per_prompt=8, version=0)


def trajectory(group_request: GroupRequest, index: int, status: Status, version: int = 0) -> Trajectory:
    turn = Turn(
        prompt_ids=ints([1]), token_ids=ints([2]), logprobs=floats([-1.0]), versions=ints([version]), finish_reason=FinishReason.STOP
    )
    name = episode_id(group_request, index)
    return Trajectory(
        trajectory_id=name,
        episode_id=name,
        group_id=group_request.group_id,
        turns=(turn,),
        status=status,
        reward=float(index % 2) if status.trainable else None,
    )


def play(seconds: list[float], failed: tuple[int, ...] = (), straggler_policy: StragglerPolicy | None = PATIENCE) -> tuple[Group, float]:
    """A group whose members take these times; how long it took."""

    async def main() -> tuple[Group, float]:
        async def member(index: int) -> Trajectories:
            await asyncio.sleep(seconds[index])
            return (trajectory(GROUP_REQUEST, index, Status.ENV_ERROR if index in failed else Status.FINISHED),)

        begin = asyncio.get_running_loop().time()
        group = await run_group(GROUP_REQUEST, member, set(), straggler_policy)
        return group, asyncio.get_running_loop().time() - begin

    return run_virtual(main)


def statuses(group: Group) -> list[str]:
    return [str(t.status) for t in group.trajectories]


def test_what_is_much_later_than_the_rest_is_cancelled_and_stays_on_record() -> None:
    group, seconds = play([1.0, 1.0, 2.0, 2.0, 2.0, 5.0, 40.0, 3.0])
    assert seconds == pytest.approx(6.0)  # three times the median, which 2 s is
    assert statuses(group) == ["finished"] * 6 + ["cancelled_straggler", "finished"]
    straggler = group.trajectories[6]
    assert (straggler.reward, straggler.trainable, straggler.episode_id) == (None, False, "3-0-6")
    assert straggler.error == "cancelled as a straggler after 6 s: the median of the 7 that ended is 2 s (--group-quorum)"
    assert summarize(group, seconds=1.0).num_trainable == 7


def test_without_a_quorum_the_group_waits() -> None:
    group, seconds = play([1.0] * 5 + [40.0, 50.0, 60.0])
    assert seconds == pytest.approx(40.0)  # the sixth makes the quorum, and the others are late by then
    assert statuses(group) == ["finished"] * 6 + ["cancelled_straggler"] * 2
    assert play([1.0] * 7 + [60.0], straggler_policy=None)[1] == pytest.approx(60.0)


def test_failures_do_not_count_towards_the_quorum() -> None:
    group, seconds = play([0.1, 0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 50.0], failed=(0, 1))
    assert seconds == pytest.approx(50.0)
    assert statuses(group).count("cancelled_straggler") == 0


def test_the_deadline_is_never_before_enough_have_ended() -> None:
    assert PATIENCE.deadline_s([1.0] * 5, 8) is None
    assert PATIENCE.deadline_s([1.0] * 6, 8) == 3.0
    assert StragglerPolicy(quorum=0.5, factor=2.0, least=2).deadline_s([4.0], 2) is None


def test_an_error_still_ends_the_group_at_once() -> None:
    async def main() -> None:
        async def member(index: int) -> Trajectories:
            await asyncio.sleep(float(index))
            if index == 3:
                raise KeyError("bug")
            return (trajectory(GROUP_REQUEST, index, Status.FINISHED),)

        with pytest.raises(KeyError, match="bug"):
            await run_group(GROUP_REQUEST, member, set(), PATIENCE)
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)

    run_virtual(main)


@dataclass
class Episodes(ScriptedWorker):
    """Plays members by a script, in real groups."""

    takes: Callable[[random.Random], float] = lambda draw: 1.0
    straggler_policy: StragglerPolicy | None = None
    played: list[Group] = field(default_factory=list)

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, str]:
        async def member(index: int) -> Trajectories:
            version = self.version
            await asyncio.sleep(self.takes(random.Random(f"{group_request.group_id}-{index}")))
            return (trajectory(group_request, index, Status.FINISHED, version),)

        group = await run_group(group_request, member, set(), self.straggler_policy)
        self.played.append(group)
        return summarize(group, seconds=1.0), f"ref {group_request.group_id}"


def clean(draw: random.Random) -> float:
    return draw.uniform(0.8, 1.2)


def straggling(draw: random.Random) -> float:
    """One episode of 20 takes 20 times as long."""
    seconds = clean(draw)
    return 20 * seconds if draw.random() < 0.05 else seconds


def run(
    takes: Callable[[random.Random], float], straggler_policy: StragglerPolicy | None, staleness: int
) -> tuple[float, Recorder, Episodes]:
    """Seconds of 20 steps of 8 groups of 16."""
    worker = Episodes(takes=takes, straggler_policy=straggler_policy)
    settings = flow_of(num_steps=20, groups_per_step=8, n_samples_per_prompt=16, max_staleness=staleness, advantage_estimator="group_norm")
    scene = Scene(settings, workers=[worker])
    result = scene.run()
    assert result.counts.trained == 160
    return result.seconds, scene.observer, worker


def test_records_of_older_versions_are_read() -> None:
    assert Status("withheld") is Status.CANCELLED_STRAGGLER


@pytest.mark.parametrize("staleness", [0, 1])
def test_stragglers_cost_little_and_every_one_of_them_is_counted(staleness: int) -> None:
    straggler_policy = StragglerPolicy(quorum=0.75, factor=1.5, least=2)
    clean_s, _, _ = run(clean, None, staleness)
    waiting_s, _, _ = run(straggling, None, staleness)
    closing_s, observer, worker = run(straggling, straggler_policy, staleness)
    assert waiting_s > 4 * clean_s
    assert closing_s < clean_s / 0.8, (clean_s, closing_s)
    stragglers = [t for group in worker.played for t in group.trajectories if t.status is Status.CANCELLED_STRAGGLER]
    assert 0.03 < len(stragglers) / (160 * 16) < 0.07
    assert sum(row["group/withheld"] for row in observer.steps) == len(stragglers)
    assert all(row["failures/rate"] == 0 for row in observer.steps)
    assert all(len(group.trajectories) == 16 for group in worker.played)
