"""From groups of trajectories to the packed tensors that a training step works on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.core.errors import BatchError
from agentrl.core.types import FloatArray, Group, Trajectory
from agentrl.learner.rows import Row, merge_turns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step's groups as flat tensors, without padding; never changed in place.

    N tokens in R rows, of which A are action (sampled) tokens, E episodes in G groups. Rows of an episode follow each
    other in time, episodes of a group follow each other, and so do the action tokens.

    Where several agents play, each trajectory counts as an episode here, and a group is what one agent did in the members
    of a task's group: estimators compare an agent with itself only.

    Attributes:
        tokens: All rows back to back. # [N] int64
        offsets: Row r is ``tokens[offsets[r]:offsets[r + 1]]``. # [R + 1] int64
        position: Place of each action token in `tokens`; its logits are one place earlier. # [A] int64
        row: Row of each action token. # [A] int64
        episode: Episode of each action token. # [A] int64
        group: Group of each episode, from 0. # [E] int64
        logprobs: Behaviour log-probability. # [A] float32
        versions: Policy version that sampled the token. # [A] int64
        temperature: Sampling temperature. # [A] float32
        token_rewards: Turn rewards at the turns' last action tokens; sum to `rewards` per episode. # [A] float32
        rewards: Reward of each episode. # [E] float32
    """

    tokens: Tensor
    offsets: Tensor
    position: Tensor
    row: Tensor
    episode: Tensor
    group: Tensor
    logprobs: Tensor
    versions: Tensor
    temperature: Tensor
    token_rewards: Tensor
    rewards: Tensor

    def __post_init__(self) -> None:
        for name in ("row", "episode", "logprobs", "versions", "temperature", "token_rewards"):
            if len(getattr(self, name)) != self.num_actions:
                raise BatchError(f"{name} has {len(getattr(self, name))} entries for {self.num_actions} action tokens")
        if len(self.group) != len(self.rewards):
            raise BatchError(f"{len(self.group)} episodes have a group but {len(self.rewards)} have a reward")

    @property
    def num_tokens(self) -> int:
        """Tokens, sampled or not."""
        return len(self.tokens)

    @property
    def num_actions(self) -> int:
        """Action tokens."""
        return len(self.position)

    @property
    def num_rows(self) -> int:
        """Training rows."""
        return len(self.offsets) - 1

    @property
    def num_episodes(self) -> int:
        """Episodes."""
        return len(self.rewards)

    @property
    def num_groups(self) -> int:
        """Groups."""
        return int(self.group[-1]) + 1

    def row_group(self) -> Tensor:
        """Group of each row. # [R] int64."""
        groups = torch.zeros(self.num_rows, dtype=torch.int64, device=self.row.device)
        return groups.index_copy(0, self.row, self.group[self.episode])

    def input_lengths(self) -> Tensor:
        """Tokens of each row that the model must see: all before its last action token. # [R] int64."""
        last = torch.zeros(self.num_rows, dtype=torch.int64, device=self.row.device)
        return last.scatter_reduce(0, self.row, self.position, "amax") - self.offsets[:-1]

    def first_actions(self) -> Tensor:
        """Tokens of each row before its first action token. # [R] int64."""
        first = torch.full((self.num_rows,), self.num_tokens, dtype=torch.int64, device=self.row.device)
        return first.scatter_reduce(0, self.row, self.position, "amin") - self.offsets[:-1]

    def episode_length(self) -> Tensor:
        """Action tokens of each token's episode, over all its rows. # [A] int64."""
        return torch.bincount(self.episode, minlength=self.num_episodes)[self.episode]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


def collate(groups: Iterable[Group]) -> Batch:
    """Make the batch of a step; no other function makes one.

    Args:
        groups: Groups of one step, oldest first; members that may not be trained are left out, and so are groups
            without any that may.

    Returns:
        The batch, on the CPU; within a task's group ordered by agent, then by member.

    Raises:
        BatchError: If nothing can be trained, or a row's first token is an action token (nothing predicts it).
    """
    members = list(_numbered(groups))
    if not members:
        raise BatchError("no group has a trajectory that may be trained on; every member failed or sampled nothing")
    owned = [(episode, _checked(row)) for episode, (_, t) in enumerate(members) for row in merge_turns(t)]
    rows = [row for _, row in owned]
    offsets = np.concatenate([[0], np.cumsum([len(row.tokens) for row in rows])]).astype(np.int64)
    counts = [len(row.action_positions) for row in rows]
    episode = np.repeat([number for number, _ in owned], counts).astype(np.int64)
    rewards = np.asarray([t.reward for _, t in members], dtype=np.float32)
    return Batch(
        tokens=_join([row.tokens for row in rows], np.int64),
        offsets=torch.from_numpy(offsets),
        position=_join([row.action_positions + start for row, start in zip(rows, offsets, strict=False)], np.int64),
        row=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        episode=torch.from_numpy(episode),
        group=torch.tensor([number for number, _ in members], dtype=torch.int64),
        logprobs=_join([row.logprobs for row in rows], np.float32),
        versions=_join([row.versions for row in rows], np.int64),
        temperature=_join([row.temperatures for row in rows], np.float32),
        token_rewards=torch.from_numpy(_token_rewards(rows, episode, rewards)),
        rewards=torch.from_numpy(rewards),
    )


def _numbered(groups: Iterable[Group]) -> Iterator[tuple[int, Trajectory]]:
    """Return the trainable trajectories, numbered from 0 by agent and group."""
    numbers = itertools.count()
    for group in groups:
        by_agent: dict[str, list[Trajectory]] = {}
        for trajectory in group.trainable:
            by_agent.setdefault(trajectory.agent, []).append(trajectory)
        for trajectories in by_agent.values():
            number = next(numbers)
            yield from ((number, trajectory) for trajectory in trajectories)


def _checked(row: Row) -> Row:
    if int(row.action_positions[0]) < 1:
        raise BatchError(f"trajectory {row.trajectory_id}: its first token was sampled, so nothing predicts it; a prompt must not be empty")
    return row


def _join(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype))


def _token_rewards(rows: Sequence[Row], episode: npt.NDArray[np.int64], rewards: FloatArray) -> FloatArray:
    """Turn rewards at their last action tokens; what an episode earned beside them, at its last one. # [A]."""
    placed = np.zeros(len(episode))
    start = 0
    for row in rows:
        placed[start + row.turn_ends] = row.turn_rewards
        start += len(row.action_positions)
    sums = np.bincount(episode, weights=placed, minlength=len(rewards))
    last = np.flatnonzero(np.append(episode[1:] != episode[:-1], True))
    placed[last] += rewards - sums
    return placed.astype(np.float32)
