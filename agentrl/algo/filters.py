"""Choosing the groups that are worth training on. Plain Python, so that the driver may use it without loading torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import TypeAlias

from agentrl.algo import facts
from agentrl.algo.flat import by_agent
from agentrl.core.summaries import GroupSummary

GroupFilter: TypeAlias = Callable[[GroupSummary], str | None]
"""From a finished group to the reason for which it is rejected, or `None` to train on it."""


class Rejection(StrEnum):
    """Reasons of the built-in filters to reject a group."""

    TOO_HARD = "too_hard"
    """The mean score is not above the lower bound."""
    TOO_EASY = "too_easy"
    """The mean score is not below the upper bound."""
    ZERO_VARIANCE = "zero_variance"
    """The group is flat: the estimator would give advantage 0 to every token."""
    TRUNCATED = "truncated"
    """Too few of its episodes ended by themselves, where truncated ones are not trained."""


def keep_all(group: GroupSummary) -> str | None:
    """Reject no group."""
    del group
    return None


def reject_flat(
    group: GroupSummary, flat: Callable[[GroupSummary], bool], score_range: tuple[float, float] | None = None
) -> Rejection | None:
    """Reject a group of which nothing is learned, or whose mean score is not inside a range: dynamic sampling (DAPO, arXiv:2503.14476).

    A group of several agents is kept if it is worth training on for one of them, each judged by its own episodes.

    Args:
        group: The finished group.
        flat: Says whether nothing is learned of a group with the members of one agent; see `agentrl.algo.plan.flatness`.
        score_range: The mean score must lie strictly inside, if it is given and the group has scores.

    Returns:
        The reason to reject it, for the first agent if there are several; `None` to keep it.
    """
    reasons = [_reason(part, flat, score_range) for part in by_agent(group)]
    return None if None in reasons else next(iter(reasons), None)


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


def _reason(group: GroupSummary, flat: Callable[[GroupSummary], bool], score_range: tuple[float, float] | None) -> Rejection | None:
    """The reason to reject what one agent did; members without a score are left out of the mean."""
    is_flat = flat(group)
    scores = [member.score for member in group.trainable if member.score is not None]
    if scores and (is_flat or score_range is not None):
        low, high = score_range or (0.0, 1.0)
        # The exact sum, so that a mean at a bound does not depend on the order of the members.
        mean = math.fsum(scores) / len(scores)
        if mean <= low:
            return Rejection.TOO_HARD
        if mean >= high:
            return Rejection.TOO_EASY
    return Rejection.ZERO_VARIANCE if is_flat else None
