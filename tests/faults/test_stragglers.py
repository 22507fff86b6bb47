"""Episodes, or a learner, far slower than the rest: order, bounds and throughput; on virtual time."""

from __future__ import annotations

import random

import pytest

from agentrl.core.types import GroupRequest
from tests.faults.report import Saw
from tests.unit.flow.fakes import Scene, ScriptedLearner, ScriptedWorker, flow_of

STEPS = 120
MEMBERS = 4
SLOW_S = 20.0


def seconds(staleness: int, train_s: float, share: float, oversampled: int = 0) -> tuple[float, Scene]:
    """A run in which this share of the episodes takes 20 s, the others 1 s; a group takes as long as its slowest episode."""

    def duration(group_request: GroupRequest) -> float:
        rolls = random.Random(group_request.group_id)
        return max(SLOW_S if rolls.random() < share else 1.0 for _ in range(MEMBERS))

    flow = flow_of(num_steps=STEPS, groups_per_step=8, n_samples_per_prompt=MEMBERS, max_staleness=staleness, oversample=oversampled / 8)
    worker = ScriptedWorker(duration=duration, load_s=0.02)
    scene = Scene(flow, workers=[worker], learner=ScriptedLearner(train_s=lambda step: train_s))
    return scene.run().seconds, scene


@pytest.mark.row(7, "5% of the episodes take 20 s instead of 1 s; a training step takes 4 s, --max-staleness {staleness}")
@pytest.mark.parametrize(("staleness", "least"), [(5, 0.8), (8, 0.95)])
def test_slow_episodes_cost_little_where_staleness_covers_them(staleness: int, least: float, saw: Saw) -> None:
    clean, _ = seconds(staleness, 4.0, 0.0)
    slow, scene = seconds(staleness, 4.0, 0.05)
    assert clean / slow >= least
    assert scene.learner.trained_ids == list(range(STEPS * 8))  # none was cut, and none was overtaken
    assert max(row["staleness/max"] for row in scene.observer.steps) <= staleness
    one, _ = seconds(1, 4.0, 0.05)
    saw(f"{clean / slow:.0%} of the clean throughput, every slow group trained in its turn (with --max-staleness 1: {clean / one:.0%})")


@pytest.mark.row(7, "the same with --max-staleness 2 and --oversample 0.5")
def test_oversampled_groups_cover_slow_ones_and_count_them(saw: Saw) -> None:
    clean, _ = seconds(2, 4.0, 0.0)
    slow, scene = seconds(2, 4.0, 0.05, oversampled=4)
    assert clean / slow >= 0.8
    dropped = scene.observer.steps[-1]["dropped/oversampled"]
    assert dropped == STEPS * 4
    saw(f"{clean / slow:.0%} of the clean throughput; the {dropped:.0f} groups not waited for are counted as dropped/oversampled")


@pytest.mark.row(17, "training takes 10 times as long as generation, --max-staleness {staleness}, a third of the groups filtered")
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_slow_learner_bounds_queue_and_staleness(staleness: int, saw: Saw) -> None:
    flow = flow_of(num_steps=60, groups_per_step=4, n_samples_per_prompt=2, max_staleness=staleness)
    learner = ScriptedLearner(train_s=lambda step: 10.0)
    scene = Scene(flow, learner=learner, keep=lambda summary: "third" if summary.group_id % 3 == 0 else None)
    result = scene.run()
    depth, lag = (max(row[name] for row in scene.observer.steps) for name in ("queue/depth", "staleness/max"))
    assert depth <= staleness * 4
    assert lag <= staleness
    assert (result.steps, result.counts.in_flight) == (60, 0)
    assert learner.trained_ids == [group_id for group_id in range(result.counts.submitted) if group_id % 3]
    if staleness:
        busy = sum(end - begin for begin, end in learner.spans)
        assert result.seconds < busy * 1.05  # generation is hidden, also behind filtering
    filtered = result.counts.filtered["third"]
    saw(f"60 steps; queue at most {depth:.0f} groups (cap {staleness * 4}), staleness at most {lag:.0f}, {filtered} filtered")
