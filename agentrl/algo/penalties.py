"""What an episode pays for its length. Plain Python numbers; scores for filtering are taken before these."""

from __future__ import annotations


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
    """Reward of an episode that may have been cut by a length limit instead of stopping by itself.

    Args:
        reward: What it earned.
        truncated: Whether it was cut by length.
        penalty: At least 0: multiplies the reward; below 0: replaces it; `None`: leaves it alone.
    """
    if penalty is None or not truncated:
        return reward
    return reward * penalty if penalty >= 0 else penalty
