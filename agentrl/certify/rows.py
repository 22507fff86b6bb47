"""Rows to try a twin on: two groups that share prompts, with short and long rows on both sides of the twin's windows and thresholds."""

from __future__ import annotations

import numpy as np

from agentrl.certify.sizes import VOCABULARY
from agentrl.core.types import FinishReason, Group, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.batch import Batch, collate

LENGTHS = ((9, (4, 30, 12)), (37, (9, 41, 20)))
"""Tokens of the prompt of each group, and of the answers of its members."""


def trial_batch(seed: int = 0) -> Batch:
    """Return a batch of random tokens, the same for the same seed."""
    rng = np.random.default_rng(seed)
    groups = []
    for number, (prompt, answers) in enumerate(LENGTHS):
        before = rng.integers(3, VOCABULARY - 8, prompt).tolist()
        turns = [_turn(before, rng.integers(3, VOCABULARY - 8, answer).tolist()) for answer in answers]
        members = tuple(_member(turn, number, member) for member, turn in enumerate(turns))
        groups.append(Group(group_id=number, task=Task(""), trajectories=members))
    return collate(groups)


def _turn(prompt: list[int], answer: list[int]) -> Turn:
    return Turn(
        prompt_ids=ints(prompt),
        token_ids=ints(answer),
        logprobs=floats([0.0] * len(answer)),
        versions=ints([0] * len(answer)),
        finish_reason=FinishReason.STOP,
    )


def _member(turn: Turn, group: int, member: int) -> Trajectory:
    name = f"{group}-{member}"
    return Trajectory(trajectory_id=name, episode_id=name, group_id=group, turns=(turn,), status=Status.FINISHED, reward=0.0)
