"""Advantages: what an estimator is given and returns. The estimators themselves are in `agentrl.algo.estimators`.

torch is imported when advantages are computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from agentrl.algo.statistics import (
    SAME,
    next_in_segment,
    reverse_discounted_cumsum,
    segment_count,
    segment_ends,
    segment_mean,
    segment_std,
    segment_sum,
)
from agentrl.core.errors import BatchError, ConfigError
from agentrl.core.settings import Fraction

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """Options that every estimator has; those of an estimator inherit from them.

    Raises:
        ConfigError: If the range of rewards is empty or does not contain 0.
    """

    advantage_std_norm: bool = True
    """Divide by the standard deviation where the estimator whitens or normalises."""
    reward_clip_range: tuple[float, float] | None = None
    """Range to which rewards are clipped before any baseline; unset: they are taken as they are."""

    def __post_init__(self) -> None:
        flag, (low, high) = "--reward-clip-range", self.bounds
        if not low < high:
            raise ConfigError(flag, (low, high), "the first number must be smaller than the second", "Swap them.")
        if not low <= 0.0 <= high:
            raise ConfigError(flag, (low, high), "must contain 0", "Give a lower bound <= 0 and an upper bound >= 0.")

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest reward after clipping."""
        return self.reward_clip_range or (-math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class DiscountedOptions(AdvantageOptions):
    """Options of an estimator with a discount."""

    gamma: Fraction = 1.0
    """Discount per action token, or per turn for ``turn_gae`` and ``turn_norm``; estimators without a discount take 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageInputs:
    """The A action tokens of a step's E episodes, episode after episode, and what they earned.

    Attributes:
        token_rewards: Each turn's reward at its last action token, those of steps within it at theirs; sums to `rewards`. # [A]
        episode: Episode of each token, non-decreasing; branches of an episode follow each other in time. # [A] int64
        group: Group of each episode; agents of an episode are in groups of their own. # [E] int64
        rewards: Total reward of each episode, not clipped. # [E]
        values: The critic's values, for estimators that need one. # [A]
        at_cut: The critic's value of the state in which each episode was cut short, 0 for those that ended; `None` if what an episode did
            not come to earn counts as 0. # [E]
        kl: Penalty to subtract, already multiplied by its coefficient; `None` if KL is not in the reward. # [A]
        turn: Turn of each token, non-decreasing; a turn belongs to one episode. `None`: every episode is one turn. # [A] int64
        state: State that each token's turn began in; equal numbers are equal states of one group. `None`: not known. # [A] int64
        parts: Named components of the rewards, not clipped. # name -> [E]
        baseline: Reward of the greedy episode of the same task, for `remax`. # [E]

    Raises:
        BatchError: If the lengths disagree.
    """

    token_rewards: Tensor
    episode: Tensor
    group: Tensor
    rewards: Tensor
    values: Tensor | None = None
    kl: Tensor | None = None
    turn: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    baseline: Tensor | None = None
    state: Tensor | None = None
    at_cut: Tensor | None = None

    def __post_init__(self) -> None:
        per_token = {"episode": self.episode, "values": self.values, "kl": self.kl, "turn": self.turn, "state": self.state}
        for name, tensor in per_token.items():
            if tensor is not None and tensor.shape != self.token_rewards.shape:
                raise BatchError(
                    f"{name} has shape {tuple(tensor.shape)}, token_rewards {tuple(self.token_rewards.shape)}: one entry per action token"
                )
        per_episode = {"group": self.group, "baseline": self.baseline, "at_cut": self.at_cut, **self.parts}
        for name, tensor in per_episode.items():
            if tensor is not None and tensor.shape != self.rewards.shape:
                raise BatchError(f"{name} has shape {tuple(tensor.shape)}, rewards {tuple(self.rewards.shape)}: one entry per episode")

    def clipped_rewards(self, options: AdvantageOptions) -> Tensor:
        """Return the reward of each episode, clipped. # [E].

        In float64: in float32 the rounding of a mean of equal rewards is as large as the 1e-9 that guards a division by a deviation.
        """
        low, high = options.bounds
        return self.rewards.double().clamp(low, high)

    def clipped_token_rewards(self, options: AdvantageOptions) -> Tensor:
        """Return the token rewards, scaled where the reward of their episode was clipped, minus KL. # [A]."""
        return self._charged(self._clipped_tokens(options))

    def _clipped_tokens(self, options: AdvantageOptions) -> Tensor:
        low, high = options.bounds
        clipped = self.rewards.clamp(low, high)
        # A reward of 0 is never clipped, because the range contains 0, so that 0 / 0 is never taken.
        scale = (clipped / self.rewards).where(clipped != self.rewards, 1.0)
        return self.token_rewards * scale[self.episode].to(self.token_rewards.dtype)

    def turns(self, options: AdvantageOptions) -> Turns:
        """Return the turns of the batch with their rewards, scaled as those of `clipped_token_rewards`, without KL."""
        import torch

        turn = self.episode if self.turn is None else self.turn
        _, of_token, length = torch.unique_consecutive(turn, return_inverse=True, return_counts=True)
        start = length.cumsum(0) - length
        episode = self.episode[start]
        number = torch.arange(len(length), device=turn.device)
        first = episode.new_zeros(len(self.rewards))
        first = first.scatter_reduce(0, episode, number, "amin", include_self=False)
        rewards = segment_sum(self._clipped_tokens(options).double(), of_token, len(length))
        return Turns(of_token=of_token, start=start, episode=episode, place=number - first[episode], rewards=rewards)

    def same_turns(self, turns: Turns) -> tuple[Tensor, int]:
        """Number the turns by group and place, so that those of a group at the same place have the same number; and count the numbers."""
        import torch

        group, _ = self._dense_groups()
        places = int(turns.place.max()) + 1 if len(turns.place) else 1
        dense, index = torch.unique(group[turns.episode] * places + turns.place, return_inverse=True)
        return index, len(dense)

    def same_states(self, turns: Turns) -> tuple[Tensor, int]:
        """Number the turns by the state that they began in, and count the numbers; where states are not known, as `same_turns`."""
        import torch

        if self.state is None:
            return self.same_turns(turns)
        dense, index = torch.unique(self.state[turns.start], return_inverse=True)
        return index, len(dense)

    def group_size(self) -> Tensor:
        """Return the number of episodes in the group of each episode. # [E] float64."""
        group, groups = self._dense_groups()
        return segment_count(group, groups)[group].double()

    def group_sum(self, per_episode: Tensor) -> Tensor:
        """Return the sum over the group of each episode. # [E] -> [E]."""
        group, groups = self._dense_groups()
        return segment_sum(per_episode, group, groups)[group]

    def group_mean(self, per_episode: Tensor) -> Tensor:
        """Return the mean over the group of each episode. # [E] -> [E]."""
        group, groups = self._dense_groups()
        return segment_mean(per_episode, group, groups)[group]

    def group_std(self, per_episode: Tensor) -> Tensor:
        """Return the unbiased standard deviation over the group of each episode, 0 in a group of one. # [E] -> [E]."""
        group, groups = self._dense_groups()
        return segment_std(per_episode, group, groups)[group]

    def group_normalised(self, per_episode: Tensor, options: AdvantageOptions) -> Tensor:
        """Return the numbers minus their mean over the group, divided by its deviation unless switched off; see `standardised`. # [E]."""
        return standardised(per_episode, *self._dense_groups(), divide=options.advantage_std_norm)

    def over_tokens(self, per_episode: Tensor) -> Tensor:
        """Give every token the number of its episode, minus the KL from the token on. # [E] -> [A]."""
        spread = per_episode.to(self.token_rewards.dtype)[self.episode]
        return spread if self.kl is None else spread - self.sum_ahead(self.kl)

    def at_last_token(self, per_episode: Tensor) -> Tensor:
        """Give the last token of each episode the number of the episode and others 0, minus KL. # [E] -> [A]."""
        spread = per_episode.to(self.token_rewards.dtype)[self.episode]
        return self._charged(spread.where(segment_ends(self.episode), 0.0))

    def next_token(self, per_token: Tensor) -> Tensor:
        """Give every token the number of the next token in its episode, 0 behind the last. # [A] -> [A]."""
        return next_in_segment(per_token, self.episode)

    def next_values(self, values: Tensor, episode: Tensor) -> Tensor:
        """Return the value of the state after each token or turn: that before the next, or behind the last `at_cut`. # [N] -> [N].

        Args:
            values: Value of the state before each token or turn. # [N]
            episode: Episode of each, non-decreasing. # [N] int64
        """
        ahead = next_in_segment(values, episode)
        if self.at_cut is None:
            return ahead
        return self.at_cut.to(values.dtype)[episode].where(segment_ends(episode), ahead)

    def sum_ahead(self, per_token: Tensor, discount: float | Tensor = 1.0) -> Tensor:
        """Return the discounted sum from each token to the end of its episode; a tensor has a discount for each episode. # [A] -> [A]."""
        return reverse_discounted_cumsum(per_token, self.episode, discount)

    def _charged(self, per_token: Tensor) -> Tensor:
        return per_token if self.kl is None else per_token - self.kl

    def _dense_groups(self) -> tuple[Tensor, int]:
        """Group of each episode, numbered from 0 without gaps, and the number of groups."""
        import torch

        dense, group = torch.unique(self.group, return_inverse=True)
        return group, len(dense)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The T turns of a batch, in the order of their tokens.

    Attributes:
        of_token: Turn of each token, from 0 without gaps. # [A] int64
        start: First token of each turn. # [T] int64
        episode: Episode of each turn. # [T] int64
        place: Place of each turn among those of its episode, from 0. # [T] int64
        rewards: What each turn earned. # [T] float64
    """

    of_token: Tensor
    start: Tensor
    episode: Tensor
    place: Tensor
    rewards: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """Advantages with targets for a critic.

    Attributes:
        advantages: One per action token. # [A]
        returns: Targets of the critic. # [A]
    """

    advantages: Tensor
    returns: Tensor | None = None


Estimator: TypeAlias = "Callable[[AdvantageInputs, Any], Tensor | Advantages]"
"""From the inputs and the estimator's own options to advantages."""


def standardised(values: Tensor, index: Tensor, size: int, *, divide: bool = True) -> Tensor:
    """Return ``(values - mean) / (std + 1e-9)`` within each segment, with the unbiased deviation, or ``values - mean``. # [N] -> [N].

    0 where the deviation is rounding, at most `SAME` of the mean absolute value, which the division would make as large as any other.
    """
    centred = values - segment_mean(values, index, size)[index]
    if not divide:
        return centred
    deviation, scale = segment_std(values, index, size), segment_mean(values.abs(), index, size)
    # No larger number is added, so that small rewards keep their normalisation.
    return (centred / (deviation + 1e-9)[index]).where((deviation > SAME * scale)[index], 0.0)


def whiten(values: Tensor, *, std_norm: bool = True) -> Tensor:
    """Return ``(values - mean) / sqrt(max(variance, 1e-8))`` over all tokens of the batch, or ``values - mean``. # [A] -> [A].

    The variance is the biased one.
    """
    exact, count = values.double(), max(len(values), 1)
    centred = exact - exact.sum() / count
    if std_norm:
        variance = centred.square().sum() / count
        # Bounded below and not increased, which leaves ordinary batches alone.
        centred = centred * variance.clamp(min=1e-8).rsqrt()
    return centred.to(values.dtype)
