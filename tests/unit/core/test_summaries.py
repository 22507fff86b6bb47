"""Summaries of groups: what follows from the members, and how they travel between processes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import Status
from tests.unit.flow.fakes import failed_member, member


def group(*members: MemberSummary, greedy: tuple[MemberSummary, ...] = ()) -> GroupSummary:
    return GroupSummary(group_id=7, members=members, versions=(1, 2), seconds=3.0, records=({"id": "a"},), greedy=greedy)


PLAYED = member(1.0, episode_id="e0", metrics={"guesses": 2.0}, timings={"total_s": 0.5}, agent="ann", truncated=True)


@pytest.mark.parametrize(
    ("names", "sizes"),
    [(["", "", ""], [1, 1, 1]), (["a", "b", "c"], [1, 1, 1]), (["a", "b", "a"], [2, 1]), (["a", "", ""], [1, 1, 1]), ([], [])],
)
def test_members_belong_to_the_episodes_that_they_name(names: list[str], sizes: list[int]) -> None:
    members = [member(float(number), episode_id=name) for number, name in enumerate(names)]
    episodes = group(*members).episodes
    assert [len(episode) for episode in episodes] == sizes
    assert sorted(m.reward or 0.0 for episode in episodes for m in episode) == [float(n) for n in range(len(names))]


def test_an_episode_is_trained_if_one_of_its_trajectories_is() -> None:
    frozen = replace(PLAYED, frozen=True)
    played = group(PLAYED, frozen, replace(frozen, episode_id="e1"), replace(failed_member(), episode_id="e2"))
    assert played.trainable == (PLAYED,)
    assert played.trained_episodes == ((PLAYED, frozen),)
    assert played.num_trainable == 1
    assert replace(played, members=(PLAYED, replace(PLAYED, episode_id="e1"))).num_trainable == 2
    assert replace(played, greedy=(failed_member(),)).num_trainable == 0


def test_a_summary_travels_whole_and_without_what_follows_from_it() -> None:
    sent = group(PLAYED, failed_member(), greedy=(PLAYED,))
    plain = len(pickle.dumps(sent))
    assert (sent.num_trainable, len(sent.episodes)) == (1, 2)
    received = pickle.loads(pickle.dumps(sent))
    assert received == sent
    assert received.members[0] == PLAYED
    assert received.members[1].status is Status.ENV_ERROR
    assert len(pickle.dumps(sent)) == plain
    assert received.num_trainable == 1
