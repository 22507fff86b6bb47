"""Choosing the groups that are worth training on. Plain Python, so that the driver may use it without loading torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TypeAlias

from agentrl.algo import facts
from agentrl.algo.statistics import SAME
from agentrl.core.summaries import GroupSummary, MemberSummary

GroupFilter: TypeAlias = Callable[[GroupSummary], str | None]
"""From a finished group to the reason for which it is rejected, or `None` to train on it."""


class Rejection(StrEnum):
    """Reasons of the built-in filters to reject a group."""

    TOO_HARD = "too_hard"
    """The mean score is not above the lower bound."""
    TOO_EASY = "too_easy"
    """The mean score is not below the upper bound."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards are equal once they are clipped, so that every group estimator would give advantage 0."""
    TRUNCATED = "truncated"
    """Too few of its episodes ended by themselves, where truncated ones are not trained."""


def all_same(rewards: Sequence[float]) -> bool:
    """Return True if rewards differ by rounding at most."""
    low, high = min(rewards), max(rewards)
    return high - low <= SAME * max(high, -low)


def keep_all(group: GroupSummary) -> str | None:
    """Reject no group."""
    del group
    return None


def dynamic_filter(
    group: GroupSummary,
    score_range: tuple[float, float] = (0.0, 1.0),
    reward_clip_range: tuple[float, float] = (-math.inf, math.inf),
) -> Rejection | None:
    """Reject a group without contrast: DAPO's dynamic sampling (arXiv:2503.14476).

    A group of several agents is kept if it is worth training on for one of them, each judged by its own rewards and scores.

    Args:
        group: The finished group.
        score_range: The group is kept only if its mean score lies strictly inside.
        reward_clip_range: Range to which estimators clip rewards.

    Returns:
        The reason to reject it, for the first agent if there are several; `None` to keep it.
    """
    members = group.trainable
    agents = dict.fromkeys(member.agent for member in members) or ("",)
    reasons = [_without_contrast([m for m in members if m.agent == agent], score_range, reward_clip_range) for agent in agents]
    return None if None in reasons else reasons[0]


def filter_truncated(group: GroupSummary, keep: GroupFilter, *, in_baseline: bool, least: int) -> str | None:
    """Reject a group of which too little is left without its truncated episodes; `keep` judges the others.

    Args:
        group: The finished group.
        keep: Judges what an estimator will see: the whole group, or what is left of it.
        in_baseline: True if truncated episodes count in the group's baseline, so that one episode that is trained is enough.
        least: Episodes that must be left if they do not.

    Returns:
        The reason to reject it; `None` to keep it.
    """
    left = replace(group, members=tuple(member for member in group.members if not member.cut_short))
    if left.num_trainable < (1 if in_baseline else least):
        return Rejection.TRUNCATED
    return keep(group if in_baseline else left)


def find_filter(name: str) -> GroupFilter:
    """Return the user's own filter ``file.py:name``, with its answers checked; a file that cannot be used is a `ConfigError`."""
    function = facts.find(facts.FILTER, name, {})

    def checked(group: GroupSummary) -> str | None:
        with facts.calls(facts.FILTER, function):
            reason = function(group)
        if reason is not None and (not isinstance(reason, str) or not reason):
            problem = f"returned {reason!r} for group {group.group_id}"
            raise facts.unusable(facts.FILTER, function, problem, "Return None to train on the group, or a short reason as text.")
        return reason

    return checked


def filter_facts(name: str) -> facts.FilterFacts:
    """Return the facts of the user's own filter; see `find_filter`."""
    found: facts.FilterFacts = facts.facts_of(facts.find(facts.FILTER, name, {}))
    return found


def _without_contrast(
    members: Sequence[MemberSummary], score_range: tuple[float, float], reward_clip_range: tuple[float, float]
) -> Rejection | None:
    """The reason for which one agent would learn nothing; members without a score are left out of the mean."""
    scores = [member.score for member in members if member.score is not None]
    if scores:
        # The exact sum, so that a mean at a bound does not depend on the order of the members.
        mean = math.fsum(scores) / len(scores)
        if mean <= score_range[0]:
            return Rejection.TOO_HARD
        if mean >= score_range[1]:
            return Rejection.TOO_EASY
    low, high = reward_clip_range
    rewards = [min(max(member.reward, low), high) for member in members if member.reward is not None]
    return Rejection.ZERO_VARIANCE if rewards and all_same(rewards) else None
