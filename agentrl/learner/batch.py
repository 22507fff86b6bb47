"""From groups of trajectories, by way of training rows, to the packed tensors that a training step works on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo.advantages import AdvantageInputs
from agentrl.core.errors import BatchError
from agentrl.core.images import PlacedImage
from agentrl.core.metrics import MetricSums
from agentrl.core.types import FloatArray, Group, IntArray, Status, Trajectory, Turn, floats, ints
from agentrl.learner.rows import Rows, moved


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRow:
    """The turns of one context as a row; L tokens, A of them sampled. Its arrays are made when they are asked for."""

    turns: tuple[Turn, ...]  # those that one context holds, in order of time
    branch: int  # number of the row within its trajectory, from 0
    trajectory_id: str  # the trajectory it came from
    episode_id: str  # the episode it came from; every branch has the same, and an episode counts once

    @property
    def tokens(self) -> IntArray:
        """Everything the model saw and wrote, in order. # [L]."""
        return ints(np.concatenate([part for turn in self.turns for part in (turn.prompt_ids, turn.token_ids)]))

    @property
    def experts(self) -> npt.NDArray[np.int16] | None:
        """Experts that each token but the last went through in the engine, -1 where they are not known. # [L - 1, layers, top_k].

        `None` if none are known.

        Raises:
            BatchError: If a turn has experts of more or fewer tokens than it adds to the row.
        """
        shape = experts_shape(self.turns)
        if shape is None:
            return None
        parts = []
        for number, turn in enumerate(self.turns):
            count = len(turn.prompt_ids) + len(turn.token_ids) - (number == 0)
            if turn.experts is not None and len(turn.experts) != count:
                problem = f"turn {number} has experts of {len(turn.experts)} tokens and needs those of {count}"
                raise BatchError(f"trajectory {self.trajectory_id}: {problem}")
            parts.append(np.full((count, *shape), -1, np.int16) if turn.experts is None else turn.experts.astype(np.int16))
        return np.concatenate(parts)

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """Images among its tokens, in their order."""
        found: list[PlacedImage] = []
        place = 0
        for turn in self.turns:
            found += [each.moved(place) for each in turn.images]
            place += len(turn.prompt_ids) + len(turn.token_ids)
        return tuple(found)

    @property
    def action_positions(self) -> IntArray:
        """Places of the sampled tokens in `tokens`, ascending. # [A]."""
        lengths = [len(part) for turn in self.turns for part in (turn.prompt_ids, turn.token_ids)]
        return ints(np.flatnonzero(np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)).astype(np.int32))

    @property
    def reads(self) -> IntArray:
        """Places that predict the sampled tokens. # [A]."""
        return ints(self.action_positions - 1)

    @property
    def temperatures(self) -> FloatArray:
        """Temperature at which each token was sampled. # [A]."""
        return floats(np.repeat([turn.temperature for turn in self.turns], [len(turn.token_ids) for turn in self.turns]).astype(np.float32))


def experts_shape(turns: Iterable[Turn]) -> tuple[int, ...] | None:
    """Layers and experts per token of the recorded experts of some turns; `None` if none has any."""
    return next((turn.experts.shape[1:] for turn in turns if turn.experts is not None), None)


