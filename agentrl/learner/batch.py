"""From groups of trajectories, by way of training rows, to the packed tensors that a training step works on."""

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
from agentrl.core.metrics import MetricSums
from agentrl.core.types import FloatArray, Group, IntArray, Trajectory, Turn, floats, ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One sequence to train on; L tokens, A of them sampled, in K turns."""

    tokens: IntArray  # [L]: everything the model saw and wrote, in order
    action_positions: IntArray  # [A]: where in `tokens` the sampled ones are, ascending
    logprobs: FloatArray  # [A]: behaviour log-probabilities
    versions: IntArray  # [A]: policy versions
    temperatures: FloatArray  # [A]: sampling temperatures
    turn_ends: IntArray  # [K]: index in 0..A-1 of the last sampled token of each turn
    turn_rewards: FloatArray  # [K]: reward of each turn
    branch: int  # number of the row within its trajectory, from 0
    trajectory_id: str  # the trajectory it came from
    episode_id: str  # the episode it came from; every branch has the same, and an episode counts once


def merge_turns(trajectory: Trajectory) -> tuple[Row, ...]:
    """Join the turns of an episode into as few rows as the contexts allow; every sampled token, and every turn's reward, is in exactly one.

    A turn that extends the tokens so far joins the row; a `fresh` turn, whose context was rewritten, begins a new one.

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step's groups as flat tensors, without padding; never changed in place.

    N tokens in R rows, of which A are action (sampled) tokens, E episodes in G groups. Rows of an episode follow each
    other in time, episodes of a group follow each other, and so do the action tokens.

    Where several agents play, each trajectory counts as an episode here, and a group is what one agent did in the members
    of a task's group: estimators compare an agent with itself only.
    """

    tokens: Tensor  # [N] int64: all rows back to back
    offsets: Tensor  # [R + 1] int64: row r is ``tokens[offsets[r]:offsets[r + 1]]``
    position: Tensor  # [A] int64: place of each action token in `tokens`; its logits are one place earlier
    row: Tensor  # [A] int64: row of each action token
    episode: Tensor  # [A] int64: episode of each action token
    group: Tensor  # [E] int64: group of each episode, from 0
    logprobs: Tensor  # [A] float32: behaviour log-probability
    versions: Tensor  # [A] int64: policy version that sampled the token
    temperature: Tensor  # [A] float32: sampling temperature
    token_rewards: Tensor  # [A] float32: turn rewards at the turns' last action tokens; sum to `rewards` per episode
    rewards: Tensor  # [E] float32: reward of each episode

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
    """Make the batch of a step, on the CPU, of groups ordered oldest first; no other function makes one.

    Members that may not be trained are left out, and so are groups without any that may. A task's group is ordered by agent, then by
    member.

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


def describe_batch(batch: Batch, step: int) -> MetricSums:
    """Sizes and ages of a whole batch that is trained on weights of version `step`.

    ``tokens/trained`` (sampled ones), ``tokens/rows`` (all), ``rows``, ``episodes`` and ``groups`` (as in `Batch`: one for each agent);
    over trained tokens ``staleness/mean``, ``staleness/max`` and ``staleness/share_<k>``, the share that is exactly k versions old.
    """
    stats = MetricSums()
    for name, value in {
        "tokens/trained": batch.num_actions,
        "tokens/rows": batch.num_tokens,
        "rows": batch.num_rows,
        "episodes": batch.num_episodes,
        "groups": batch.num_groups,
    }.items():
        stats.total(name, float(value))
    age = step - batch.versions
    stats.mean("staleness/mean", float(age.sum()), float(batch.num_actions))
    stats.high("staleness/max", float(age.max()))
    for versions, count in zip(*(part.tolist() for part in torch.unique(age, return_counts=True)), strict=True):
        stats.mean(f"staleness/share_{versions}", float(count), float(batch.num_actions))
    return stats
