"""Values of the states in which episodes were cut short."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl.algo.plan import bootstraps
from agentrl.core.types import FinishReason, Group, GroupRequest, Status, Task, Trajectory
from agentrl.learner.batch import collate
from agentrl.learner.bootstrap import apart, with_cuts
from agentrl.learner.layout import Layout
from agentrl.learner.learner import LearnerRank
from agentrl.learner.trees import one_row_bundles
from agentrl.rollout.records import recorded_turn, trajectory_record
from tests.learner_support import CollectingSender, algorithm, cut_short, make_groups, make_settings

GROUPS = cut_short(make_groups(3, 3, seed=4))
"""Three episodes a group: the first was cut with an observation unread, the second with none, the third ended."""


def test_rows_of_episodes_that_were_cut_go_on_to_the_state_of_the_cut() -> None:
    batch = collate(GROUPS)
    longer = with_cuts(batch)
    assert longer.num_actions == batch.num_actions + 6
    last = {episode: row for row, episode in enumerate(batch.row_episode.tolist())}
    for episode in range(batch.num_episodes):
        before, after = batch.rows[last[episode]], longer.rows[last[episode]]
        more = [[*before.tokens, 5, 6, 7, 0], [*before.tokens, 0], [*before.tokens]][episode % 3]
        assert after.tokens.tolist() == more
        assert int(longer.row_lengths[last[episode]]) == len(more)
        assert len(after.action_positions) == len(before.action_positions) + (episode % 3 < 2)
    assert longer.row_actions.tolist() == [len(row.action_positions) for row in longer.rows]
    assert longer.episode.tolist() == [e for row, e in enumerate(batch.row_episode.tolist()) for _ in longer.rows[row].action_positions]
    ended = collate(make_groups(3, 3, seed=4))
    assert with_cuts(ended) is ended


def test_an_episode_that_ended_on_a_turn_cut_by_length_has_no_bootstrap() -> None:
    def at_length(trajectory: Trajectory) -> Trajectory:
        *before, last = trajectory.turns
        return replace(trajectory, turns=(*before, replace(last, finish_reason=FinishReason.LENGTH)))

    groups = [replace(group, trajectories=tuple(map(at_length, group.trajectories))) for group in make_groups(3, 3, seed=4)]
    assert all(each.cut_short for group in groups for each in group.trajectories)
    assert collate(groups).cuts == ()


def test_values_of_cuts_are_told_apart_from_those_of_tokens() -> None:
    batch = collate(GROUPS)
    longer = with_cuts(batch)
    # The place of each action token in its row, plus 1000 for the row; those of cuts come last in theirs.
    numbers = torch.cat([1000.0 * row + torch.arange(float(count)) for row, count in enumerate(longer.row_actions.tolist())])
    values, at_cut = apart(numbers, batch)
    expected = torch.cat([1000.0 * row + torch.arange(float(count)) for row, count in enumerate(batch.row_actions.tolist())])
    assert torch.equal(values, expected)
    last = {episode: row for row, episode in enumerate(batch.row_episode.tolist())}
    ends = [1000.0 * last[e] + float(batch.row_actions[last[e]]) if e % 3 < 2 else 0.0 for e in range(batch.num_episodes)]
    assert at_cut.tolist() == ends
    for name in ("logprobs", "state", "turn"):  # figures of sampled tokens stay theirs
        assert torch.equal(apart(getattr(longer, name).float(), batch)[0], getattr(batch, name).float())


def reread(trajectory: Trajectory) -> Trajectory:
    """The trajectory that a line of ``trajectories.jsonl`` describes."""
    line = json.loads(
        json.dumps(trajectory_record(GroupRequest(group_id=0, task=Task("x"), n_samples_per_prompt=3, version=0), trajectory))
    )
    turns = tuple(map(recorded_turn, line["turns"]))
    unread = recorded_turn(line["unread"]) if "unread" in line else None
    return replace(trajectory, turns=turns, unread=unread, status=Status(line["status"]), reward=line["reward"])


def test_a_bootstrap_is_computed_again_from_the_records(tiny_model: str) -> None:
    recorded = tuple(replace(group, trajectories=tuple(map(reread, group.trajectories))) for group in GROUPS)
    learner = rank(tiny_model, algo={"advantage_estimator": "gae"})
    assert torch.equal(values_at_cuts(learner, recorded), values_at_cuts(learner))
    bare = tuple(replace(group, trajectories=tuple(replace(each, unread=None) for each in group.trajectories)) for group in recorded)
    assert not torch.allclose(values_at_cuts(learner, bare), values_at_cuts(learner))
    learner.close()


def rank(model: str, **changes: Any) -> LearnerRank:
    """A learner whose critic does not give 0."""
    learner = LearnerRank(make_settings(model, **changes), CollectingSender())
    learner.start(0, 1, 0)
    head = learner._started.models.critic.module.head
    with torch.no_grad():
        head.weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    return learner


def values_at_cuts(learner: LearnerRank, groups: tuple[Group, ...] = GROUPS) -> torch.Tensor:
    """What its critic gives for the whole text of each episode that was cut, one row at a time. # [E]."""
    batch = collate(groups)
    longer = with_cuts(batch)
    micro = Layout(longer).micro_batch(one_row_bundles(longer), packed=False)
    with torch.no_grad():
        return apart(learner._started.models.critic(micro), batch)[1]


@pytest.mark.parametrize("layout", [{}, {"micro_batch_tokens": 1}, {"share_prompts": False}])
def test_targets_of_cut_episodes_grow_by_the_value_of_the_cut(tiny_model: str, layout: dict[str, Any]) -> None:
    """With lambda 1 and no discount the target of every token is what was earned from it on, and the value of the cut."""
    mean: dict[bool, float] = {}
    episode = collate(GROUPS).episode
    for on in (True, False):
        started = rank(tiny_model, learner=layout, algo={"advantage_estimator": "gae", "bootstrap_truncated": on})
        at_cut = values_at_cuts(started)
        metrics = started.train(0, *GROUPS).metrics
        started.close()
        mean[on] = metrics["value/return_mean"]
        assert metrics.get("value/at_cut") == (pytest.approx(float(at_cut.sum()) / 6, rel=1e-4) if on else None)
    assert abs(float(at_cut.sum())) > 1e-2
    assert mean[True] - mean[False] == pytest.approx(float(at_cut[episode].mean()), rel=1e-3)


def test_the_setting_and_the_estimator_decide() -> None:
    assert bootstraps(algorithm(advantage_estimator="gae"))
    assert bootstraps(algorithm(advantage_estimator="turn_gae"))
    assert not bootstraps(algorithm(advantage_estimator="gae", bootstrap_truncated=False))
    assert not bootstraps(algorithm(advantage_estimator="group_norm"))