def merge_turns(trajectory: Trajectory) -> tuple[TurnRow, ...]:
    """Join the turns of an episode into as few rows as the contexts allow; every turn is in exactly one.

    A turn that extends the tokens so far joins the row; a `fresh` turn, whose context was rewritten, begins a new one. Branches that are
    masked are left out.

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
    trained = (turns for turns in branches if not turns[0].masked)
    return tuple(
        TurnRow(turns=tuple(turns), branch=branch, trajectory_id=trajectory.trajectory_id, episode_id=trajectory.episode_id)
        for branch, turns in enumerate(trained)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch(Rows):
    """One step's groups as flat tensors, without padding; never changed in place.

    A action (sampled) tokens in R rows, E episodes in G groups. Rows of an episode follow each other in time, episodes of a group
    follow each other, and so do the action tokens. An episode without rows is not trained; its reward counts in its group. Every rank
    holds all of this; the tokens stay in the rows, and only the rank that trains a row joins them.

    Where several agents play, each trajectory counts as an episode here, and a group is what one agent did in the members
    of a task's group: estimators compare an agent with itself only.
    """

    rows: tuple[TurnRow, ...]  # [R]
    row_episode: Tensor  # [R] int64: episode of each row
    episode: Tensor  # [A] int64: episode of each action token
    turn: Tensor  # [A] int64: turn of each action token, counted over the batch
    state: Tensor  # [A] int64: state that the turn began in; equal numbers are equal states of one group
    group: Tensor  # [E] int64: group of each episode, from 0
    logprobs: Tensor  # [A] float32: behaviour log-probability
    versions: Tensor  # [A] int64: policy version that sampled the token
    token_rewards: Tensor  # [A] float32: rewards of steps and turns at their last action tokens; sum to `rewards` per episode
    rewards: Tensor  # [E] float32: reward of each episode
    parts: Tensor  # [K, E] float32: named components of the rewards, 0 where an episode has none of that name
    part_names: tuple[str, ...]  # [K]: their names
    baseline: Tensor | None = None  # [E] float32: reward of the greedy episode beside each; `None` unless every group has one
    cuts: tuple[tuple[int, Turn | None], ...] = ()  # of each episode cut short: its last row, and what it would have read next, if known
    # Scores of a served teacher, `None` unless every turn has them:
    teacher: Tensor | None = None  # [A] float32: its log-probability of each action token
    teacher_ids: Tensor | None = None  # [A, K] int64: its most likely tokens there
    teacher_top: Tensor | None = None  # [A, K] float32: their log-probabilities, -inf where there are fewer

    def __post_init__(self) -> None:
        for name in ("episode", "turn", "state", "logprobs", "versions", "token_rewards"):
            if len(getattr(self, name)) != self.num_actions:
                raise BatchError(f"{name} has {len(getattr(self, name))} entries for {self.num_actions} action tokens")
        if len(self.group) != len(self.rewards):
            raise BatchError(f"{len(self.group)} episodes have a group but {len(self.rewards)} have a reward")

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
        return self.group[self.row_episode]

    def input_lengths(self) -> Tensor:
        """Tokens of each row that the model must see: all before its last, which is an action token. # [R] int64."""
        return self.row_lengths - 1

    def experts_shape(self) -> tuple[int, ...] | None:
        """Layers and experts per token of the recorded experts; `None` if no turn has any."""
        return experts_shape(turn for row in self.rows for turn in row.turns)

    def episode_length(self) -> Tensor:
        """Action tokens of each token's episode, over all its rows. # [A] int64."""
        return torch.bincount(self.episode, minlength=self.num_episodes)[self.episode]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on another device."""
        return moved(self, device)


def collate(groups: Iterable[Group], *, mask_truncated: bool = False, in_baseline: bool = True) -> Batch:
    """Make the batch of a step, on the CPU, of groups ordered oldest first; no other function makes one.

    Members that may not be trained are left out, and so are groups without any that may. A task's group is ordered by agent, then by
    member.

    Args:
        groups: The groups.
        mask_truncated: Make no rows of the episodes that were cut short.
        in_baseline: Keep their rewards, for the baselines of their groups; otherwise they are left out like members that failed.

    Raises:
        BatchError: If nothing can be trained, or a row's first token is an action token (nothing predicts it).
    """
    groups = tuple(groups)
    members = [(group, t) for group, t in _numbered(groups) if in_baseline or not (mask_truncated and t.cut_short)]
    trained = [(episode, t) for episode, (_, t) in enumerate(members) if not (mask_truncated and t.cut_short)]
    if not trained:
        raise BatchError("no group has a trajectory that may be trained on; every member failed, sampled nothing or was cut short")
    owned = [(episode, _checked(row)) for episode, t in trained for row in merge_turns(t)]
    rows = tuple(row for _, row in owned)
    turns = [turn for row in rows for turn in row.turns]
    sampled = np.array([len(turn.token_ids) for turn in turns])
    given = np.array([len(turn.prompt_ids) for turn in turns])
    begins = np.cumsum([0, *(len(row.turns) for row in rows[:-1])])
    counts = np.add.reduceat(sampled, begins)
    row_episode = np.array([number for number, _ in owned])
    episode = np.repeat(row_episode, counts)
    group = np.array([number for number, _ in members])
    rewards = np.asarray([t.reward for _, t in members], dtype=np.float32)
    names = tuple(sorted({name for _, t in members for name in t.reward_parts}))
    parts = np.array([[t.reward_parts.get(name, 0.0) for _, t in members] for name in names], dtype=np.float32)
    return Batch(
        rows=rows,
        row_lengths=torch.from_numpy(np.add.reduceat(sampled + given, begins)),
        row_actions=torch.from_numpy(counts),
        row_episode=torch.from_numpy(row_episode),
        row=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        episode=torch.from_numpy(episode),
        turn=torch.from_numpy(np.repeat(np.arange(len(turns)), sampled)),
        state=torch.from_numpy(np.repeat(_states(turns, np.repeat(group[row_episode], [len(row.turns) for row in rows])), sampled)),
        group=torch.from_numpy(group),
        logprobs=torch.from_numpy(np.concatenate([turn.logprobs for turn in turns])),
        versions=torch.from_numpy(np.concatenate([turn.versions for turn in turns]).astype(np.int64)),
        token_rewards=torch.from_numpy(_token_rewards(turns, sampled, episode, rewards)),
        rewards=torch.from_numpy(rewards),
        parts=torch.from_numpy(parts.reshape(len(names), len(members))),
        part_names=names,
        baseline=_baseline(groups, [t for _, t in members]),
        cuts=_cuts(trained, row_episode.tolist()),
        **_taught(turns),
    )


def _cuts(trained: Sequence[tuple[int, Trajectory]], row_episode: Sequence[int]) -> tuple[tuple[int, Turn | None], ...]:
    """Return the last row of each episode that a limit cut, with what it would have read next; `row_episode` is the episode of each row."""
    last = {episode: row for row, episode in enumerate(row_episode)}
    return tuple((last[episode], t.unread) for episode, t in trained if t.status is Status.TRUNCATED)


def _states(turns: Sequence[Turn], group: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Number the turns by group and the state that they began in, which is what the model read before it unless it has a name. # [T]."""
    known: dict[tuple[int, object], int] = {}
    keys = zip(group.tolist(), (turn.state for turn in turns), strict=True)
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


