"""Groups of several agents in the flow: filtered, counted and reported by agent, by episode, or by group."""

from dataclasses import replace
from typing import Any

import pytest

from agentrl.algo.filters import Rejection
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import TooManyFailuresError
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import Status
from agentrl.flow.ledger import failure_reason
from agentrl.flow.plan import FlowConfig
from agentrl.flow.sizes import FlowPlan
from agentrl.resolve.parts import flow_plan
from tests.unit.flow.fakes import Scene, ScriptedWorker, failed_member, flow_of, member

SETTINGS = flow_of(advantage_estimator="group_norm", num_steps=2, groups_per_step=2, n_samples_per_prompt=2)


def episode(number: int, ann: float, bob: float, **bobs: Any) -> list[MemberSummary]:
    """Two trajectories of one episode."""
    return [
        member(ann, episode_id=f"e{number}", agent="ann", metrics={"deal": 1.0}),
        member(bob, episode_id=f"e{number}", agent="bob", metrics={"deal": 1.0}, **{"num_tokens": 5, "num_turns": 1, **bobs}),
    ]


def failed(number: int) -> list[MemberSummary]:
    return [replace(failed_member(), episode_id=f"e{number}", agent=agent) for agent in ("ann", "bob")]


def summary(*episodes: list[MemberSummary]) -> GroupSummary:
    return GroupSummary(group_id=0, members=tuple(m for e in episodes for m in e), versions=(0, 0), seconds=1.0)


@pytest.mark.parametrize(
    ("episodes", "reason"),
    [
        ([episode(0, 0.5, 0.2), episode(1, 0.5, 0.4)], None),
        ([episode(0, 0.5, 0.2), episode(1, 0.5, 0.2)], Rejection.ZERO_VARIANCE),
        ([episode(0, 1.0, 0.0), episode(1, 1.0, 0.0)], Rejection.TOO_EASY),
        ([episode(0, 1.0, 0.2), episode(1, 1.0, 0.4)], None),
        ([episode(0, 0.5, 0.2, frozen=True), episode(1, 0.5, 0.4, frozen=True)], Rejection.ZERO_VARIANCE),
        ([episode(0, 0.5, 0.2, num_tokens=0), episode(1, 0.5, 0.4, num_tokens=0)], Rejection.ZERO_VARIANCE),
        ([episode(0, 0.5, 0.2), episode(1, 0.25, 0.2), failed(2)], None),
    ],
)
def test_a_group_is_kept_if_one_trained_agent_can_learn_from_it(episodes: list[list[MemberSummary]], reason: str | None) -> None:
    config = TrainConfig(flow=FlowConfig(flat_groups="resample"))
    assert flow_plan(config).group_filter()(summary(*episodes)) == reason


def test_a_group_counts_its_episodes() -> None:
    group = summary(episode(0, 1.0, 0.0), failed(1), episode(2, 0.0, 1.0))
    assert ([len(e) for e in group.episodes], group.num_trainable) == ([2, 2, 2], 2)
    assert summary([member(1.0), member(0.0)]).num_trainable == 2
    assert failure_reason(summary(failed(0), failed(1), [member(None, Status.TIMEOUT, episode_id="e2")])) == "env_error"


def played(settings: FlowPlan, *episodes: list[MemberSummary]) -> Scene:
    scene = Scene(settings, workers=[ScriptedWorker(outcome=lambda group_request: summary(*episodes).members)])
    scene.run()
    return scene


def test_metrics_are_by_agent_and_by_episode() -> None:
    scene = played(SETTINGS, episode(0, 1.0, 0.25), episode(1, 0.5, 0.25, truncated=True), failed(2))
    row = scene.observer.steps[0]
    assert (row["reward/ann"], row["reward/bob"], row["reward/mean"]) == (0.75, 0.25, 0.5)
    assert row["episode/count"] == 2.0 * SETTINGS.flow.groups_per_step
    assert (row["episode/tokens_mean"], row["episode/turns_mean"], row["episode/truncated"], row["env/deal"]) == (15.0, 3.0, 0.5, 1.0)
    assert row["group/zero_variance"] == 0.5
    assert row["failures/env_error"] == SETTINGS.flow.groups_per_step


def test_a_frozen_agents_reward_is_reported_but_not_part_of_the_mean() -> None:
    row = played(SETTINGS, episode(0, 1.0, 0.25, frozen=True), episode(1, 0.5, 0.25, frozen=True)).observer.steps[0]
    assert (row["reward/bob"], row["reward/mean"]) == (0.25, 0.75)


def test_one_episode_of_two_agents_is_not_two_members() -> None:
    """The estimators need two episodes; one episode's two trajectories do not stand in for them."""
    settings = changed(SETTINGS, advantage_estimator="group_norm")
    assert len(played(settings, episode(0, 1.0, 0.0), episode(1, 0.0, 1.0)).observer.steps) == 2
    with pytest.raises(TooManyFailuresError, match="ValueError: broken"):
        played(settings, episode(0, 1.0, 0.0), failed(1))
