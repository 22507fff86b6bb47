"""From the turns of an episode to training rows: the one place where that happens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentrl.core.errors import BatchError
from agentrl.core.types import FloatArray, IntArray, Trajectory, Turn, floats, ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One sequence to train on; L tokens, A of them sampled, in K turns.

    Attributes:
        tokens: Everything the model saw and wrote, in order. # [L]
        action_positions: Where in `tokens` the sampled ones are, ascending. # [A]
        logprobs: Behaviour log-probabilities. # [A]
        versions: Policy versions. # [A]
        temperatures: Sampling temperatures. # [A]
        turn_ends: Index in 0..A-1 of the last sampled token of each turn. # [K]
        turn_rewards: Reward of each turn. # [K]
        branch: Number of the row within its trajectory, from 0.
        trajectory_id: The trajectory it came from.
        episode_id: The episode it came from; every branch has the same, and an episode counts once.
    """

    tokens: IntArray
    action_positions: IntArray
    logprobs: FloatArray
    versions: IntArray
    temperatures: FloatArray
    turn_ends: IntArray
    turn_rewards: FloatArray
    branch: int
    trajectory_id: str
    episode_id: str


def merge_turns(trajectory: Trajectory) -> tuple[Row, ...]:
    """Join turns into as few rows as the contexts allow.

    A turn that extends the tokens so far joins the row; a `fresh` turn, whose context was rewritten, begins a new one.

    Args:
        trajectory: An episode; its turns may be few or many, but each has sampled tokens.

    Returns:
        The rows in order; every sampled token is in exactly one of them, and so is every turn's reward.

    Raises:
        BatchError: If a turn has no sampled token, so that its reward would have no place.
    """
    branches: list[list[Turn]] = []
    for index, turn in enumerate(trajectory.turns):
        if not len(turn.token_ids):
            raise BatchError(f"trajectory {trajectory.trajectory_id}: turn {index} has no sampled token")
        if turn.fresh or not branches:
            branches.append([])
        branches[-1].append(turn)
    return tuple(_row(trajectory, branch, turns) for branch, turns in enumerate(branches))


def _row(trajectory: Trajectory, branch: int, turns: list[Turn]) -> Row:
    pieces = [part for turn in turns for part in (turn.prompt_ids, turn.token_ids)]
    sampled = [np.full(len(piece), index % 2 == 1) for index, piece in enumerate(pieces)]
    counts = np.array([len(turn.token_ids) for turn in turns])
    return Row(
        tokens=ints(np.concatenate(pieces)),
        action_positions=ints(np.flatnonzero(np.concatenate(sampled)).astype(np.int32)),
        logprobs=floats(np.concatenate([turn.logprobs for turn in turns])),
        versions=ints(np.concatenate([turn.versions for turn in turns])),
        temperatures=floats(np.repeat([turn.temperature for turn in turns], counts).astype(np.float32)),
        turn_ends=ints((np.cumsum(counts) - 1).astype(np.int32)),
        turn_rewards=floats([turn.reward for turn in turns]),
        branch=branch,
        trajectory_id=trajectory.trajectory_id,
        episode_id=trajectory.episode_id,
    )