def _taught(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the scores of a teacher, by the names that they have in a batch; nothing unless every turn has them."""
    scores = [turn.teacher for turn in turns if turn.teacher is not None]
    if len(scores) < len(turns):
        return {}
    return {
        "teacher": torch.from_numpy(np.concatenate([each.logprobs for each in scores])),
        "teacher_ids": torch.from_numpy(np.concatenate([each.top_ids for each in scores]).astype(np.int64)),
        "teacher_top": torch.from_numpy(np.concatenate([each.top_logprobs for each in scores])),
    }


def _baseline(groups: Sequence[Group], members: Sequence[Trajectory]) -> Tensor | None:
    """Rewards of the greedy episodes, for each member that of the same agent in its group. # [E]."""
    rewards = {(t.group_id, t.agent): t.reward for group in groups for t in group.greedy}
    found = [rewards.get((t.group_id, t.agent)) for t in members]
    return None if any(reward is None for reward in found) else torch.tensor(found, dtype=torch.float32)


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


def _checked(row: TurnRow) -> TurnRow:
    if not len(row.turns[0].prompt_ids):
        raise BatchError(f"trajectory {row.trajectory_id}: its first token was sampled, so nothing predicts it; a prompt must not be empty")
    return row


def _token_rewards(
    turns: Sequence[Turn], sampled: npt.NDArray[np.int64], episode: npt.NDArray[np.int64], rewards: FloatArray
) -> FloatArray:
    """Rewards of steps at their tokens, the rest of turn rewards at their last ones; what an episode earned beside, at its last. # [A]."""
    placed, ends = np.zeros(len(episode)), np.cumsum(sampled)
    placed[ends - 1] = np.asarray([turn.reward for turn in turns], dtype=np.float32)
    for turn, end in zip(turns, ends, strict=True):
        for place, value in turn.step_rewards:
            placed[end - len(turn.token_ids) + place] += value
            placed[end - 1] -= value
    sums = np.bincount(episode, weights=placed, minlength=len(rewards))
    last = np.flatnonzero(np.append(episode[1:] != episode[:-1], True))
    placed[last] += (rewards - sums)[episode[last]]
    return placed.astype(np.float32)


def advantage_inputs(batch: Batch, values: Tensor | None = None, kl: Tensor | None = None, at_cut: Tensor | None = None) -> AdvantageInputs:
    """Return what estimators are given of a batch, with the critic's values and the KL penalty, if there are any. # [A], [A], [E]."""
    return AdvantageInputs(
        token_rewards=batch.token_rewards,
        episode=batch.episode,
        group=batch.group,
        rewards=batch.rewards,
        values=values,
        kl=kl,
        turn=batch.turn,
        state=batch.state,
        parts=dict(zip(batch.part_names, batch.parts, strict=True)),
        baseline=batch.baseline,
        at_cut=at_cut,
    )


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
