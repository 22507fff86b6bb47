"""Flat groups: those in which an advantage estimator gives every token 0, so that nothing is learned of them.

Plain Python, so that the driver may ask without loading torch. An estimator names its own function of a group among its facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeAlias

from agentrl.algo.statistics import SAME
from agentrl.core.summaries import GroupSummary, MemberSummary

Flat: TypeAlias = Callable[[GroupSummary, Any], bool]
"""From a group with the members of one agent, and the options of the estimator, to whether it is flat."""


def all_same(values: Sequence[float]) -> bool:
    """Return True if numbers, of which there is at least one, differ by rounding at most."""
    low, high = min(values), max(values)
    return high - low <= SAME * max(high, -low)


def never_flat(group: GroupSummary, options: Any) -> bool:
    """Return False: an estimator that compares nothing within a group may learn of each."""
    del group, options
    return False


def equal_rewards(group: GroupSummary, options: Any) -> bool:
    """Return True if the episodes earned the same in total, once clipped."""
    return all_same(clipped_rewards(group, options))


def equal_turns(group: GroupSummary, options: Any, gamma: float) -> bool:
    """Return True if episodes earned the same from each turn on; a turn that one episode alone came to has nothing to differ from."""
    rewards = clipped_rewards(group, options)
    columns = zip_longest(*(turn_returns(m, reward, gamma) for m, reward in zip(group.trainable, rewards, strict=True)))
    return all(all_same([value for value in column if value is not None]) for column in columns)


def equal_in_all(group: GroupSummary, options: Any) -> bool:
    """Return True if rewards are equal in total, in each component and in each turn, so that no comparison can find a difference."""
    names = {name for member in group.trainable for name in member.reward_parts}
    parts = ([member.reward_parts.get(name, 0.0) for member in group.trainable] for name in names)
    return equal_rewards(group, options) and all(map(all_same, parts)) and equal_turns(group, options, 0.0)


def clipped_rewards(group: GroupSummary, options: Any) -> list[float]:
    """Return the reward of each trained episode, clipped as the estimator does."""
    low, high = options.bounds
    return [min(max(member.reward or 0.0, low), high) for member in group.trainable]


def turn_returns(member: MemberSummary, clipped: float, gamma: float) -> list[float]:
    """Return what an episode earned from each turn on, discounted per turn, where its total was clipped to `clipped`."""
    scale = clipped / member.reward if member.reward else 1.0
    ahead, returns = 0.0, list[float]()
    for reward in reversed(member.turn_rewards):
        ahead = scale * reward + gamma * ahead
        returns.append(ahead)
    return returns[::-1]


def by_agent(group: GroupSummary) -> list[GroupSummary]:
    """Return the group once for each agent, with the trained members of this one; an agent is compared with itself alone."""
    agents = dict.fromkeys(member.agent for member in group.trainable)
    if len(agents) == 1 and len(group.trainable) == len(group.members):
        return [group]
    parts = []
    for agent in agents:
        own, greedy = (tuple(m for m in members if m.agent == agent) for members in (group.trainable, group.greedy))
        parts.append(replace(group, members=own, greedy=greedy))
    return parts
