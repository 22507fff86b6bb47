"""Metrics of a step from events, groups and counters that are all known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.core.protocols import EngineStats, TrainResult, WeightUpdate
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import GroupRequest, Status, Task
from agentrl.flow.ledger import LedgerCounts
from agentrl.flow.metrics import Meter, Trained
from agentrl.flow.queue import Accepted
from tests.unit.flow.fakes import member

COUNTS = LedgerCounts(submitted=3, trained=2, filtered={}, dropped={}, in_flight=1)


def summary(members: Sequence[MemberSummary], *, versions: tuple[int, int] | None = (5, 6), **changes: Any) -> GroupSummary:
    return GroupSummary(group_id=0, members=tuple(members), versions=versions, seconds=1.0, **changes)


def accepted(group: GroupSummary, *, version: int = 6, at_s: float = 90.0) -> Accepted:
    group_request = GroupRequest(group_id=group.group_id, task=Task("p"), n_samples_per_prompt=len(group.members), version=version)
    return Accepted(group_request, "ref", group, at_s)


def trained(*groups: Accepted, **changes: Any) -> Trained:
    values = {"interval_s": 8.0, "learner_s": 5.0, "export_s": 0.5, "queue_depth": 3, "taken_s": 100.0, "exported_s": 106.0}
    result = TrainResult(metrics={}, seconds=4.0)
    return Trained(
        version=8, groups=groups, oversampled=(), result=result, update=WeightUpdate(version=8, transport="shm"), **{**values, **changes}
    )


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def meter(clock: Clock | None = None) -> Meter:
    return Meter(clock or Clock(), lambda group: len({m.reward for m in group.trainable}) == 1)


def step(of: Meter, *groups: Accepted, stats: dict[str, EngineStats] | None = None, **changes: Any) -> dict[str, float]:
    one = groups or (accepted(summary([member(0.0), member(1.0)])),)
    return of.step(trained(*one, **changes), publish_s=0.2, stats=stats or {}, counts=COUNTS, running=4)


def test_times_of_a_step_follow_from_when_it_ended() -> None:
    assert trained().times == {"begin_s": 97.0, "taken_s": 100.0, "trained_s": 105.0, "exporting_s": 105.5, "exported_s": 106.0}


def test_attempts_are_counted_by_episode_until_the_next_step() -> None:
    of = meter()
    two_agents = [member(episode_id="a", agent="x"), member(episode_id="a", agent="y"), member(episode_id="b", agent="x")]
    of.attempt(summary(two_agents), failed=False, retried=False)
    late = member(None, Status.CANCELLED_STRAGGLER, episode_id="c")
    broken = member(None, Status.TIMEOUT, episode_id="d")
    of.attempt(summary([late, broken, member(episode_id="e")]), failed=True, retried=False)
    of.attempt(summary([broken, member(episode_id="f")]), failed=True, retried=True)
    found = step(of)
    assert (found["failures/groups"], found["failures/retries"]) == (2.0, 1.0)
    assert found["failures/rate"] == pytest.approx(2 / 3)
    assert found["group/withheld"] == 1.0
    assert found["group/withheld_share"] == pytest.approx(1 / 7)
    assert {name: value for name, value in found.items() if name.startswith("failures/") and value} == {
        "failures/groups": 2.0,
        "failures/retries": 1.0,
        "failures/rate": pytest.approx(2 / 3),
        "failures/timeout": 2.0,
    }
    assert "failures/cancelled_straggler" not in found
    again = step(of)
    assert (again["failures/groups"], again["failures/rate"], again["group/withheld"]) == (0.0, 0.0, 0.0)


def test_verdicts_are_shares_of_the_groups_that_did_not_fail() -> None:
    of = meter()
    of.verdict(summary([member(1.0), member(1.0)]), accepted=False)
    for reward in (0.0, 0.5, 0.5):
        of.verdict(summary([member(reward), member(None, Status.TIMEOUT)]), accepted=True)
    found = step(of)
    assert found["group/pass_rate"] == 0.75
    assert found["reward/unfiltered_mean"] == pytest.approx(3.0 / 5)
    assert "group/pass_rate" not in step(of)


def test_rewards_are_those_that_were_trained_on() -> None:
    frozen = member(7.0, frozen=True)
    groups = [
        accepted(summary([member(0.0), member(1.0)], greedy=(member(0.25), frozen))),
        accepted(summary([member(2.0, score=None), member(2.0, score=None), member(None, Status.TIMEOUT)])),
    ]
    found = step(meter(), *groups)
    assert found["reward/mean"] == pytest.approx(1.25)
    assert found["reward/std"] == pytest.approx((sum((r - 1.25) ** 2 for r in (0, 1, 2, 2)) / 4) ** 0.5)
    assert found["score/mean"] == 0.5
    assert found["reward/greedy"] == 0.25
    assert (found["group/zero_variance"], found["group/count"]) == (0.5, 2.0)


def test_equal_rewards_deviate_by_nothing() -> None:
    found = step(meter(), accepted(summary([member(0.1)] * 3)))
    assert found["reward/std"] == 0.0
    assert found["group/zero_variance"] == 1.0


def test_rewards_of_agents_that_are_not_trained_are_shown_too() -> None:
    found = step(meter(), accepted(summary([member(1.0, agent="policy"), member(-1.0, agent="partner", frozen=True)])))
    assert (found["reward/policy"], found["reward/partner"], found["reward/mean"]) == (1.0, -1.0, 1.0)


def test_episodes_add_up_their_trajectories_and_count_once() -> None:
    forked = member(episode_id="b", forked_turns=3, num_tokens=4)
    cut = [member(episode_id="a", agent=name, truncated=True, overflowed=name == "x") for name in ("x", "y")]
    found = step(meter(), accepted(summary([*cut, forked, member(episode_id="c"), member(episode_id="d")])))
    assert (found["episode/count"], found["tokens"]) == (4.0, 44.0)
    assert (found["episode/tokens_mean"], found["episode/tokens_max"]) == (11.0, 20.0)
    assert (found["episode/truncated"], found["episode/overflowed"], found["episode/forked"]) == (0.25, 0.25, 0.25)
    assert found["episode/turns_mean"] == pytest.approx(10 / 4)


def test_lag_is_that_of_the_oldest_token_and_that_at_admission() -> None:
    group = summary([member(0.0), member(1.0)])
    groups = [accepted(group, version=7), accepted(summary([member()], versions=(3, 7)), version=4), accepted(group, version=7)]
    found = step(meter(), *groups)
    assert found["staleness/mean"] == pytest.approx((2 + 4 + 2) / 3)
    assert found["staleness/max"] == 4.0
    assert found["staleness/admission_mean"] == 1.0
    shares = {name: value for name, value in found.items() if "share_" in name}
    assert shares == {"staleness/admission_share_0": pytest.approx(2 / 3), "staleness/admission_share_3": pytest.approx(1 / 3)}


def test_clocks_and_counters_begin_where_the_step_before_ended() -> None:
    clock = Clock()
    of = meter(clock)
    first = EngineStats(busy_s=1.0, clock_s=4.0, tokens=100, prompt_tokens=50, cached_tokens=10, paused_s=3.0)
    clock.now = 20.0
    of.start({"one": first})
    clock.now = 30.0
    second = EngineStats(busy_s=5.0, clock_s=12.0, tokens=300, prompt_tokens=90, cached_tokens=20, paused_s=3.5)
    found = step(of, stats={"one": second})
    assert found["time_s"] == 20.0
    assert found["tokens_per_s"] == pytest.approx(200 / 10)
    assert found["idle/generator"] == pytest.approx(1 - 4 / 8)
    assert found["engine/cached_prompt_share"] == pytest.approx(10 / 40)
    assert found["publish/pause_s"] == pytest.approx(0.5)
    clock.now = 35.0
    replaced = EngineStats(busy_s=1.0, clock_s=2.0, tokens=10)
    found = step(of, stats={"one": replaced})
    assert (found["tokens_per_s"], found["idle/generator"], found["time_s"]) == (2.0, 0.5, 25.0)
    clock.now = 37.0
    found = step(of, stats={"one": EngineStats(busy_s=1.5, clock_s=4.0, tokens=30)})
    assert (found["tokens_per_s"], found["idle/generator"]) == (10.0, 0.75)


def test_a_learner_is_idle_where_it_does_not_train() -> None:
    found = step(meter())
    assert (found["idle/learner"], found["time/train_s"], found["time/learner_s"], found["time/step_s"]) == (0.5, 4.0, 5.0, 8.0)
    assert (found["queue/wait_s"], found["queue/depth"], found["queue/running"]) == (10.0, 3.0, 4.0)
    assert (found["publish/seconds"], found["publish/export_s"], found["step"]) == (0.2, 0.5, 8.0)
