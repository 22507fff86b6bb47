"""Which groups are worth training on. Plain Python, so that the driver may use it without loading torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum


class Rejection(StrEnum):
    """Why a group is not trained."""

    TOO_FEW_MEMBERS = "too_few_members"
    """Fewer members ended properly than the estimator needs."""
    TOO_HARD = "too_hard"
    """The mean score is not above the lower bound."""
    TOO_EASY = "too_easy"
    """The mean score is not below the upper bound."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards are equal, so that every group estimator would give advantage 0."""


def rejection(
    scores: Sequence[float | None],
    rewards: Sequence[float],
    *,
    min_members: int = 1,
    score_range: tuple[float, float] | None = None,
    zero_variance: bool = False,
) -> Rejection | None:
    """Decide about one group.

    Args:
        scores: Of the members that ended properly, before penalties; `None` where the environment gave none, and
            such members are left out of the mean.
        rewards: Of the same members.
        min_members: Members needed; 2 for a group estimator.
        score_range: Keep the group only if its mean score lies strictly inside; `None` switches this off.
        zero_variance: Reject a group whose rewards are all equal.

    Returns:
        The reason to reject it, or `None` to keep it. A group without any score passes the range.
    """
    if len(rewards) < min_members:
        return Rejection.TOO_FEW_MEMBERS
    known = [score for score in scores if score is not None]
    if score_range is not None and known:
        mean = math.fsum(known) / len(known)
        if mean <= score_range[0]:
            return Rejection.TOO_HARD
        if mean >= score_range[1]:
            return Rejection.TOO_EASY
    if zero_variance and rewards and max(rewards) == min(rewards):
        return Rejection.ZERO_VARIANCE
    return None
