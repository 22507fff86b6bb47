"""Summaries of groups for the driver: all facts but the tokens, which stay in the worker that made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from agentrl.core.types import Group, Status, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSummary:
    """Facts of one trajectory for the driver, without its tokens.

    `episode_id` is that of the trajectory; "" stands for an episode of its own. `turn_rewards` and `states` have an entry for each trained
    turn: its reward (in the last one what the episode earned beside, too), and a number that equal states of a group share.
    """

    status: Status
    reward: float | None
    score: float | None
    num_tokens: int
    num_prompt_tokens: int
    num_turns: int
    truncated: bool
    overflowed: bool = False
    episode_id: str = ""
    agent: str = ""
    frozen: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    model_scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    forked_turns: int = 0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    states: tuple[int, ...] = ()

    @property
    def trainable(self) -> bool:
        """True if the trajectory may reach the learner."""
        return self.status.trainable and not self.frozen and self.num_tokens > 0

    @property
    def cut_short(self) -> bool:
        """True if a budget or the environment ended the episode before its end."""
        return self.truncated or self.status is Status.TRUNCATED

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values alone; the driver reads millions of them."""
        return _restored, (*(value(self) for value in _GET),)


# The slots' own descriptors: `setattr` is refused by a frozen dataclass, and names need not be looked up for each member.
_GET = [getattr(MemberSummary, each.name).__get__ for each in fields(MemberSummary)]
_SET = [getattr(MemberSummary, each.name).__set__ for each in fields(MemberSummary)]


def _restored(*values: Any) -> MemberSummary:
    """Return the member with these values, in the order of the fields."""
    member = object.__new__(MemberSummary)
    for set_value, value in zip(_SET, values, strict=True):
        set_value(member, value)
    return member


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """Summary of a group, which passes through the driver in the group's place.

    What follows from the members is computed once, when it is first asked for.

    Attributes:
        group_id: As in the group request.
        members: One summary per trajectory.
        versions: Oldest and newest policy version among the trainable tokens, `None` without any.
        seconds: From start to end of the group on its worker.
        records: JSON-ready renderings of the members that were asked for.
        requests: Logs of the requests of the same members, if they are black-box agents and the logs were asked for.
        greedy: One summary per trajectory of the greedy episode, if the group request asked for one; it is no member.
        worker: Name of the worker that ran it; empty if that is not known.
    """

    group_id: int
    members: tuple[MemberSummary, ...]
    versions: tuple[int, int] | None
    seconds: float
    records: tuple[Mapping[str, Any], ...] = ()
    requests: tuple[Mapping[str, Any], ...] = ()
    greedy: tuple[MemberSummary, ...] = ()
    worker: str = ""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what follows from the members."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def trainable(self) -> tuple[MemberSummary, ...]:
        """The members that may be trained on."""
        return tuple([m for m in self.members if m.trainable])

    @cached_property
    def episodes(self) -> tuple[tuple[MemberSummary, ...], ...]:
        """The members by episode, in order; all members of an episode have its status."""
        names = {member.episode_id for member in self.members}
        if len(names) == len(self.members) or names == {""}:
            return tuple([(member,) for member in self.members])
        episodes: dict[object, list[MemberSummary]] = {}
        for number, member in enumerate(self.members):
            episodes.setdefault(member.episode_id or number, []).append(member)
        return tuple(tuple(members) for members in episodes.values())

    @property
    def played(self) -> tuple[tuple[MemberSummary, ...], ...]:
        """The episodes, and behind them the greedy one, if there is one."""
        return (*self.episodes, self.greedy) if self.greedy else self.episodes

    @cached_property
    def trained_episodes(self) -> tuple[tuple[MemberSummary, ...], ...]:
        """The episodes of which at least one trajectory may be trained on."""
        if len(self.trainable) == len(self.members):
            return self.episodes
        return tuple([episode for episode in self.episodes if any(m.trainable for m in episode)])

    @property
    def num_forked(self) -> int:
        """Number of episodes that began at a turn of another one."""
        return sum(episode[0].forked_turns > 0 for episode in self.episodes)

    @property
    def num_trainable(self) -> int:
        """Number of episodes that may be trained on; none without the greedy episode that they are compared with."""
        return len(self.trained_episodes) if all(member.status.trainable for member in self.greedy) else 0


def summarize(
    group: Group, *, seconds: float, records: tuple[Mapping[str, Any], ...] = (), requests: tuple[Mapping[str, Any], ...] = ()
) -> GroupSummary:
    """Reduce a group to what the driver needs; no token survives."""
    states: dict[tuple[object, ...], int] = {}
    return GroupSummary(
        group_id=group.group_id,
        members=tuple([_member(t, states) for t in group.trajectories]),
        versions=group.versions,
        seconds=seconds,
        records=records,
        requests=requests,
        greedy=tuple([_member(t, states) for t in group.greedy]),
    )


def _member(t: Trajectory, states: dict[tuple[object, ...], int]) -> MemberSummary:
    turns = [turn for turn in t.turns if not turn.masked] if t.status.trainable else []
    rewards = [turn.reward for turn in turns]
    if rewards:
        rewards[-1] += (t.reward or 0.0) - sum(rewards)
    return MemberSummary(
        status=t.status,
        reward=t.reward,
        score=t.score,
        num_tokens=t.num_tokens,
        num_prompt_tokens=sum(len(turn.prompt_ids) for turn in t.turns),
        num_turns=len(t.turns),
        truncated=t.truncated_by_length,
        overflowed=t.overflowed,
        episode_id=t.episode_id,
        agent=t.agent,
        frozen=t.frozen,
        metrics=dict(t.metrics),
        error=t.error,
        timings=dict(t.timings),
        model_scores=dict(t.model_scores),
        forked_turns=t.forked_turns,
        reward_parts=dict(t.reward_parts),
        turn_rewards=tuple(rewards),
        states=tuple([states.setdefault((t.agent, *turn.state), len(states)) for turn in turns]),
    )
