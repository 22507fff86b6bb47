"""Rewards of steps within a turn: the token at which each is paid, and what becomes of them where the reward of the turn changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl.core.types import Turn
from agentrl.env.results import bad_result


def placed(
    step_rewards: Sequence[tuple[int, float]], ids: Sequence[int], answer: str, decode: Callable[[Sequence[int]], str], where: str
) -> tuple[tuple[int, float], ...]:
    """Return the place of the token at which each step of a turn is paid, with its reward.

    Args:
        step_rewards: Number of characters of the answer up to the end of each step, and what the step is worth.
        ids: The sampled tokens of the turn. # [T]
        answer: Its text as user code read it.
        decode: From tokens to text.
        where: File, class and method that gave the rewards, for errors.

    Raises:
        EnvResultError: If a step ends behind the text.
    """
    for end, _ in step_rewards:
        if end > len(answer):
            raise bad_result(where, "step_rewards", end, f"is behind the end of action_text, which has {len(answer)} characters")
    return tuple((_token_at(ids, end, decode), value) for end, value in step_rewards)


def _token_at(ids: Sequence[int], end: int, decode: Callable[[Sequence[int]], str]) -> int:
    """Return the place of the first token with which `end` characters are written; the text of the tokens before only grows."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if len(decode(ids[:middle])) < end else (low, middle)
    return low - 1


def with_reward(turn: Turn, reward: float, share: float) -> Turn:
    """Return a turn with another reward, in which this share of the rewards of its steps is left; the rest is paid at its last token."""
    steps = tuple((place, share * value) for place, value in turn.step_rewards) if share else ()
    return turn if (turn.reward, turn.step_rewards) == (reward, steps) else replace(turn, reward=reward, step_rewards=steps)


def with_steps(turn: Turn, step_rewards: Sequence[tuple[int, float]], decode: Callable[[Sequence[int]], str]) -> Turn:
    """Return a turn in which parts of its reward, which has them already, are paid at the ends of steps; arguments as in `placed`."""
    if not step_rewards:
        return turn
    found = placed(step_rewards, turn.token_ids.tolist(), turn.text, decode, "step_rewards")
    return replace(turn, step_rewards=(*turn.step_rewards, *found))
