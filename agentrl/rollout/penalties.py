"""Penalties for length, applied to the turns of an episode that ended properly; its score was taken before."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentrl.core.types import FinishReason, Turn
from agentrl.rollout.plan import PenaltyConfig
from agentrl.rollout.step_rewards import with_reward


def overlong_penalty(length: int, *, limit: int, buffer: int, factor: float = 1.0) -> float:
    """Soft punishment of answers that come close to the limit, to be added to the reward (DAPO, arXiv:2503.14476).

    ``-factor * min(length - (limit - buffer), buffer) / buffer``, and 0 below ``limit - buffer``.

    Args:
        length: Tokens sampled.
        limit: Tokens that may be sampled.
        buffer: Tokens before the limit over which the penalty grows from 0 to its full size; 0 switches it off.
        factor: The full size.
    """
    excess = length - (limit - buffer)
    if buffer <= 0 or excess <= 0:
        return 0.0
    return -factor * min(excess, buffer) / buffer


def stop_properly(reward: float, *, truncated: bool, penalty: float | None) -> float:
    """Return the reward of an episode that may have been cut by a length limit instead of stopping by itself.

    A penalty of at least 0 multiplies the reward; below 0 it replaces it; `None` leaves it alone.
    """
    if penalty is None or not truncated:
        return reward
    return reward * penalty if penalty >= 0 else penalty


def penalize(turns: Sequence[Turn], budgets: Sequence[int], settings: PenaltyConfig) -> tuple[Turn, ...]:
    """The turns of one episode with what their length costs taken off their rewards.

    First each turn pays for coming close to its own budget (the tokens it was allowed, before the context's end limits it), then the
    episode for being cut; a reward that replaces the episode's is that of the last turn, and the others get 0.
    """
    buffer, factor, coefficient = settings.overlong_buffer, settings.overlong_penalty, settings.stop_properly_penalty
    if buffer <= 0 and coefficient is None:
        return tuple(turns)
    rewards = [
        turn.reward + overlong_penalty(len(turn.token_ids), limit=budget, buffer=min(buffer, budget), factor=factor)
        for turn, budget in zip(turns, budgets, strict=True)
    ]
    cut = turns[-1].finish_reason is FinishReason.LENGTH
    if cut and coefficient is not None and coefficient < 0:
        rewards = [0.0] * (len(turns) - 1) + [stop_properly(math.fsum(rewards), truncated=True, penalty=coefficient)]
    else:
        rewards = [stop_properly(reward, truncated=cut, penalty=coefficient) for reward in rewards]
    share = 1.0 if coefficient is None or not cut else max(coefficient, 0.0)
    return tuple(with_reward(turn, reward, share) for turn, reward in zip(turns, rewards, strict=True))
